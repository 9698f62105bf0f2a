"""Hooks that wait for the deferred all-gather before a module computes."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from deepspeed.zero.layout.units import owners_of
from deepspeed.zero.parameters.deferred_all_gather import landed
from deepspeed.zero.parameters.functorch import feed_transforms
from deepspeed.zero.parameters.module_hooks import Hook
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.shard_group import ShardGroup, group_of


class DeferredAllGatherHooks:
    """Lets the values of whole groups arrive after `step`; see [Note: arriving] in
    `deepspeed/zero/parameters/deferred_all_gather.py`.
    """

    def __init__(self, module: nn.Module, groups: list[ShardGroup]) -> None:
        self._module, self._groups = module, [group for group in groups if group.publishes_beside]
        self._units: dict[nn.Module, list[ShardGroup]] = {}
        for param, unit in owners_of(module) if self._groups else ():  # all of them: who runs first is not known
            if is_managed(param):
                known, group = self._units.setdefault(unit, []), group_of(param._ds_member)  # type: ignore[attr-defined]
                if group not in known and group.publishes_beside:
                    known.append(group)
        self._hooks: list[Any] = []

    @property
    def allowed(self) -> bool:
        """Whether publishes may arrive late on this rank: a compiled module would be traced with a class that goes."""
        if not self._groups or any(_is_compiled(module) for module in (self._module, *self._units)):
            self.detach()
            return False
        if not self._hooks:
            self._attach()
        return True

    def wait(self) -> None:
        """Wait for all on the current stream."""
        for group in self._groups:
            group.wait()

    def detach(self) -> None:
        """Take the hooks off, with nothing on its way."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _attach(self) -> None:
        feed_transforms(landed, landed)
        for unit, groups in self._units.items():
            self._hooks.append(unit.register_forward_pre_hook(Hook(partial(_land, groups)), prepend=True))


def _land(groups: list[ShardGroup], *_: Any) -> None:
    for group in groups:
        group.wait()


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
