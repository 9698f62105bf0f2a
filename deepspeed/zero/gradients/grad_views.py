"""Tracking of gradients that users have read, and write-back of their in-place changes.

Users get copies, so later gradients do not change what they have read. A change in place is detected by comparing
values, not only version counters, since `p.grad.data.mul_()` bypasses the counter.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict

import torch

from deepspeed.zero.parameters.buffer_views import same_bits
from deepspeed.zero.parameters.record import ParamRecord, tensors_over

# Number of references to a tensor that only this module has: of its entry, and of the call that counts references.
_OURS = 2


class _Gradient:
    """Gradient that a user has read.

    Args:
        member: parameter of the gradient.
        tensor: copy that the user got.
        source: tensor with equal values until gradients are added; None: a copy of `tensor` is made for comparison.
        own: whether it is this rank's gradient before the reduction.
    """

    def __init__(self, member: ParamRecord, tensor: torch.Tensor, source: torch.Tensor | None, own: bool) -> None:
        self.member, self.tensor, self.source, self.own = member, tensor, source, own
        self.quiet = tensors_over(tensor)  # number of tensors on its memory before the user has it
        self.taken_over()

    def taken_over(self) -> None:
        """Record the tensor's current values as unchanged, since the accumulator has them or gets them now."""
        self.version = self.tensor._version
        self.values = self.tensor.clone() if self.source is None else self.source

    def part(self) -> None:
        """Compare with a copy of the current values from now on, since `source` is about to be overwritten."""
        self.source = None
        self.taken_over()

    @property
    def edited(self) -> bool:
        """Return whether the user has changed the tensor since the read."""
        return self.tensor._version != self.version or not same_bits(self.tensor, self.values)

    @property
    def held(self) -> bool:
        """Return whether other code has a reference to the tensor or to a view of its memory."""
        return sys.getrefcount(self.tensor) > _OURS or tensors_over(self.tensor) > self.quiet


class GradViewTracker:
    """Tracker of the gradients that users have read since the last update.

    Attributes:
        used: whether a gradient was read.
        edits: number of reduced gradients that users have changed in place, so that they were written back.
    """

    def __init__(self) -> None:
        self.used = False
        self._out: OrderedDict[int, _Gradient] = OrderedDict()  # by identity
        self._of: dict[int, list[_Gradient]] = {}  # by identity of the parameter
        # Reads to which gradients were added since: name, tensor, its version and values at that time.
        self._late: list[tuple[str, weakref.ref[torch.Tensor], int, torch.Tensor]] = []
        self.edits = 0

    def add(
        self, member: ParamRecord, tensor: torch.Tensor, source: torch.Tensor | None = None, own: bool = False
    ) -> torch.Tensor:
        """Track a copy that is returned to the user, and stop tracking up to two earlier ones without references.

        Args:
            member: parameter of the gradient.
            tensor: copy of the gradient.
            source: tensor in the accumulator with the same values, for comparison; None: compare with another copy.
            own: whether the gradient is this rank's, before the reduction.

        Returns:
            `tensor`.
        """
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
        """Return the gradients that the user changed in place since they were read, and mark them as unchanged.

        Args:
            of: parameter; None: all.

        Returns:
            Tuples of parameter, changed tensor, and whether it was read before the reduction.
        """
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
        """Stop write-back for the tracked gradients, since more gradients are added; `late` reports changes after this.

        Args:
            own: only for gradients that were read before the reduction.
        """
        for gradient in [gradient for gradient in self._out.values() if gradient.own or not own]:
            if gradient.held:
                values = gradient.values if gradient.source is None else gradient.values.clone()
                self._late.append((gradient.member.name, weakref.ref(gradient.tensor), gradient.version, values))
            self._drop(gradient)

    def late(self) -> list[str]:
        """Return the names of parameters whose gradient the user changed in place after `close`."""
        names = []
        for name, late_tensor, version, values in self._late:
            tensor = late_tensor()
            if tensor is not None and (tensor._version != version or not same_bits(tensor, values)):
                names.append(name)
        return names

    def forget(self, member: ParamRecord) -> None:
        """Stop tracking the reads of a parameter's gradient, since the gradient is replaced."""
        for gradient in self._of.pop(id(member), ()):
            del self._out[id(gradient)]

    def clear(self) -> None:
        self._out.clear()
        self._of.clear()
        self._late.clear()
        self.used, self.edits = False, 0
