"""Reads and writes training state by parameter: `safe_get_*` and `safe_set_*`.

All full-tensor functions are collective over the ranks that share the parameter, those that have other slices of it
included; gradients exist between backward and step. A parameter that no engine manages gives None.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.comm.collectives.collectives import READ
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.zero.gradients.accumulation import Purpose
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.layout.global_tensor import join_boxes, take_box
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.layout.regions import Region
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.optimizer.update import publish
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import group_of, meet_before_change


def _member(param: torch.nn.Parameter) -> ParamRecord | None:
    return param._ds_member if is_managed(param) else None  # type: ignore[attr-defined]


def _owner(member: ParamRecord) -> ZeroOptimizer | None:
    """The optimizer that updates a parameter."""
    owner = member.owner
    return owner if isinstance(owner, ZeroOptimizer) and member.uid in owner.fragments else None


def _reducer(member: ParamRecord | None) -> Reducer | None:
    """Where its gradients are."""
    return member.reducer if member is not None and isinstance(member.reducer, Reducer) else None


def _fragments(member: ParamRecord) -> list[Fragment]:
    owner = _owner(member)
    return [] if owner is None else owner.fragments[member.uid]


def _at_hand(member: ParamRecord, changed: bool = False) -> AbstractContextManager[None]:
    """Leaves and optimizer state of the member's group are real tensors inside."""
    owner = _owner(member)
    return nullcontext() if owner is None else owner.shard_of(member).at_hand(changed)


def _whole(member: ParamRecord, pick: Callable[[Fragment], torch.Tensor | None], label: str) -> torch.Tensor:
    """Assemble what `pick` gives for this rank's fragments with everybody else's; NaN where no rank has anything."""
    group = member.group
    here = torch.full((group.high - group.low,), torch.nan, dtype=torch.float32, device=group.device)
    with _at_hand(member):
        for fragment in _fragments(member):
            value = pick(fragment)
            if value is not None:
                here[fragment.span].copy_(value.reshape(-1))
    if not group.policy.owns_a_slice:
        return here[member.offset : member.offset + member.numel].view(member.shape)
    return group.assemble(member, here, READ, label).view(member.shape)


def _box(member: ParamRecord) -> Region:
    """What this rank has of the global tensor."""
    return Region.of(placement_of(member.param), member.shape)


def _global(member: ParamRecord, local: torch.Tensor | None, label: str) -> torch.Tensor | None:
    """The global tensor of this rank's slice and the others'."""
    slices = group_of(member).holders.slices
    if slices is None or not placement_of(member.param).cuts:
        return local
    return join_boxes(local, _box(member), slices, label)


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The master values of a parameter.

    Args:
        param: a parameter of an engine's model.

    Returns:
        float32 tensor of the global shape, a copy; None for a parameter no optimizer updates. A slice that only
        Megatron's mark tells (`zero/layout/placement`) is given as it is: nothing says where it lies.
    """
    member = _member(param)
    owner = None if member is None else _owner(member)
    if member is None or owner is None:
        return None
    owner.import_edits(member)
    with member.group.updated.borrowed() as masters:
        label = f"master of {member.name}"
        return _global(member, _whole(member, lambda fragment: masters[fragment.span], label), label)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """The mean gradient of the window so far, or None when there is none.

    Args:
        param: a parameter of an engine's model.

    Returns:
        float32 tensor of the global shape.
    """
    member, gradient = _member(param), param.grad
    if member is None:
        return gradient
    here = None if gradient is None else gradient.detach().float().clone()
    return _global(member, here, f"gradient of {member.name}")


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """One tensor of a parameter's optimizer state.

    Args:
        param: a parameter of an engine's model.
        optim_state_key: `exp_avg`, `momentum_buffer`, …

    Returns:
        float32 tensor of the global shape; None before the first step or for an unmanaged parameter.
    """
    member = _member(param)
    owner = None if member is None else _owner(member)
    if member is None or owner is None:
        return None
    state = owner.state

    def pick(fragment: Fragment) -> torch.Tensor | None:
        value = state.get(fragment.leaf, {}).get(optim_state_key)
        return value if isinstance(value, torch.Tensor) and value.numel() == fragment.range.numel else None

    label = f"{optim_state_key} of {member.name}"
    whole = _whole(member, pick, label)
    return _global(member, None if whole.isnan().all() else whole, label)


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace the values of a parameter: master and compute copy, on every rank.

    Args:
        param: a parameter of an engine's model.
        value: any float tensor of its global shape, the same on all ranks.
    """
    member, value = _checked(param, value)
    member.group.write(member, value)
    member.group.advance()


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace the window's mean gradient of a parameter.

    Args:
        param: a parameter of an engine's model.
        value: float tensor of its global shape, the same on all ranks.
    """
    _, param.grad = _checked(param, value)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace one tensor of a parameter's optimizer state.

    Args:
        param: a parameter of an engine's model.
        value: float tensor of its global shape, the same on all ranks.
        optim_state_key: `exp_avg`, `momentum_buffer`, …
    """
    member, value = _checked(param, value)
    if safe_get_full_optimizer_state(param, optim_state_key) is None:  # the same on all ranks, also without a fragment
        raise UsageError(f"'{member.name}' has no optimizer state {optim_state_key!r} (yet)")
    flat = value.detach().reshape(-1)
    with _at_hand(member, changed=True):
        for fragment in _fragments(member):
            state = _state_of(member, fragment)
            _replace(state, optim_state_key, flat[fragment.range.start : fragment.range.stop], member)


def _checked(param: torch.nn.Parameter, value: torch.Tensor) -> tuple[ParamRecord, torch.Tensor]:
    """The member, and what this rank has of the value."""
    member = _member(param)
    if member is None:
        raise ArgumentError("the parameter belongs to no engine; change it directly")
    box = _box(member)
    if tuple(value.shape) != box.shape:
        raise ArgumentError(f"'{member.name}' has shape {box.shape}, the value {tuple(value.shape)}")
    return member, value if box.whole else take_box(value.detach(), box)


def _state_of(member: ParamRecord, fragment: Fragment) -> dict[str, Any]:
    owner = _owner(member)
    return {} if owner is None else owner.state[fragment.leaf]


def _replace(state: dict[str, Any], key: str, values: torch.Tensor, member: ParamRecord) -> None:
    if key not in state:
        raise UsageError(f"'{member.name}' has no optimizer state {key!r} (yet); there is {sorted(state)}")
    state[key].copy_(values.view(state[key].shape))


def _local(param: torch.nn.Parameter, pick: Callable[[Fragment], torch.Tensor | None]) -> torch.Tensor | None:
    member = _member(param)
    if member is None or not _fragments(member):
        return None
    with _at_hand(member):
        tensor = pick(_fragments(member)[0])
        if tensor is None:
            return None
        lent = member.group.tiers.optimizer.moves
        return tensor.reshape(-1).clone() if lent else tensor.reshape(-1)


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's fragment of the master values: 1-D, a view where they rest in memory; None when it holds none."""
    member = _member(param)
    owner = None if member is None else _owner(member)
    if member is None or owner is None or not _fragments(member):
        return None
    owner.import_edits(member)
    with member.group.updated.borrowed() as masters:
        master = masters[_fragments(member)[0].span]
        return master if member.group.updated.memory is not None else master.clone()


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """This rank's fragment of the mean gradient, in the accumulator's dtype; all ranks call together."""
    member = _member(param)
    reducer = _reducer(member)
    if member is None or reducer is None or reducer.clean:
        return None
    reducer.finish(Purpose.READ, member)
    if not _fragments(member):
        return None
    fragment, reducer.squares.lends_views = _fragments(member)[0], True
    with fragment.bucket.total.borrowed() as total:
        return total[fragment.span].to(fragment.leaf.dtype, copy=fragment.bucket.total.memory is None)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's fragment of one optimizer state tensor, a view where it rests in memory."""
    member = _member(param)
    if member is None:
        return None
    return _local(param, lambda fragment: _state_of(member, fragment).get(optim_state_key))


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's fragment of the values; every rank sets its own, all call together.

    Args:
        param: a parameter of an engine's model.
        value: 1-D, as `safe_get_local_fp32_param` gives.
    """
    member = _member(param)
    if member is not None:
        group = group_of(member)
        meet_before_change([group])
        with group.updated.borrowed(changed=True) as masters:
            for fragment in _fragments(member):
                masters[fragment.span].copy_(value.reshape(-1))
        publish([group])
        group.advance()
        group.refresh()


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's fragment of the mean gradient; all ranks call together."""
    member = _member(param)
    reducer = _reducer(member)
    if member is None or reducer is None:
        raise ArgumentError("the parameter belongs to no engine; set .grad directly")
    reducer.finish(Purpose.WRITE, member)
    reducer.forget_reads(member)
    for fragment in _fragments(member):
        with fragment.bucket.total.borrowed(changed=True) as total:
            total[fragment.span].copy_(value.reshape(-1))


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's fragment of one optimizer state tensor."""
    member = _member(param)
    if member is None:
        raise ArgumentError("the parameter belongs to no engine")
    with _at_hand(member, changed=True):
        for fragment in _fragments(member):
            _replace(_state_of(member, fragment), optim_state_key, value, member)
