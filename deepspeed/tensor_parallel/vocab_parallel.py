"""Vocabulary-parallel embedding, output projection and loss (Megatron-LM, arXiv:1909.08053, section 3)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from deepspeed.comm import ReduceOp
from deepspeed.comm.collectives.autograd import reduce_from, summed
from deepspeed.comm.collectives.same_error import comparison, meet_before, run_collectively
from deepspeed.comm.collectives.torch_api import all_gather_objects, all_reduce
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import ArgumentError, NotAvailableError, TensorParallelError
from deepspeed.foundation.equivalence import relative_difference, tolerance
from deepspeed.foundation.hf_forward import counts_items, named_arguments
from deepspeed.foundation.partition import partition_uniform
from deepspeed.tensor_parallel.layers import (
    SliceLocation,
    become_column,
    cut_tensor,
    even_segments,
    even_sizes,
    is_linear,
)
from deepspeed.zero.parameters.grouping import unshard


class VocabParallelEmbedding(nn.Embedding):
    """Embedding with a slice of the rows on each rank.

    Args:
        num_embeddings: rows of the whole table, divided as evenly as possible.
        embedding_dim: number of columns.
        padding_idx: index, in the whole table, of a row without gradient; None: all rows have gradients.
        axis: the ranks of the table.
        name: name of the table in error messages.
        device, dtype: device and dtype of the table; None: torch's defaults.

    Initial values are drawn for the whole table, so ranks with equal seeds have slices of the same table.

    Raises:
        ArgumentError: there are fewer rows than ranks.
    """

    slot: SliceLocation
    first: int
    whole: int

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        axis: Axis,
        name: str = "embedding",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        become_vocabulary_slice(self, SliceLocation(axis, name))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map indices of any shape to (…, embedding_dim), equal on all ranks. All ranks must call this.

        Raises:
            IndexError: an index is outside of the whole table, as in torch; RuntimeError in a compiled graph.
        """
        outside = f"{self.slot.name}: an index outside of the {self.whole} rows of the table"
        if torch.compiler.is_compiling():  # an operator of the graph: a value read by Python would end it
            torch._assert_async(((input >= 0) & (input < self.whole)).all(), outside)
        elif input.numel() and not (0 <= int(input.min()) and int(input.max()) < self.whole):
            raise IndexError(outside)
        local = input - self.first
        here = (local >= 0) & (local < self.num_embeddings)
        padding = self.padding_idx
        rows = F.embedding(local.clamp(0, self.num_embeddings - 1), self.weight, None, scale_grad_by_freq=False)
        if padding is not None:  # its row is read, without gradient
            rows = torch.where((input == padding)[..., None], rows.detach(), rows)
        rows = rows.masked_fill(~here[..., None], 0.0)
        return reduce_from(rows, self.slot.axis, f"rows of {self.slot.label}")


def become_vocabulary_slice(module: nn.Embedding, slot: SliceLocation) -> None:
    """Turn an embedding into a `VocabParallelEmbedding` with this rank's rows, in place.

    Raises:
        ArgumentError: there are fewer rows than ranks, or max_norm, scale_grad_by_freq or sparse is set.
    """
    table: Any = module
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ArgumentError(f"{slot.name}: max_norm, scale_grad_by_freq and sparse do not work on a split table")
    segments = even_segments(module.num_embeddings, slot.axis, slot.name)
    if type(module) is not VocabParallelEmbedding:
        table.__class__ = VocabParallelEmbedding
    table.slot, table.first, table.whole = slot, segments[0][0], module.num_embeddings
    cut_tensor(table.weight, 0, segments)
    table.num_embeddings = segments[0][1]


class _CrossEntropy(torch.autograd.Function):
    """Autograd function: cross entropy of each row of logits with split columns; communicates three numbers per row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, first: int, axis: Axis) -> Any:  # type: ignore[override]
        largest = logits.detach().amax(-1).float()
        if axis.group is not None:
            meet_before(axis, "largest logits")
            all_reduce(largest, ReduceOp.MAX, group=axis.group, log_name="largest logits")
        weights = (logits.float() - largest[:, None]).exp_()
        local = target - first
        here = (local >= 0) & (local < logits.shape[-1])
        rows = torch.arange(len(target), device=logits.device)
        local = local.clamp(0, logits.shape[-1] - 1)
        chosen = torch.where(here, logits[rows, local].float() - largest, 0.0)
        total, chosen = summed(torch.stack([weights.sum(-1), chosen]), axis, "sums of a split softmax")
        weights /= total[:, None]
        ctx.save_for_backward(weights, rows[here], local[here])
        ctx.dtype = logits.dtype
        return total.log() - chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        weights, rows, columns = ctx.saved_tensors
        gradients = weights * gradient[:, None]
        gradients[rows, columns] -= gradient[rows]
        return gradients.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: Axis,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute the cross entropy of logits with split columns. All ranks of the axis must call this.

    Args:
        logits: (rows, columns of this rank), any floating dtype; computed in fp32.
        target: (rows,) indices into the whole vocabulary, equal on all ranks.
        axis: the ranks over which the vocabulary is split, as evenly as possible.
        vocabulary: columns of all ranks together; None: each rank has the same number.
        ignore_index: targets with this value have no loss.
        reduction: "mean" over the targets that are not ignored, "sum", or "none".

    Returns:
        fp32 scalar, or (rows,) for reduction "none"; equal on all ranks.

    Raises:
        ArgumentError: the shapes do not match, this rank has another number of columns than its share, a target is
            outside of the vocabulary, or the reduction is unknown.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ArgumentError(
            f"logits {tuple(logits.shape)} and target {tuple(target.shape)} are not (rows, …) and (rows,)"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"reduction is {reduction!r}: use mean, sum or none")
    size = logits.shape[1] * axis.size if vocabulary is None else vocabulary
    bounds = partition_uniform(size, axis.size)
    if bounds[axis.rank + 1] - bounds[axis.rank] != logits.shape[1]:
        raise ArgumentError(
            f"this rank's share of a vocabulary of {size} is not the {logits.shape[1]} columns its logits have"
        )
    counts = target != ignore_index
    wrong = counts & ((target < 0) | (target >= size))
    if bool(wrong.any()):
        raise ArgumentError(f"target {int(target[wrong][0])} lies outside of the vocabulary of {size}")
    losses = _CrossEntropy.apply(logits, target.where(counts, 0), bounds[axis.rank], axis)
    losses = losses.masked_fill(~counts, 0.0)  # type: ignore[union-attr]
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / counts.sum()


class _Head:
    """Hooks around the forward of a causal LM with a split vocabulary.

    With labels, the loss is computed from each rank's own logits, and no logits are returned. Without labels, the
    ranks' logits are gathered.
    """

    def __init__(self, layer: Any, axis: Axis, vocabulary: int) -> None:
        self._layer, self._axis, self._vocabulary = layer, axis, vocabulary
        self._sizes = even_sizes(vocabulary, axis.size)
        layer.sizes = self._sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> _Head:
        raise NotAvailableError("a model with a split vocabulary cannot be copied; copy it before it is split")

    def before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._layer.sizes = self._sizes if named_arguments(model, args, kwargs).get("labels") is None else None

    def after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if self._layer.sizes is None:  # no rank has whole logits
            if isinstance(output, tuple):  # return_dict=False: loss, logits, …
                output = (output[0], None, *output[2:])
            elif isinstance(output, dict):  # of Transformers: an entry stays when the attribute becomes None
                output = type(output)(**{name: value for name, value in output.items() if name != "logits"})
            elif hasattr(output, "logits"):
                output.logits = None
        self._layer.sizes = self._sizes
        return output

    def loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute the loss as Transformers' `ForCausalLMLoss`, from logits (batch, length, columns of this rank).

        TensorParallelError if neither `labels` nor `shift_labels` (already shifted by one) is given. None for
        `num_items_in_batch`: the mean over the tokens. All ranks must call this.
        """
        if shift_labels is None:
            if labels is None:
                raise TensorParallelError("the loss of a split vocabulary needs labels")
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        summed = num_items_in_batch is not None
        loss = vocab_parallel_cross_entropy(
            logits.flatten(0, -2),
            shift_labels.flatten().to(logits.device),
            self._axis,
            vocabulary=self._vocabulary,
            ignore_index=ignore_index,
            reduction="sum" if summed else "mean",
        )
        return loss / num_items_in_batch if summed else loss


def cut_vocabulary(model: Any, axis: Axis, check: bool) -> list[tuple[str, str, str]]:
    """Split the embedding and the output projection. All ranks of the axis must call this.

    Args:
        model: a causal LM of Transformers, the same on all ranks; changed in place.
        axis: the ranks.
        check: whether both are compared with their dense forms.

    Returns:
        Rows (parameter, "vocabulary", rows of each rank) for the table of the plan.

    Raises:
        ArgumentError: the vocabulary has fewer entries than ranks, or the embedding has an unsupported option.
        NotAvailableError: the model's layers, or its loss from split logits, are not supported.
        TensorParallelError: results of the slices differ from those of the dense layers.
    """
    embedding, head = _parts(model)
    unshard([*embedding.parameters(), *head.parameters()])
    tied, vocabulary = head.weight is embedding.weight, embedding.num_embeddings
    dense = [None if t is None else t.detach().clone() for t in (embedding.weight, head.weight, head.bias)]
    names = {module: name for name, module in model.named_modules()}
    slot = SliceLocation(axis, names[head])
    become_vocabulary_slice(embedding, SliceLocation(axis, names[embedding]))
    become_column(head, slot, even_segments(vocabulary, axis, names[head]), weight_is_cut=tied)
    around = _Head(head, axis, vocabulary)
    if check:

        def differs() -> str:
            of_embedding = _embedding_differs(embedding, dense[0], axis, names[embedding])
            texts = "; ".join([*of_embedding, *_head_differs(head, dense, axis, names[head])])
            return comparison.current(lambda: texts)

        ended = run_collectively(axis, differs)
        everyone = all_gather_objects(axis, ended.result) if ended.ok else ended.texts
        wrong = [f"rank {rank}: {text}" for rank, text in zip(axis.ranks, everyone, strict=True) if text]
        if wrong:
            raise TensorParallelError(
                f"the vocabulary split over {axis.size} ranks (tp) is not the dense one: {' | '.join(wrong)}"
            ) from ended.error
    model.loss_function = around.loss
    model.register_forward_pre_hook(around.before, with_kwargs=True)
    model.register_forward_hook(around.after, with_kwargs=True)
    counts = "/".join(map(str, even_sizes(vocabulary, axis.size)))
    return [(f"{names[embedding]}.weight", "vocabulary", counts), (f"{names[head]}.weight", "vocabulary", counts)]


def _parts(model: Any) -> tuple[nn.Embedding, Any]:
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    why = ""
    if type(embedding) is not nn.Embedding or head is None or not is_linear(head):
        why = "its embedding or output projection is none of torch's"
    elif embedding.num_embeddings != head.out_features:
        why = "its output projection has other rows than its embedding"
    elif "self.loss_function(" not in inspect.getsource(type(model).forward):
        why = "its forward computes the loss itself, from all logits"
    elif not counts_items(model.loss_function):
        why = "its loss does not divide a sum over tokens by num_items_in_batch"
    if why or embedding is None:
        raise NotAvailableError(
            f"tensor_parallel.vocab_parallel_lm_head is not available for {type(model).__name__}: {why}; leave it out"
        )
    return embedding, head


def _embedding_differs(embedding: Any, dense: Any, axis: Axis, name: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(0, len(dense), (64,), generator=generator).to(dense.device)
    table = dense.detach().requires_grad_()
    with torch.enable_grad():
        wanted, rows = F.embedding(ids, table, embedding.padding_idx), embedding(ids)
        cotangent = torch.randn(wanted.shape, generator=generator).to(wanted)
        (own,) = torch.autograd.grad((rows * cotangent).sum(), [embedding.weight])
        (whole,) = torch.autograd.grad((wanted * cotangent).sum(), [table])
    if relative_difference(rows, wanted) > tolerance(wanted.dtype):
        yield f"rows of '{name}' differ"
    if relative_difference(own, whole.split(even_sizes(len(whole), axis.size))[axis.rank]) > tolerance(whole.dtype):
        yield f"the gradient of '{name}' differs"


def _head_differs(head: Any, dense: Sequence[Any], axis: Axis, name: str) -> Iterator[str]:
    generator = torch.Generator().manual_seed(12)
    _, weight, bias = dense
    hidden = torch.randn(32, weight.shape[1], generator=generator).to(weight).requires_grad_()
    target = torch.randint(0, len(weight), (32,), generator=generator).to(weight.device)
    table, before = weight.detach().requires_grad_(), head.sizes
    with torch.enable_grad():
        wanted = F.cross_entropy(F.linear(hidden, table, bias).float(), target)
        head.sizes = None
        loss = vocab_parallel_cross_entropy(head(hidden), target, axis, vocabulary=len(weight))
        head.sizes = before
        own, hidden_grad = torch.autograd.grad(loss, [head.weight, hidden])
        whole, whole_hidden_grad = torch.autograd.grad(wanted, [table, hidden])
    if relative_difference(loss, wanted) > tolerance(wanted.dtype):
        yield f"the loss of '{name}' differs"
    if relative_difference(own, whole.split(even_sizes(len(whole), axis.size))[axis.rank]) > tolerance(whole.dtype):
        yield f"the gradient of '{name}' differs"
    if relative_difference(hidden_grad, whole_hidden_grad) > tolerance(whole_hidden_grad.dtype):
        yield f"the gradient of what '{name}' reads differs"
