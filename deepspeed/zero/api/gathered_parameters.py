"""`GatheredParameters`, and parameters that are used outside of their own module."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.collectives import broadcast
from deepspeed.errors import ArgumentError
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.shard_group import ShardGroup, State


class GatheredParameters:
    """A context in which the parameters are gathered on every rank. Entering it is collective.

    Args:
        params: a parameter, or an iterable of parameters; parameters without an engine are ignored.
        modifier_rank: the global rank whose in-place changes are broadcast on exit; None: at stage 3, changes are lost.
        fwd_module: a module that uses the parameters in its forward; its forward gathers them from now on.
        enabled: False: the context does nothing.

    Example:
        >>> with deepspeed.zero.GatheredParameters(layer.weight, modifier_rank=0):
        ...     if rank == 0: torch.nn.init.normal_(layer.weight)
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor | None],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.modifier_rank, self._groups, self._members = modifier_rank, [], []
        if not enabled:
            return
        listed = [params] if isinstance(params, torch.Tensor) else self._listed(params)
        seen: set[int] = set()
        groups: dict[int, ShardGroup] = {}
        for param in listed:
            if is_managed(param) and id(param) not in seen:
                seen.add(id(param))
                member = param._ds_member  # type: ignore[union-attr]
                self._members.append(member)
                groups[id(member.group)] = member.group
                if fwd_module is not None:
                    register_external_parameter(fwd_module, param)  # type: ignore[arg-type]
        self._groups = list(groups.values())

    @staticmethod
    def _listed(params: Any) -> list[torch.Tensor | None]:
        entries = list(params) if isinstance(params, Iterable) else [params]
        for entry in entries:
            if entry is not None and not isinstance(entry, torch.Tensor):
                raise ArgumentError(
                    f"GatheredParameters takes a parameter or an iterable of them, not a {type(entry).__name__}; of a "
                    f"module pass module.parameters()"
                )
        return entries

    def __enter__(self) -> None:
        for group in self._groups:
            if self.modifier_rank is not None:
                group.ranks.position(self.modifier_rank)
        for group in self._groups:
            if group.policy.gathers_before_use:
                group.gather_together()
            group.users += 1
            group.editors += 1

    def __exit__(self, error: Any, *_: Any) -> None:
        changed = self._take_over() if self.modifier_rank is not None and error is None else set()
        for group in self._groups:
            group.users, group.editors = max(0, group.users - 1), group.editors - 1
            if id(group) in changed:
                group.keep_own()
            if group.users == 0:
                group.reshard(edits_allowed=True)

    def _take_over(self) -> set[int]:
        """Broadcast the values of the modifier rank; returns the ids of the groups with the parameters."""
        changed = set()
        for member in self._members:
            group = member.group
            if group.state is State.SHARDED:  # a step inside has freed it, and has seen that nothing was changed
                continue
            member.restore_view()
            editor = group.ranks.position(self.modifier_rank or 0)
            broadcast(group.ranks.everyone, member.flat(), editor, f"edit of {member.name}")
            group.import_edits(member)
            changed.add(id(group))
        return changed


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that `module` uses `parameter` of another module in its forward.

    Args:
        module: the module that uses the parameter.
        parameter: the parameter; no effect if no engine manages it.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise ArgumentError(f"register_external_parameter needs a Parameter, got {type(parameter).__name__}")
    if is_managed(parameter):
        group = parameter._ds_member.group  # type: ignore[attr-defined]
        if group.lifecycle is not None:
            group.lifecycle.add_external(module, group)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter`."""
    if is_managed(parameter):
        group = parameter._ds_member.group  # type: ignore[attr-defined]
        if group.lifecycle is not None:
            group.lifecycle.remove_external(module, group)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Generator[nn.Module, None, None]:
    """A context in which an engine's module is gathered and has no hooks, for fast generation.

    Args:
        model: an engine at any stage. Entering the context is collective.

    Yields:
        The engine's module.
    """
    lifecycle = model._components.lifecycle
    with GatheredParameters(list(model.module.parameters())):
        if lifecycle is not None:
            lifecycle.detach()
        try:
            yield model.module
        finally:
            if lifecycle is not None:
                lifecycle.attach()
