"""Tracking of dense gradients that users hold, and write-back of their in-place changes.

Users get copies, which later changes of the accumulators do not affect. A change may bypass the version counter
(`p.grad.data.mul_()`), so the values are compared with the returned ones.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict

import torch

from deepspeed.zero.parameters.buffer_views import same_bits
from deepspeed.zero.parameters.record import ParamRecord, tensors_over

# References to a tensor that only this module knows: of its entry, and of the call that counts them.
_OURS = 2


class _Gradient:
    """A gradient that was read. `source` has equal values until more is added; `own`: read before the reduction."""

    def __init__(self, member: ParamRecord, tensor: torch.Tensor, source: torch.Tensor | None, own: bool) -> None:
        self.member, self.tensor, self.source, self.own = member, tensor, source, own
        self.quiet = tensors_over(tensor)  # while nobody has it yet
        self.taken_over()

    def taken_over(self) -> None:
        """Record that the accumulator has these values, or gets them now."""
        self.version = self.tensor._version
        self.values = self.tensor.clone() if self.source is None else self.source

    def part(self) -> None:
        """Compare with a copy of this read's values from now on, since the accumulator gets those of another read."""
        self.source = None
        self.taken_over()

    @property
    def edited(self) -> bool:
        return self.tensor._version != self.version or not same_bits(self.tensor, self.values)

    @property
    def held(self) -> bool:
        """Return whether other code holds the tensor or a view of its memory."""
        return sys.getrefcount(self.tensor) > _OURS or tensors_over(self.tensor) > self.quiet


class GradViewTracker:
    """Gradients of a window that users have read as copies.

    Attributes:
        used: whether there was a read in the window.
        edits: number of changes of reduced gradients that were written back in the window.
    """

    def __init__(self) -> None:
        self.used = False
        self._out: OrderedDict[int, _Gradient] = OrderedDict()  # by identity
        self._of: dict[int, list[_Gradient]] = {}  # those of a member
        # More has been added since: the name, the tensor, its version and values.
        self._late: list[tuple[str, weakref.ref[torch.Tensor], int, torch.Tensor]] = []
        self.edits = 0

    def add(
        self, member: ParamRecord, tensor: torch.Tensor, source: torch.Tensor | None = None, own: bool = False
    ) -> torch.Tensor:
        """Track a copy that a user gets, and drop earlier ones that are not held any more."""
        for _ in range(min(2, len(self._out))):
            key, oldest = next(iter(self._out.items()))
            if oldest.held or oldest.edited:
                self._out.move_to_end(key)
            else:
                self._drop(oldest)
        gradient = _Gradient(member, tensor, source, own)
        self.used = True
        self._out[id(gradient)] = gradient
        self._of.setdefault(id(member), []).append(gradient)
        return tensor

    def _drop(self, gradient: _Gradient) -> None:
        del self._out[id(gradient)]
        of = self._of[id(gradient.member)]
        of.remove(gradient)
        if not of:
            del self._of[id(gradient.member)]

    def take_edited(self, of: ParamRecord | None = None) -> list[tuple[ParamRecord, torch.Tensor, bool]]:
        """Return gradients that were changed after their read, as (member, values, whether read before reduction)."""
        candidates = self._out.values() if of is None else self._of.get(id(of), ())
        edited = [gradient for gradient in candidates if gradient.edited]
        for gradient in edited:
            reads = self._of[id(gradient.member)]
            for read in reads if len(reads) > 1 else ():
                read.part()
            gradient.taken_over()
            self.edits += not gradient.own
        return [(gradient.member, gradient.tensor, gradient.own) for gradient in edited]

    def close(self, own: bool = False) -> None:
        """Reject later changes of the tracked gradients (`own`: only of this rank's parts), since more are added."""
        for gradient in [gradient for gradient in self._out.values() if gradient.own or not own]:
            if gradient.held:
                values = gradient.values if gradient.source is None else gradient.values.clone()
                self._late.append((gradient.member.name, weakref.ref(gradient.tensor), gradient.version, values))
            self._drop(gradient)

    def late(self) -> list[str]:
        """Return the names of parameters whose gradient was changed after `close`."""
        names = []
        for name, late_tensor, version, values in self._late:
            tensor = late_tensor()
            if tensor is not None and (tensor._version != version or not same_bits(tensor, values)):
                names.append(name)
        return names

    def forget(self, member: ParamRecord) -> None:
        """Stop tracking reads of a gradient that is replaced."""
        for gradient in self._of.pop(id(member), ()):
            del self._out[id(gradient)]

    def clear(self) -> None:
        self._out.clear()
        self._of.clear()
        self._late.clear()
        self.used, self.edits = False, 0
