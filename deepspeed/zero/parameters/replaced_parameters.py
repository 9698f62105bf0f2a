"""Detection of parameters that user code has replaced in the model of an engine.

[Note: replaced parameters] Optimizer, gradients and shards refer to a parameter object, so it must not be replaced.
`torch.utils.swap_tensors`, which torch's conversions of modules may use, keeps the object and exchanges its contents;
`module.weight = nn.Parameter(…)` and `load_state_dict(assign=True)` put another object into the module. Both are
detected before the next forward in training, or at the latest before the update: the new values are copied into the
original parameter, which is put back into the module. At stage 3 a rank cannot write the shards of other ranks, so an
error is raised.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.errors import UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.zero.parameters.parameter import (
    ManagedParameter,
    is_managed,
    manage,
    raw_grad,
    reject_write,
    set_raw_grad,
)
from deepspeed.zero.parameters.record import ParamRecord

Table = dict[str, Parameter | None]


class Replaced:
    """Detector of replaced parameters; see [Note: replaced parameters].

    Args:
        listen: registers the gradient hook of a parameter (see `Reducer.listen`).
        arrived: moves a parameter's gradient to its bucket (see `Reducer.arrived`).
    """

    def __init__(self, listen: Callable[[ParamRecord, bool], None], arrived: Callable[[ParamRecord], None]) -> None:
        self._listen, self._arrived = listen, arrived
        self._left: dict[int, tuple[ParamRecord, dict[str, Any]]] = {}
        self._places: list[tuple[Table, str, ParamRecord]] = []
        self._columns: tuple[tuple[Any, ...], ...] = ()  # columns of `_places`: tables, names, parameters

    def watch(self, module: nn.Module) -> None:
        """Record the parameters of all modules of a model, so that `settle` detects replaced ones."""
        tables = [child._parameters for child in module.modules() if isinstance(child._parameters, dict)]
        named = [(table, name, param) for table in tables for name, param in table.items()]
        self._places = [
            (table, name, param._ds_member)
            for table, name, param in named
            if isinstance(param, ManagedParameter) and param._ds_member.reducer is not None
        ]
        self._columns = tuple(zip(*((table, name, member.param) for table, name, member in self._places), strict=True))

    def leaves(self, member: ParamRecord, kind: type) -> None:
        """Check that `swap_tensors` may exchange a parameter with a tensor of class `kind`, and record the swap.

        Raises:
            ShardedParameterError: the parameter is sharded at stage 3.
            UsageError: `kind` is not `nn.Parameter`.
        """
        if member.group.policy.gathers_before_use:
            reject_write("swap_tensors", member)
        if kind is not Parameter:
            raise UsageError(
                f"swap_tensors would make parameter '{member.name}' a {kind.__name__}, which the engine that trains it "
                f"cannot update: convert the model before deepspeed.initialize"
            )
        self._left[member.uid] = member, dict(vars(member.param))

    def settle(self) -> None:
        """Copy the values of tensors that replaced parameters into the original parameters, and put these back.

        Raises:
            UsageError: a tensor has another shape or kind of dtype, replaced a parameter at stage 3, or replaced a
                shared parameter in some modules only.
        """
        while self._left:
            uid, (member, marks) = next(iter(self._left.items()))
            member.check_fit()
            vars(member.param).update(marks)
            manage(member.param, member)
            del self._left[uid]
            self._listen(member, True)
            if raw_grad(member.param) is not None:
                self._arrived(member)
        if self._columns:
            tables, names, params = self._columns
            if not all(map(operator.is_, map(dict.get, tables, names), params)):  # runs in each step, so no Python loop
                self._look()

    def _look(self) -> None:
        """Find replaced parameters and import their values."""
        others = defaultdict[int, list[tuple[Table, str, ParamRecord]]](list)
        for place in self._places:
            table, name, member = place
            there = table.get(name)
            # torch.func.functional_call replaces parameters temporarily, by tensors that are not parameters.
            if there is not member.param and isinstance(there, Parameter) and not is_managed(there):
                others[member.uid].append(place)
        for places in others.values():
            self._take_over(places)

    def _take_over(self, places: list[tuple[Table, str, ParamRecord]]) -> None:
        """Import the tensor that replaced one parameter in `places` (table, name, parameter); raises as `settle`."""
        member = places[0][2]
        param, tensors = member.param, [table[name] for table, name, _ in places]
        new, how = tensors[0], f"parameter '{member.name}' was replaced by another tensor after initialize"
        everywhere = sum(other is member for _, _, other in self._places)
        if new is None or new.shape != member.shape or new.dtype.is_floating_point != param.dtype.is_floating_point:
            raise UsageError(
                f"{how}, of {tuple(new.shape) if new is not None else ()} instead of {tuple(member.shape)}, which the "
                f"optimizer does not have: change the model before deepspeed.initialize, or put the parameter back"
            )
        if member.group.policy.gathers_before_use:
            raise UsageError(
                f"{how}, and the optimizer has the old one, of which each rank holds a shard. Put it back, and copy "
                f"the values into it inside deepspeed.zero.GatheredParameters([param], modifier_rank=0), or with "
                f"deepspeed.utils.safe_set_full_fp32_param"
            )
        if len(tensors) < everywhere or any(other is not new for other in tensors):
            raise UsageError(
                f"{how} in one of the {everywhere} places that share it: share other weights before "
                f"deepspeed.initialize, or put the parameter back"
            )
        warn_once(
            f"{how} (an assignment to the module, or load_state_dict with assign=True): its values are copied into the "
            f"parameter that the optimizer has, which the module gets back",
            key=("replaced", member.uid),
        )
        with torch.no_grad():
            param.copy_(new)
        param.requires_grad_(new.requires_grad)
        for table, name, _ in places:
            table[name] = param
        if new.grad is not None:
            set_raw_grad(param, new.grad)
            self._arrived(member)
