"""Resharding of parameters of `zero.Init` over other ranks, one parameter at a time.

`zero.Init` shards a pipeline's model over the ranks of all stages. This module moves each parameter to the ranks of its
own stage: sharded over these ranks at ZeRO stage 3, else whole on each. Meanwhile a rank has in memory the parameters
moved so far, its old shards of the others, and one unsharded parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import UsageError
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.layout.layout import by_group
from deepspeed.zero.layout.stages import policy_for
from deepspeed.zero.parameters.grouping import unshard
from deepspeed.zero.parameters.parallel_groups import alone
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord, Tiers
from deepspeed.zero.parameters.shard_group import ShardGroup


def is_sharded_by_init(model: nn.Module) -> bool:
    """Return whether any parameter of a model belongs to `zero.Init` or an engine."""
    return any(is_managed(param) for param in model.parameters())


def check_not_served(model: nn.Module) -> None:
    """Check that no parameter of a model belongs to another engine; raises UsageError if one does."""
    for name, param in model.named_parameters():
        member = param._ds_member if is_managed(param) else None  # type: ignore[attr-defined]
        if member is not None and (member.reducer is not None or member.group.lifecycle is not None):
            raise UsageError(
                f"parameter '{name}' belongs to another engine; call its destroy() before the model gets a new one"
            )


def shard_over(params: Mapping[str, Parameter], unchanged: Iterable[Parameter], axis: Axis | None) -> None:
    """Reshard parameters of `zero.Init` over a process group. All ranks with shards of them must call this.

    Args:
        params: parameters by name; those that are not sharded are left alone.
        unchanged: parameters that this rank needs; all others become empty tensors.
        axis: process group of the new shards; None: the parameters stay unsharded.
    """
    stay = set(unchanged)
    for name, param in params.items():
        if not is_managed(param):
            continue
        tiers: Tiers = param._ds_member.group.tiers  # type: ignore[attr-defined]
        unshard([param])
        if param not in stay:
            param.data = param.data.new_empty(0)
        elif axis is not None and (axis.size > 1 or tiers.parameters is not RESIDENT):
            shard_parameter(param, name, axis, tiers)
    if any(param.device.type == "cpu" for param in params.values()):  # return the memory of many small buffers
        get_accelerator().empty_cache()


def shard_parameter(param: Parameter, name: str, axis: Axis, tiers: Tiers | None = None) -> None:
    """Shard a parameter as `zero.Init` does. All ranks of the process group must call this.

    Args:
        param: unsharded parameter, with equal values on all ranks.
        name: name for messages.
        axis: process group.
        tiers: storage tiers; None: the device.
    """
    with torch.no_grad():
        layout = by_group([param.numel()], axis.size)
        ShardGroup(alone(axis), policy_for(3), layout, [ParamRecord(param, name)], tiers=tiers)
