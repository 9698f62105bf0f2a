"""What a torch optimizer sees of one parameter on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from deepspeed.zero.buckets import Bucket
from deepspeed.zero.layout import ParamRange
from deepspeed.zero.member import Member


@dataclass(eq=False)
class Fragment:
    """What the optimizer sees of one parameter: a leaf tensor over the master values, and where its gradient is."""

    member: Member
    range: ParamRange
    leaf: Parameter
    bucket: Bucket
    _view: tuple[torch.Tensor, torch.Tensor] | None = None  # of the accumulator, and the accumulator

    def gradient(self, total: torch.Tensor) -> torch.Tensor:
        """Its part of the borrowed accumulator, in the leaf's shape."""
        if self._view is not None and self._view[1] is total:
            return self._view[0]
        view = total[self.span].view(self.leaf.shape)
        if self.bucket.total.memory is total:  # what is lent for a while must not be kept
            self._view = view, total
        return view

    @property
    def span(self) -> slice:
        """Where the fragment lies in this rank's master and in the accumulator."""
        at = self.range.at - self.bucket.low
        return slice(at, at + self.range.numel)


def cut_state(state: dict[str, Any], fragment: Fragment) -> dict[str, Any]:
    """The part of an optimizer state, made for the whole parameter, that belongs to a fragment."""
    made = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == fragment.member.shape and value.dim():
            flat = value.detach().reshape(-1)[fragment.range.start : fragment.range.stop]
            made[key] = flat.clone().view(fragment.leaf.shape).to(fragment.leaf.device)
        else:
            made[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return made


def count_update(members: Sequence[Member]) -> None:
    """Count a step as an in-place change of what had a gradient: backward of an older forward raises, as in torch."""
    increment_version([member.param for member in members])
    for member in members:
        member.version += 1
