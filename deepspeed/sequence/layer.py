"""Attention over a split sequence: an all-to-all exchanges sequence shards for head shards (Jacobs et al., 2023).

Autograd would save the attention output in two layouts (by heads for attention, by tokens for the next layer), and all
copies of replicated key-value heads. Instead, only the token layout is saved; backward repeats the exact all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.autograd import all_to_all, exchanged
from deepspeed.comm.process_groups.axis import Axis, group_axis
from deepspeed.errors import MeshError, SequenceParallelError
from deepspeed.foundation.saved_tensors import in_backward, now, saved_since
from deepspeed.zero.parameters.functorch import in_transform


@dataclass(eq=False)
class Exchanged:
    """Tensor in head layout, and the same tensor in token layout, from which an all-to-all can recompute it.

    Args:
        by_heads: the whole sequence for this rank's heads.
        by_tokens: this rank's slice of the sequence, all heads.
        again: converts `by_tokens` to `by_heads` without autograd; all ranks must call it.
        where: name of the attention for error messages.
    """

    by_heads: torch.Tensor
    by_tokens: torch.Tensor
    again: Callable[[torch.Tensor], torch.Tensor]
    where: str
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.by_heads._version

    @property
    def fills_its_memory(self) -> bool:
        """Return whether `by_heads` is unmodified and fills its whole storage."""
        tensor = self.by_heads
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.storage_offset()
        return alone and tensor._version == self.version

    def source(self) -> _Source:
        """Return the token layout, to be saved instead of the head layout."""
        tokens = self.by_tokens.detach()
        if tokens.untyped_storage().nbytes() > tokens.nbytes:  # a view of a larger tensor, which need not stay alive
            tokens = tokens.clone()
        stride = self.by_heads.stride()
        return _Source(tokens, tokens._version, self.again, self.by_heads.shape, stride, self.where)


@dataclass(frozen=True)
class _Source:
    tokens: torch.Tensor
    version: int
    again: Callable[[torch.Tensor], torch.Tensor]
    size: torch.Size
    stride: tuple[int, ...]
    where: str

    def by_heads(self) -> torch.Tensor:
        """Recompute the head layout, with its strides; SequenceParallelError if `tokens` was changed in place."""
        if self.tokens._version != self.version:
            raise SequenceParallelError(
                f"what attention gave or was given in '{self.where}' has been changed in place, and backward needs it "
                f"as it was: change a copy of it, or set sequence_parallel_recompute to false"
            )
        with torch.no_grad():
            heads = self.again(self.tokens)
            if heads.stride() == self.stride and not heads.storage_offset():
                return heads
            return torch.empty_strided(self.size, self.stride, dtype=heads.dtype, device=heads.device).copy_(heads)

    @staticmethod
    def unpack(saved: tuple[_Source, torch.Size, tuple[int, ...], int]) -> torch.Tensor:
        """Restore a view that autograd saved as (source, size, strides, offset)."""
        source, size, stride, offset = saved
        return source.by_heads().as_strided(size, stride, offset)


def is_kept(tensor: torch.Tensor) -> bool:
    """Return whether autograd saves tensors for `tensor`'s backward; False in backward and in torch.func."""
    if not tensor.requires_grad or in_transform(tensor):
        return False
    return not in_backward()


def keep_by_tokens(context: torch.Tensor, since: int, exchanged: Sequence[Exchanged]) -> None:
    """Replace head layouts that autograd has saved for backward by token layouts.

    Tensors under saved-tensor hooks of the caller (offload, recomputation) are not changed.

    Args:
        context: output of attention.
        since: result of `now` before attention; tensors that were saved earlier are not changed.
        exchanged: tensors to look for.
    """
    of = {each.by_heads.untyped_storage()._cdata: each for each in exchanged if each.fills_its_memory}
    sources: dict[int, _Source] = {}
    for saved in saved_since([context], since) if of else ():
        view = saved.data
        if type(view) is not torch.Tensor or view.layout != torch.strided or view.is_conj() or view.is_neg():
            continue
        key = view.untyped_storage()._cdata
        if key in of and view.dtype == of[key].by_heads.dtype:
            if key not in sources:
                sources[key] = of[key].source()
            packed = (sources[key], view.size(), view.stride(), int(view.storage_offset()))
            saved.register_hooks(lambda _view, packed=packed: packed, _Source.unpack)
        del view


def check_heads(heads: int, axis: Axis) -> None:
    """Raise MeshError if the query heads are not divisible by the ranks; the message names the nearest valid sizes."""
    if heads % axis.size:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        below, above = [n for n in fits if n < axis.size][-1:], [n for n in fits if n > axis.size][:1]
        near = " and ".join(map(str, below + above))
        raise MeshError(
            f"{heads} query head(s) cannot be shared out evenly to {axis.size} ranks of a sequence (sp "
            f"{list(axis.ranks)}); the nearest {f'sizes that fit are {near}' if above else f'size that fits is {near}'}"
        )


def repeats(heads: int, axis: Axis) -> int:
    """Return the smallest number of copies of each key-value head with which the ranks get equal numbers of heads."""
    return axis.size // gcd(heads, axis.size)


def to_heads(
    tensor: torch.Tensor, axis: Axis, heads: int, sequence: int, copies: int = 1, where: str = "attention"
) -> torch.Tensor:
    """Convert token layout (a slice of the sequence, all heads) to head layout (the whole sequence, this rank's heads).

    Args:
        tensor: this rank's slice.
        axis: ranks that share a sequence; all must call this together.
        heads: dim of the heads.
        sequence: dim of the sequence.
        copies: number of copies of each head, see `repeats`.
        where: name of the attention for the comms logger.
    """
    if copies > 1:
        tensor = tensor.repeat_interleave(copies, dim=heads)
    return all_to_all(tensor, axis, heads, sequence, f"sequence to heads in {where} over {axis.name}")


def attend(
    local: Callable[..., torch.Tensor],
    states: Sequence[torch.Tensor],
    axis: Axis,
    heads: int,
    sequence: int,
    where: str = "attention",
    recompute: bool = True,
) -> torch.Tensor:
    """Compute attention over a split sequence.

    Args:
        local: maps query, key and value (whole sequence, this rank's heads) to the context in the same layout.
        states: query, key and value (this rank's slice of the sequence, all heads).
        axis: ranks that share a sequence; all must call this together.
        heads: dim of the heads.
        sequence: dim of the sequence.
        where: name of the attention for messages.
        recompute: whether to repeat the all-to-all in backward instead of saving both layouts.

    Returns:
        The context of this rank's slice of the sequence, all heads.

    Raises:
        MeshError: the query heads are not divisible by the number of ranks.
    """
    query, key, value = states
    check_heads(query.shape[heads], axis)
    copies = repeats(key.shape[heads], axis)
    query = to_heads(query, axis, heads, sequence, where=where)
    by_heads = [to_heads(tensor, axis, heads, sequence, copies, where) for tensor in (key, value)]
    saves = not (recompute and axis.size > 1) or torch.compiler.is_compiling()  # both layouts
    copied: list[Exchanged] = []
    if not saves and copies > 1:
        again = partial(to_heads, axis=axis, heads=heads, sequence=sequence, copies=copies, where=f"{where}, again,")
        copied = [Exchanged(h, tokens, again, where) for h, tokens in zip(by_heads, (key, value), strict=True)]
    since = 0 if saves else now()
    context = local(query, *by_heads)
    label = f"heads to sequence in {where} over {axis.name}"
    by_tokens = all_to_all(context, axis, sequence, heads, label)
    if not saves and is_kept(context):
        back = Exchanged(context, by_tokens, lambda t: exchanged(t, axis, heads, sequence, f"{label}, back"), where)
        keep_by_tokens(context, since, [back, *copied])
    return by_tokens


def single_all_to_all(
    input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, group: Any = None
) -> torch.Tensor:
    """Scatter dim `scatter_idx` over `group` and gather dim `gather_idx` (all-to-all); differentiable.

    Args:
        input: tensor of any layout; its dim `scatter_idx` must be divisible by the number of ranks.
        scatter_idx: dim that is whole before and split after.
        gather_idx: dim that is split before and whole after.
        batch_dim_idx: accepted for old scripts; any layout works.
        group: process group, None: all ranks; its ranks must call this together.
    """
    return all_to_all(input, group_axis("sp", group), scatter_idx, gather_idx)


class _SeqAllToAll:
    """Form of `single_all_to_all` for old scripts."""

    @staticmethod
    def apply(
        group: Any, input: torch.Tensor, scatter_idx: int, gather_idx: int, batch_dim_idx: int = 0, *_: Any
    ) -> torch.Tensor:
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)


class DistributedAttention(nn.Module):
    """Attention over a split sequence: the inner attention gets the whole sequence for this rank's heads.

    Args:
        local_attention: called with query, key and value (whole sequence, this rank's heads), then with the other
            arguments of `forward`; returns the context in the same layout (heads and head width may be one dim).
        sequence_process_group: process group of the ranks that share a sequence, or their `Axis`.
        scatter_idx: dim of the heads.
        gather_idx: dim of the sequence.
        sp_stream: accepted for old scripts; collectives are ordered with the computation.
        num_kv_heads: accepted for old scripts; the number is read from the keys.

    Attributes:
        recompute: whether to repeat the all-to-all in backward instead of saving both layouts.

    Example:
        >>> attention = DistributedAttention(local, mesh.get_sequence_parallel_group(), scatter_idx=2, gather_idx=1)
        >>> context = attention(q, k, v)  # [batch, sequence / ranks, heads, width] each
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        self.local_attn = local_attention
        group = sequence_process_group
        self.axis = group if isinstance(group, Axis) else group_axis("sp", group)
        self.scatter_idx, self.gather_idx, self.num_kv_heads = scatter_idx, gather_idx, num_kv_heads
        self.recompute = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int = 0,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute the attention of this rank's slice to the whole sequence. All ranks of the group must call this.

        Args:
            query: this rank's slice of the sequence, all heads.
            key: the same; may have fewer heads, each shared by several neighbouring query heads.
            value: the same as `key`.
            batch_dim_idx: accepted for old scripts; any layout works.
            rotary_pos_emb: pair (cos, sin) for the whole sequence, see `_rotated`; None: no rotation.
            *args: further positional arguments of the local attention.
            **kwargs: keyword arguments of the local attention.

        Returns:
            The context of this rank's slice, all heads.

        Raises:
            MeshError: the query heads are not divisible by the number of ranks.
        """

        def local(*states: torch.Tensor) -> torch.Tensor:
            query, key, value = states
            if rotary_pos_emb is not None:
                query, key = (self._rotated(tensor, *rotary_pos_emb) for tensor in (query, key))
            return self.local_attn(query, key, value, *args, **kwargs)

        states = (query, key, value)
        return attend(local, states, self.axis, self.scatter_idx, self.gather_idx, recompute=self.recompute)

    @staticmethod
    def _rotated(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the first `cos.shape[-1]` channels (two halves as pairs); cos and sin broadcast against `tensor`."""
        width = cos.shape[-1]
        turned, others = tensor[..., :width], tensor[..., width:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((turned, others), dim=-1)
