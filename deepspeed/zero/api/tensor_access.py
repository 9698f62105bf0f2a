"""Access to the training state of a parameter: `safe_get_*` and `safe_set_*`.

All functions for full tensors are collective over the ranks with shards or tensor-parallel slices of the parameter.
Gradients exist between backward and step. For an ordinary parameter, without engine or `zero.Init`, getters return None
(`safe_get_full_grad`: `param.grad`), and setters raise (`safe_set_local_fp32_param`: no effect).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from deepspeed.comm.collectives.autograd import gathered
from deepspeed.comm.collectives.collectives import READ
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.zero.gradients.accumulation import Purpose
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.layout.regions import Region, RegionRange, copies, uncovered
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.optimizer.update import all_gather_updated
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import group_of, meet_before_change


class _Access:
    """Managed parameter with its optimizer and this rank's fragments of it."""

    def __init__(self, member: ParamRecord) -> None:
        self.member, owner = member, member.owner
        self.owner = owner if isinstance(owner, ZeroOptimizer) and member.uid in owner.fragments else None
        self.fragments = [] if self.owner is None else self.owner.fragments[member.uid]
        self.reducer = member.reducer if isinstance(member.reducer, Reducer) else None

    @classmethod
    def to(cls, param: torch.nn.Parameter) -> _Access | None:
        return cls(param._ds_member) if is_managed(param) else None  # type: ignore[attr-defined]

    @classmethod
    def with_value(cls, param: torch.nn.Parameter, value: torch.Tensor) -> tuple[_Access, torch.Tensor]:
        """Return the access and this rank's slice of a value of the unsharded shape; padding is zero.

        Raises:
            ArgumentError: the parameter belongs to no engine or `zero.Init`, or the shape is wrong.
        """
        access = cls.to(param)
        if access is None:
            raise ArgumentError("the parameter belongs to no engine; change it directly")
        box = access.region
        if tuple(value.shape) != box.shape:
            raise ArgumentError(f"'{access.member.name}' has shape {box.shape}, the value {tuple(value.shape)}")
        if box.whole:
            return access, value
        value = value.detach()
        local = value.new_zeros(box.local_shape)
        whole = Region(box.shape)
        for copy in copies(RegionRange(whole, 0, whole.numel), RegionRange(box, 0, box.numel)):
            copy(value.contiguous().reshape(-1), local.view(-1))
        return access, local

    @property
    def region(self) -> Region:
        return Region.of(placement_of(self.member.param), self.member.shape)

    def at_hand(self, changed: bool = False) -> AbstractContextManager[None]:
        """Return a context in which leaves and optimizer state of the parameter's group are in memory."""
        return nullcontext() if self.owner is None else self.owner.shard_of(self.member).at_hand(changed)

    def state_of(self, fragment: Fragment) -> dict[str, Any]:
        return {} if self.owner is None else self.owner.state[fragment.leaf]

    def replace_state(self, fragment: Fragment, key: str, values: torch.Tensor) -> None:
        state = self.state_of(fragment)
        if key not in state:
            raise UsageError(f"'{self.member.name}' has no optimizer state {key!r} (yet); there is {sorted(state)}")
        state[key].copy_(values.view(state[key].shape))

    def assemble(self, pick: Callable[[Fragment], torch.Tensor | None], label: str) -> torch.Tensor:
        """All-gather `pick(fragment)` of all ranks to a float32 tensor; NaN where no rank has a value.

        Args:
            pick: returns the values of a fragment, or None.
            label: name of the collective for messages.
        """
        member, group = self.member, self.member.group
        shard = torch.full((group.high - group.low,), torch.nan, dtype=torch.float32, device=group.device)
        with self.at_hand():
            for fragment in self.fragments:
                values = pick(fragment)
                if values is not None:
                    shard[fragment.span].copy_(values.reshape(-1))
        if not group.policy.owns_a_shard:
            return shard[member.offset : member.offset + member.numel].view(member.shape)
        return group.assemble(member, shard, READ, label).view(member.shape)

    def join_slices(self, local: torch.Tensor | None, label: str) -> torch.Tensor | None:
        """Join the tensor-parallel slices of the parameter to the unsharded tensor; see `join_slices`."""
        axis = group_of(self.member).ranks.slices
        if axis is None or not placement_of(self.member.param).cuts:
            return local
        return join_slices(axis, self.region, local, label)


def join_slices(axis: Axis, box: Region, local: torch.Tensor | None, label: str) -> torch.Tensor | None:
    """All-gather tensor-parallel slices and join them to the unsharded tensor. All ranks must call this.

    Args:
        axis: process group of the ranks with slices.
        box: region of the unsharded tensor that this rank has.
        local: tensor with the elements of the region; None: this rank has none; zeros if another rank has some.
        label: name of the collective for messages.

    Returns:
        Unsharded tensor; None if `local` is None on all ranks.

    Raises:
        UsageError: no rank has a certain element.
    """
    kinds = all_gather_objects(axis, (box, None if local is None else (local.dtype, local.device.type)))
    known = next((kind for _, kind in kinds if kind is not None), None)
    if known is None:
        return None
    boxes = [region for region, _ in kinds]
    gap = uncovered(boxes)
    if gap is not None:
        raise UsageError(f"{label}: no rank has element {list(gap)} of {box.shape}: the ranks' placements leave it out")
    if local is None:
        local = torch.zeros(box.local_shape, dtype=known[0], device=known[1])
    sizes = [region.numel for region in boxes]
    slices = gathered(local.reshape(-1), axis, 0, sizes, label).split(sizes)
    tensor, whole = local.new_zeros(box.shape), Region(box.shape)
    for region, part in zip(boxes, slices, strict=True):
        for copy in copies(RegionRange(region, 0, region.numel), RegionRange(whole, 0, whole.numel)):
            copy(part.reshape(-1), tensor.view(-1))
    return tensor


def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a copy of a parameter's master weights. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.

    Returns:
        float32 tensor of the unsharded shape; None if no optimizer updates the parameter. Slices that are marked only
        by Megatron's attribute `tensor_model_parallel` are not joined, since their position is unknown.
    """
    access = _Access.to(param)
    if access is None or access.owner is None:
        return None
    access.owner.import_edits(access.member)
    with access.member.group.updated.borrowed() as masters:
        label = f"master of {access.member.name}"
        return access.join_slices(access.assemble(lambda fragment: masters[fragment.span], label), label)


def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return a copy of a parameter's gradient. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.

    Returns:
        float32 tensor of the unsharded shape, accumulated since the last update, without the loss scale; at stages 0
        and 1, until the last micro-batch, the part of this rank only. None if there is no gradient.
    """
    access, gradient = _Access.to(param), param.grad
    if access is None:
        return gradient
    local = None if gradient is None else gradient.detach().float().clone()
    return access.join_slices(local, f"gradient of {access.member.name}")


def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of one tensor of a parameter's optimizer state. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.
        optim_state_key: name of the state tensor, such as "exp_avg" or "momentum_buffer".

    Returns:
        float32 tensor of the unsharded shape; None before the first step, without such a state, or without an engine.

    Raises:
        UsageError: the state was moved by `engine.offload_states`.
    """
    access = _Access.to(param)
    if access is None or access.owner is None:
        return None
    state = access.owner.state

    def pick(fragment: Fragment) -> torch.Tensor | None:
        value = state.get(fragment.leaf, {}).get(optim_state_key)
        return value if isinstance(value, torch.Tensor) and value.numel() == fragment.range.numel else None

    label = f"{optim_state_key} of {access.member.name}"
    whole = access.assemble(pick, label)
    return access.join_slices(None if whole.isnan().all() else whole, label)


def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's values and its master weights. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.
        value: floating-point tensor of the unsharded shape, equal on all ranks.

    Raises:
        ArgumentError: the parameter belongs to no engine or `zero.Init`, or the shape is wrong.
    """
    access, value = _Access.with_value(param, value)
    access.member.group.write(access.member, value)
    access.member.group.advance()


def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace a parameter's gradient. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.
        value: floating-point tensor of the unsharded shape, equal on all ranks; scaled like `safe_get_full_grad`.

    Raises:
        ArgumentError: the parameter belongs to no engine or `zero.Init`, or the shape is wrong.
        UsageError: the parameter is frozen.
    """
    _, param.grad = _Access.with_value(param, value)


def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace one tensor of a parameter's optimizer state. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.
        value: floating-point tensor of the unsharded shape, equal on all ranks.
        optim_state_key: name of the state tensor, such as "exp_avg" or "momentum_buffer".

    Raises:
        ArgumentError: the parameter belongs to no engine or `zero.Init`, or the shape is wrong.
        UsageError: there is no such state (before the first step, there is none).
    """
    access, value = _Access.with_value(param, value)
    if safe_get_full_optimizer_state(param, optim_state_key) is None:  # the same on all ranks, also without a fragment
        raise UsageError(f"'{access.member.name}' has no optimizer state {optim_state_key!r} (yet)")
    flat = value.detach().reshape(-1)
    with access.at_hand(changed=True):
        for fragment in access.fragments:
            access.replace_state(fragment, optim_state_key, flat[fragment.range.start : fragment.range.stop])


def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's shard of a parameter's master weights.

    Args:
        param: parameter of an engine's model.

    Returns:
        1-D tensor in the dtype of the master weights: a view if they are in memory, else a copy. None if this rank has
        no elements, or no optimizer updates the parameter.
    """
    access = _Access.to(param)
    if access is None or access.owner is None or not access.fragments:
        return None
    access.owner.import_edits(access.member)
    updated = access.member.group.updated
    with updated.borrowed() as masters:
        master = masters[access.fragments[0].span]
        return master if updated.memory is not None else master.clone()


def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Return this rank's shard of a parameter's gradient. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.

    Returns:
        1-D tensor in the dtype of the master weights, a view if the accumulator is in memory and has this dtype; None
        if the parameter has no gradient, or this rank has no elements of it.

    Raises:
        UsageError: ranks disagree about the gradients; see `Reducer.finish`.
    """
    access = _Access.to(param)
    if access is None or access.reducer is None or access.reducer.clean:
        return None
    access.reducer.finish(Purpose.READ, access.member)
    if not access.fragments or not access.reducer.touched(access.fragments[0].bucket, access.member):
        return None
    fragment, access.reducer.squares.lends_views = access.fragments[0], True
    with fragment.bucket.total.borrowed() as total:
        return total[fragment.span].to(fragment.leaf.dtype, copy=fragment.bucket.total.memory is None)


def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's shard of one tensor of a parameter's optimizer state.

    Args:
        param: parameter of an engine's model.
        optim_state_key: name of the state tensor, such as "exp_avg" or "momentum_buffer".

    Returns:
        1-D tensor, a view if the state is in memory; None if there is no such state, or this rank has no elements.

    Raises:
        UsageError: the state was moved by `engine.offload_states`.
    """
    access = _Access.to(param)
    if access is None or not access.fragments:
        return None
    with access.at_hand():
        tensor = access.state_of(access.fragments[0]).get(optim_state_key)
        if tensor is None:
            return None
        lent = access.member.group.tiers.optimizer.moves
        return tensor.reshape(-1).clone() if lent else tensor.reshape(-1)


def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's shard of a parameter's values and master weights. All ranks must call this.

    Args:
        param: parameter of an engine's model; without an engine, nothing happens.
        value: tensor with as many elements as `safe_get_local_fp32_param` returns; ignored if this rank has none.
    """
    access = _Access.to(param)
    if access is not None:
        group = group_of(access.member)
        meet_before_change([group])
        with group.updated.borrowed(changed=True) as masters:
            for fragment in access.fragments:
                masters[fragment.span].copy_(value.reshape(-1))
        all_gather_updated([group])
        group.advance()
        group.refresh()


def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's shard of a parameter's gradient. All ranks with the parameter must call this.

    Args:
        param: parameter of an engine's model.
        value: tensor with as many elements as `safe_get_local_grad` returns; ignored if this rank has none.

    Raises:
        ArgumentError: the parameter belongs to no engine.
        UsageError: the parameter is frozen.
    """
    access = _Access.to(param)
    if access is None or access.reducer is None:
        raise ArgumentError("the parameter belongs to no engine; set .grad directly")
    access.reducer.set_local_grad(access.member, value)


def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's shard of one tensor of a parameter's optimizer state.

    Args:
        param: parameter of an engine's model.
        value: tensor with as many elements as `safe_get_local_optimizer_state` returns; ignored if this rank has none.
        optim_state_key: name of the state tensor, such as "exp_avg" or "momentum_buffer".

    Raises:
        ArgumentError: the parameter belongs to no engine or `zero.Init`.
        UsageError: there is no such state.
    """
    access = _Access.to(param)
    if access is None:
        raise ArgumentError("the parameter belongs to no engine")
    with access.at_hand(changed=True):
        for fragment in access.fragments:
            access.replace_state(fragment, optim_state_key, value)
