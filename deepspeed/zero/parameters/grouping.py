"""Groups parameters: buckets in backward order, or the units of a sharded module."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
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

# A bucket is never larger than this share of the model, so that sending overlaps backward on small models too, and
# never smaller than this many elements on account of it.
LEAST_BUCKETS, SMALLEST_SHARE = 8, 1 << 18


@dataclass(frozen=True)
class GroupingPlan:
    """Sizes and constraints of groups.

    Args:
        bucket: most elements in a group (`reduce_bucket_size`).
        whole_tensors: the optimizer needs whole matrices, so groups are cut between parameters.
        one_owner: the optimizer needs all parameters at once, so one rank updates them all.
        persist_below: parameters with fewer elements stay whole (`stage3_param_persistence_threshold`).
        persist_total: most elements that stay whole (`stage3_model_persistence_threshold`).
    """

    bucket: int = 500_000_000
    whole_tensors: bool = False
    one_owner: bool = False
    persist_below: int = 0
    persist_total: int = 1 << 62

    def cut(self, policy: Policy, numels: list[int], ranks: int) -> ShardLayout:
        if self.one_owner and policy.owns_a_shard:
            return by_first(numels, ranks)
        if self.whole_tensors and policy.owns_a_shard:
            return by_owner(numels, ranks)
        return by_group(numels, ranks)


def named_parameters(module: nn.Module, extra: Iterable[Parameter] = ()) -> dict[Parameter, str]:
    """All parameters with their first names; those that only the optimizer knows come last."""
    names = {param: name for name, param in module.named_parameters()}
    for index, param in enumerate(extra):
        names.setdefault(param, f"optimizer parameter {index}")
    return names


T = TypeVar("T")


def bins(items: Iterable[T], limit: int, numel: Callable[[T], int]) -> list[list[T]]:
    """Split into consecutive lists of at most `limit` elements, with at least one parameter each."""
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
) -> list[tuple[Policy, list[Parameter]]]:
    """Split a model into (policy, parameters), each of one dtype, device, signature, trainable or frozen."""
    unit_of: dict[Parameter, nn.Module] = {}
    if policy.gathers_before_use:
        unit_of = units_of(module)
        if blocks := repeated_blocks(module):
            log_once(f"sharding {len(blocks)} repeated blocks as units, other modules one by one", key=id(module))
    kinds: dict[tuple[object, ...], list[Parameter]] = defaultdict(list)
    persistent = 0
    for param in names:
        own = policy
        # Kept parameters live by another row of the table: gathered for good, gradients and optimizer state split.
        small = param.numel() < plan.persist_below and persistent + param.numel() <= plan.persist_total
        if policy.gathers_before_use and small:
            own, persistent = KEPT_WHOLE, persistent + param.numel()
        elif not policy.gathers_before_use and param not in updated:
            continue  # neither split nor updated: nothing to manage
        unit = unit_of.get(param) if own.gathers_before_use else None
        dtype, signature = dtypes.get(param, param.dtype), signatures.get(param, DATA_PARALLEL)
        kinds[(own, unit, dtype, param.device, param.requires_grad, param in updated, signature)].append(param)
    groups: list[tuple[Policy, list[Parameter]]] = []
    total = sum(p.numel() for p in names)
    share = max(total // LEAST_BUCKETS, SMALLEST_SHARE)
    limit = plan.bucket if plan.whole_tensors else min(plan.bucket, share)
    for key, params in kinds.items():
        own = key[0]
        if not isinstance(own, Policy):
            raise TypeError("grouping key without a policy")
        if own.gathers_before_use:
            groups.append((own, params))
        else:
            groups += [(own, chunk) for chunk in bins(params[::-1], limit, Parameter.numel)]
    return groups


def release(params: Iterable[Any]) -> None:
    """Unshard parameters of zero.Init. All ranks that hold shards call together."""
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
    """Make one group; parameters that zero.Init has sharded are gathered and sharded anew."""
    away = tiers is not None and tiers.parameters is not RESIDENT
    # What it takes over goes back as it came: where memory is short, buffers are mapped, so that none lies in the way.
    with own_pages() if away or limits_addresses() else contextlib.nullcontext():
        initialized: list[ShardGroup] = [param._ds_member.group for param in params if is_managed(param)]  # type: ignore[attr-defined]
        for group in initialized:
            group.wait_all_gather()
            group.dissolve()
        members = [ParamRecord(param, names[param]) for param in params]
        layout = plan.cut(policy, [p.numel() for p in params], ranks.shard.size)
        shard_group = ShardGroup(ranks, policy, layout, members, dtype=dtypes[0], master=dtypes[1], tiers=tiers)
    if initialized:
        for group in initialized:
            group.drop()
        if shard_group.device.type == "cpu":
            # Many small buffers have been freed: without this their pages stay with the process.
            get_accelerator().empty_cache()
    return shard_group
