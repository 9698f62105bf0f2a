"""Division of parameters into groups (`ShardGroup`), each of which is communicated in one collective.

At stages 0 to 2, groups are buckets of limited size, in the order of backward. At stage 3, each unit of the module tree
(`zero/layout/units.py`) has one group, or several if its parameters differ in dtype, device etc. (`GroupKey`).
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.encoded import Wire
from deepspeed.foundation.log import log_once
from deepspeed.foundation.malloc import limits_addresses, own_pages
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.layout.layout import ShardLayout, by_first, by_group, by_owner
from deepspeed.zero.layout.stages import KEPT_WHOLE, Policy
from deepspeed.zero.layout.units import repeated_blocks, units_of
from deepspeed.zero.parameters.parallel_groups import DATA_PARALLEL, GroupRanks, Signature
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord, Tiers
from deepspeed.zero.parameters.shard_group import ShardGroup

# A bucket has at most 1 / MIN_BUCKETS of the model's elements, or MIN_BUCKET_NUMEL if that is more, so that reduction
# overlaps with backward on small models too.
MIN_BUCKETS, MIN_BUCKET_NUMEL = 8, 1 << 18


@dataclass(frozen=True)
class GroupingPlan:
    """Sizes and constraints of parameter groups.

    Args:
        bucket: maximum number of elements in a bucket (`reduce_bucket_size`).
        whole_tensors: divide groups between parameters only, for optimizers that need whole matrices.
        one_owner: assign all parameters to one rank, for optimizers that need all of them at once.
        persist_below: parameters with fewer elements are not sharded at stage 3 (`stage3_param_persistence_threshold`).
        persist_total: maximum number of elements of these parameters (`stage3_model_persistence_threshold`).
        wire: codecs of the all-gathers of trained parameters.
        frozen_wire: codecs of the all-gathers of frozen parameters.
        tables: 2-D parameters whose gradients are sent by rows; each is a group.
    """

    bucket: int = 500_000_000
    whole_tensors: bool = False
    one_owner: bool = False
    persist_below: int = 0
    persist_total: int = 1 << 62
    wire: Wire = Wire()
    frozen_wire: Wire = Wire()
    tables: frozenset[Parameter] = frozenset()

    def exact(self) -> GroupingPlan:
        """Return the plan for groups whose messages have no codec."""
        return replace(self, wire=Wire(), frozen_wire=Wire())

    def layout_for(self, policy: Policy, numels: list[int], ranks: int) -> ShardLayout:
        """Return the layout of a group: how its concatenated parameters are divided into one shard per rank.

        Args:
            policy: sharding policy of the group.
            numels: number of elements of each parameter.
            ranks: number of ranks.
        """
        if self.one_owner and policy.owns_a_shard:
            return by_first(numels, ranks)
        if self.whole_tensors and policy.owns_a_shard:
            return by_owner(numels, ranks)
        return by_group(numels, ranks)


class GroupKey(NamedTuple):
    """Properties that are equal for all parameters of a group."""

    policy: Policy
    unit: nn.Module | None  # unit of stage 3; None for buckets
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    updated: bool  # whether the optimizer updates them
    signature: Signature
    table: Parameter | None  # one of `GroupingPlan.tables`


def named_parameters(module: nn.Module, extra: Iterable[Parameter] = ()) -> dict[Parameter, str]:
    """Return the names of all parameters of a model, in its order; a shared parameter has its first name.

    Args:
        module: model.
        extra: parameters of the optimizer; those not in the model are named "optimizer parameter 0" etc., by index.
    """
    names = {param: name for name, param in module.named_parameters()}
    for index, param in enumerate(extra):
        names.setdefault(param, f"optimizer parameter {index}")
    return names


T = TypeVar("T")


def bins(items: Iterable[T], limit: int, numel: Callable[[T], int]) -> list[list[T]]:
    """Split items into consecutive lists.

    Args:
        items: items in order.
        limit: maximum sum of sizes in a list; a larger item gets a list of its own.
        numel: function that returns the size of an item.
    """
    packed: list[list[T]] = []
    filled = limit + 1
    for item in items:
        if filled + numel(item) > limit:
            packed.append([])
            filled = 0
        packed[-1].append(item)
        filled += numel(item)
    return packed


def plan_groups(
    module: nn.Module,
    names: dict[Parameter, str],
    updated: set[Parameter],
    policy: Policy,
    plan: GroupingPlan,
    dtypes: Mapping[Parameter, torch.dtype],
    signatures: Mapping[Parameter, Signature] = MappingProxyType({}),
    alone: Collection[Parameter] = (),
) -> list[tuple[Policy, list[Parameter]]]:
    """Divide a model's parameters into groups; all parameters of a group have the same `GroupKey`.

    Args:
        module: model.
        names: names of all parameters, in the order of the model.
        updated: parameters that the optimizer updates.
        policy: policy of the ZeRO stage.
        plan: sizes and constraints; at stage 3, its small parameters get the policy of stage 2.
        dtypes: compute dtypes of parameters, where they differ from the parameter's dtype.
        signatures: signatures of parameters (`parallel_groups.py`); default: `DATA_PARALLEL`.
        alone: parameters that only this rank has, such as experts, so that they need no all-gather.

    Returns:
        Policy and parameters of each group. Below stage 3, parameters that are not updated are in no group.
    """
    unit_of: dict[Parameter, nn.Module] = {}
    if policy.gathers_before_use:
        unit_of = units_of(module)
        if blocks := repeated_blocks(module):
            log_once(f"sharding {len(blocks)} repeated blocks as units, other modules one by one", key=id(module))
    by_key: dict[GroupKey, list[Parameter]] = defaultdict(list)
    persistent = 0
    for param in names:
        of_param = policy
        # Small parameters get the policy of stage 2: they are all-gathered after each step, and only their gradients
        # and optimizer state are sharded.
        small = param.numel() < plan.persist_below and persistent + param.numel() <= plan.persist_total
        if policy.gathers_before_use and (small or param in alone):
            of_param, persistent = KEPT_WHOLE, persistent + param.numel() * small
        elif not policy.gathers_before_use and param not in updated:
            continue  # neither sharded nor updated: nothing to manage
        unit = unit_of.get(param) if of_param.gathers_before_use else None
        dtype, signature = dtypes.get(param, param.dtype), signatures.get(param, DATA_PARALLEL)
        table = param if param in plan.tables else None
        key = GroupKey(of_param, unit, dtype, param.device, param.requires_grad, param in updated, signature, table)
        by_key[key].append(param)
    groups: list[tuple[Policy, list[Parameter]]] = []
    total = sum(p.numel() for p in names)
    limit = plan.bucket if plan.whole_tensors else min(plan.bucket, max(total // MIN_BUCKETS, MIN_BUCKET_NUMEL))
    for key, params in by_key.items():
        if key.policy.gathers_before_use:
            groups.append((key.policy, params))
        else:
            backward_order = params[::-1]
            groups += [(key.policy, bucket) for bucket in bins(backward_order, limit, Parameter.numel)]
    return groups


def unshard(params: Iterable[Any]) -> None:
    """Convert parameters of `zero.Init` to ordinary, unsharded ones. All ranks with shards of them must call this."""
    managed = [param for param in params if is_managed(param)]
    groups = list(dict.fromkeys(param._ds_member.group for param in managed))
    for group in groups:
        group.wait_all_gather()
        group.dissolve()
    for param in managed:
        param.data = param.data.clone()
    for group in groups:
        group.drop()


def build_group(
    ranks: GroupRanks,
    policy: Policy,
    params: list[Parameter],
    names: dict[Parameter, str],
    plan: GroupingPlan,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    tiers: Tiers | None = None,
) -> ShardGroup:
    """Create a `ShardGroup`, and first gather parameters that `zero.Init` has sharded. All its ranks must call this.

    Args:
        ranks: ranks of the group.
        policy: sharding policy.
        params: parameters of the group.
        names: names of all parameters.
        plan: constraints of the layout.
        dtypes: compute dtype, and dtype of the master weights (None: no master weights).
        tiers: storage tiers; None: the device.
    """
    away = tiers is not None and tiers.parameters is not RESIDENT
    # If host memory is limited, buffers are allocated with mmap, so that freed buffers are returned to the OS at once.
    with own_pages() if away or limits_addresses() else contextlib.nullcontext():
        initialized: list[ShardGroup] = [param._ds_member.group for param in params if is_managed(param)]  # type: ignore[attr-defined]
        for group in initialized:
            group.wait_all_gather()
            group.dissolve()
        members = [ParamRecord(param, names[param]) for param in params]
        layout = plan.layout_for(policy, [p.numel() for p in params], ranks.shard.size)
        wire = plan.wire if params[0].requires_grad else plan.frozen_wire
        shard_group = ShardGroup(
            ranks, policy, layout, members, dtype=dtypes[0], master=dtypes[1], tiers=tiers, wire=wire
        )
        shard_group.by_rows = params[0] in plan.tables
    if initialized:
        for group in initialized:
            group.drop()
        if shard_group.device.type == "cpu":
            # Return the memory of many small freed buffers to the OS.
            get_accelerator().empty_cache()
    return shard_group
