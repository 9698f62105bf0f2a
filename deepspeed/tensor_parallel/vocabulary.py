"""A vocabulary shared out to ranks: tables of some rows each, and the loss over logits nobody has together."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from deepspeed.comm import ReduceOp
from deepspeed.comm.api import all_reduce
from deepspeed.comm.axis import Axis
from deepspeed.comm.differentiable import reduce_from, summed
from deepspeed.comm.together import meet_before
from deepspeed.errors import ArgumentError
from deepspeed.foundation.partition import partition_uniform
from deepspeed.tensor_parallel.layers import Slot, cut_tensor, even_segments


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of which this rank has some rows.

    Args:
        num_embeddings: rows of the whole table, shared out as evenly as it goes.
        embedding_dim: columns.
        axis: the ranks that share it.
        padding_idx: a row without a gradient, counted in the whole table.
        name: for reports.
        device, dtype: of the table.

    Values are drawn for the whole table, so ranks with equal seeds have slices of one.

    Raises:
        ArgumentError: fewer rows than ranks.
    """

    slot: Slot
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
        become_vocabulary_slice(self, Slot(axis, name))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Indices of any shape to (…, embedding_dim), equal on all ranks.

        Raises:
            IndexError: an index outside of the whole table, as torch has it.
        """
        if input.numel() and not (0 <= int(input.min()) and int(input.max()) < self.whole):
            raise IndexError(f"{self.slot.name}: an index outside of the {self.whole} rows of the table")
        local = input - self.first
        here = (local >= 0) & (local < self.num_embeddings)
        padding = self.padding_idx
        rows = F.embedding(local.clamp(0, self.num_embeddings - 1), self.weight, None, scale_grad_by_freq=False)
        if padding is not None:  # its row is read, and learns nothing
            rows = torch.where((input == padding)[..., None], rows.detach(), rows)
        rows = rows.masked_fill(~here[..., None], 0.0)
        return reduce_from(rows, self.slot.axis, f"rows of {self.slot.name}")


def become_vocabulary_slice(module: nn.Embedding, slot: Slot) -> None:
    """Make an embedding hold its rank's rows, in place.

    Raises:
        ArgumentError: fewer rows than ranks, or an option that has no counterpart.
    """
    made: Any = module
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ArgumentError(f"{slot.name}: max_norm, scale_grad_by_freq and sparse do not work on a cut table")
    segments = even_segments(module.num_embeddings, slot.axis, slot.name)
    if type(module) is not VocabParallelEmbedding:
        made.__class__ = VocabParallelEmbedding
    made.slot, made.first, made.whole = slot, segments[0][0], module.num_embeddings
    cut_tensor(made.weight, 0, segments)
    made.num_embeddings = segments[0][1]


class _CrossEntropy(torch.autograd.Function):
    """Per-row losses over logits whose columns are shared out; three numbers a row travel."""

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
        total, chosen = summed(torch.stack([weights.sum(-1), chosen]), axis, "sums of a cut softmax")
        weights /= total[:, None]
        ctx.save_for_backward(weights, rows[here], local[here])
        ctx.dtype = logits.dtype
        return total.log() - chosen

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        weights, rows, columns = ctx.saved_tensors
        found = weights * gradient[:, None]
        found[rows, columns] -= gradient[rows]
        return found.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: Axis,
    *,
    vocabulary: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """Cross entropy of logits of which each rank has some columns; no rank ever holds all of them.

    Args:
        logits: (rows, columns of this rank), any floating dtype; computed in fp32.
        target: (rows,) indices into the whole vocabulary, equal on all ranks.
        axis: the ranks that share the vocabulary, as evenly as it goes.
        vocabulary: columns of all ranks together; None: as many on each.
        ignore_index: targets that do not count.
        reduction: "mean" over the targets that count, "sum", or "none".

    Returns:
        fp32, equal on all ranks.

    Raises:
        ArgumentError: shapes or targets that do not fit.
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
