"""`GatheredParameters`, and registration of parameters that are used outside of their own module."""

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
    """Context in which sharded parameters are gathered on every rank. All ranks with the parameters must enter it.

    Args:
        params: parameter, or iterable of parameters; None and parameters without engine or `zero.Init` are ignored.
        modifier_rank: global rank whose in-place changes are broadcast on exit; None: changes are lost at stage 3.
        fwd_module: module of which each later forward gathers the parameters, as in `register_external_parameter`.
        enabled: if False, the context does nothing.

    Raises:
        ArgumentError: an entry of `params` is no tensor, or (on entry) `modifier_rank` does not have the parameters.

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
        """Broadcast the values of the modifier rank; returns the ids of the changed groups."""
        changed = set()
        for member in self._members:
            group = member.group
            if group.state is State.SHARDED:  # freed by a step in the context, which found no change
                continue
            member.restore_view()
            editor = group.ranks.position(self.modifier_rank or 0)
            broadcast(group.ranks.everyone, member.flat(), editor, f"edit of {member.name}")
            group.import_edits(member)
            changed.add(id(group))
        return changed


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Declare that `module` uses a parameter of another module, so that the forward of `module` gathers it.

    Args:
        module: module that uses the parameter in its forward.
        parameter: parameter of another module; no effect unless a stage-3 engine has sharded the parameter.

    Raises:
        ArgumentError: `parameter` is not a `torch.nn.Parameter`.
    """
    if not isinstance(parameter, torch.nn.Parameter):
        raise ArgumentError(f"register_external_parameter needs a Parameter, got {type(parameter).__name__}")
    if is_managed(parameter):
        group = parameter._ds_member.group  # type: ignore[attr-defined]
        if group.lifecycle is not None:
            group.lifecycle.add_external(module, group)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo `register_external_parameter` for the same arguments; no effect if they were not registered."""
    if is_managed(parameter):
        group = parameter._ds_member.group  # type: ignore[attr-defined]
        if group.lifecycle is not None:
            group.lifecycle.remove_external(module, group)


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Generator[nn.Module, None, None]:
    """Return a context for fast generation: all parameters are gathered, and the ZeRO hooks are removed.

    All ranks must enter the context.

    Args:
        model: engine (not its module), at any ZeRO stage.

    Yields:
        Module of the engine.
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
