"""What a torch optimizer sees of one parameter on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from deepspeed.zero.buckets import Bucket
from deepspeed.zero.layout import ParamRange
from deepspeed.zero.member import Member
from deepspeed.zero.reducer import Reducer


@dataclass(eq=False)
class Fragment:
    """What the optimizer sees of one parameter: a leaf tensor over the master values, and where its gradient is."""

    member: Member
    range: ParamRange
    leaf: Parameter
    bucket: Bucket

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


def unused_names(reducer: Reducer, fragments: dict[int, list[Fragment]]) -> list[str]:
    """Trainable parameters that no rank had a gradient for; valid after `finish`."""
    return [
        member.name
        for bucket in reducer.buckets
        for member in bucket.group.members
        if member.param.requires_grad and member.uid in fragments and not reducer.touched(bucket, member)
    ]


def count_update(reducer: Reducer, fragments: dict[int, list[Fragment]]) -> None:
    """Count a step as an in-place change of what had a gradient: backward of an older forward raises, as in torch."""
    updated = [
        member
        for bucket in reducer.buckets
        for member in bucket.group.members
        if member.uid in fragments and reducer.touched(bucket, member)
    ]
    increment_version([member.param for member in updated])
    for member in updated:
        member.version += 1
