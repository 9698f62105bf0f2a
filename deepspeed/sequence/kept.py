"""What attention over a cut sequence keeps for backward: this rank's share of what it keeps whole.

Attention keeps its context by heads, and the layer after it keeps the same context by tokens; where key-value heads
are copied, it keeps the copies. An exchange changes no bit, so of both forms one is enough: autograd keeps the form by
tokens, which is kept anyway or is smaller, and backward exchanges it once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from deepspeed.errors import SequenceParallelError
from deepspeed.foundation.saved import saved_since
from deepspeed.zero.transforms import in_transform


@dataclass(eq=False)
class Exchanged:
    """A tensor by heads, which an exchange makes from one by tokens.

    Args:
        by_heads: of the whole sequence, this rank's heads; as the exchange has left it.
        by_tokens: of this rank's slice.
        again: makes the one from the other, out of autograd's sight; all ranks call together.
        where: for reports.
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
        """Whether any view of its memory is a view of it, as it was made."""
        tensor = self.by_heads
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.storage_offset()
        return alone and tensor._version == self.version

    def source(self) -> _Source:
        """What is kept in its place."""
        tokens = self.by_tokens.detach()
        if tokens.untyped_storage().nbytes() > tokens.nbytes:  # a part of something larger, which need not stay
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
        """The tensor in the layout it had."""
        if self.tokens._version != self.version:
            raise SequenceParallelError(
                f"what attention gave or was given in '{self.where}' has been changed in place, and backward needs it "
                f"as it was: change a copy of it, or set sequence_parallel_recompute to false"
            )
        with torch.no_grad():
            made = self.again(self.tokens)
            if made.stride() == self.stride and not made.storage_offset():
                return made
            return torch.empty_strided(self.size, self.stride, dtype=made.dtype, device=made.device).copy_(made)


@dataclass(frozen=True)
class _Saved:
    """A view of a tensor by heads that autograd saved."""

    source: _Source
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> torch.Tensor:
        return self.source.by_heads().as_strided(self.size, self.stride, self.offset)


def is_kept(tensor: torch.Tensor) -> bool:
    """Whether autograd keeps for a while what gave `tensor`: not where a checkpoint computes it again, in backward."""
    if torch.compiler.is_compiling() or not tensor.requires_grad or in_transform(tensor):
        return False
    return torch._C._current_graph_task_id() == -1


def keep_by_tokens(context: torch.Tensor, since: int, exchanged: Sequence[Exchanged]) -> None:
    """Let autograd keep by tokens what it has saved by heads.

    What hooks around the forward keep elsewhere, or compute again, is left to them.

    Args:
        context: what attention gave.
        since: `saved.now()` before it.
        exchanged: what it was given, and gave.
    """
    of = {one.by_heads.untyped_storage()._cdata: one for one in exchanged if one.fills_its_memory}
    sources: dict[int, _Source] = {}
    for saved in saved_since([context], since) if of else ():
        view = saved.data
        if type(view) is not torch.Tensor or view.layout != torch.strided or view.is_conj() or view.is_neg():
            continue
        key = view.untyped_storage()._cdata
        if key in of and view.dtype == of[key].by_heads.dtype:
            if key not in sources:
                sources[key] = of[key].source()
            kept = _Saved(sources[key], view.size(), view.stride(), int(view.storage_offset()))
            saved.register_hooks(lambda _view, kept=kept: kept, _Saved.view)
        del view
