"""Weights of a model that a training engine holds: gathered for the passes of an executor, and watched for changes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.zero.parameters.module_hooks import ModuleHooks
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.shard_group import ShardGroup, group_of


def is_sharded(param: Any) -> bool:
    """Return whether an engine or `zero.Init` gathers a parameter before its use, so that its memory may move."""
    return is_managed(param) and param._ds_member.group.policy.gathers_before_use


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of changes in place that torch has counted; 0 if it counts none (inference mode)."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def groups_of(params: Iterable[Any]) -> list[ShardGroup]:
    """Return the groups of those parameters that an engine or `zero.Init` holds, each once."""
    groups = {id(param._ds_member.group): group_of(param._ds_member) for param in params if is_managed(param)}
    return list(groups.values())


def trained_model(model: nn.Module) -> nn.Module:
    """Return the model of Transformers inside of wrappers whose own forward does nothing to it.

    These are an engine, and a PEFT model whose adapters lie in the model's own layers (not one that puts virtual tokens
    before the prompt).
    """
    while True:
        own = vars(model).get("_modules", {})
        if hasattr(model, "peft_config") and callable(getattr(model, "get_base_model", None)):
            config: Any = model.active_peft_config
            invoked = getattr(config, "alora_invocation_tokens", None) or str(config.peft_type).endswith("XLORA")
            if getattr(config, "is_prompt_learning", False) or invoked:
                return model
            model = model.get_base_model()  # type: ignore[operator]
        elif "module" in own and hasattr(type(model), "backward"):
            model = own["module"]
        else:
            return model


class EngineWeights:
    """Access to the weights of a model, whether or not an engine holds them.

    Args:
        model: the model; it may get an engine later.
        switches: function that returns settings of the model which change what its weights do; None: there are none.
    """

    def __init__(self, model: nn.Module, switches: Callable[[], Any] | None = None) -> None:
        self.model, self._switches = model, switches
        self._version = 0
        self._params: list[Any] = []
        self._plain: list[Any] = []  # parameters whose version counter tells of changes
        self._groups: list[ShardGroup] = []
        self._state: Any = None
        self._pinned: list[ShardGroup] = []
        self.look()

    def look(self) -> None:
        """Read again which parameters there are, and which of them an engine holds."""
        self._params = list(self.model.parameters())
        self._plain = [param for param in self._params if not is_sharded(param)]
        self._groups = groups_of(self._params)

    def forget(self) -> None:
        """Drop the references to the parameters, which are about to be replaced; `look` finds the new ones."""
        self._params, self._plain, self._groups = [], [], []

    def read_alone(self) -> bool:
        """Whether this rank can gather what it needs without calls of the other ranks."""
        self.look()
        return all(group.reads_alone for group in self.sharded)

    @property
    def sharded(self) -> list[ShardGroup]:
        """Groups that are gathered before use (stage 3)."""
        return [group for group in self._groups if group.policy.gathers_before_use]

    def _observed(self) -> Any:
        # A sum of addresses shows `param.data = …`, which changes no version counter.
        versions = sum(map(version_of, self._plain))
        places = sum(map(torch.Tensor.data_ptr, self._plain)) if not self._on_meta() else 0
        dtype = next((param.dtype for param in self._params if param.is_floating_point()), None)
        return versions, places, sum(group.changes for group in self._groups), len(self._params), dtype

    @property
    def switches(self) -> Any:
        """Present settings of the model which change what its weights do."""
        return None if self._switches is None else self._switches()

    def _on_meta(self) -> bool:
        return any(param.is_meta for param in self._plain)

    @property
    def known_version(self) -> int:
        """What `version` was when it was read last."""
        return self._version

    @property
    def version(self) -> int:
        """Number of times that the weights were seen to have changed, in calls of this property."""
        params = list(self.model.parameters())
        if len(params) != len(self._params) or any(map(operator.is_not, params, self._params)) or self._groups_moved():
            self.look()
        state = self._observed()
        if self._state is not None and state != self._state:
            self._version += 1
        self._state = state
        return self._version

    def _groups_moved(self) -> bool:
        """Whether an engine took over the parameters, or released them, since they were looked at."""
        held = sum(map(is_managed, self._params))
        return held != sum(len(group.members) for group in self._groups) or any(map(is_sharded, self._plain))

    def changed(self) -> bool:
        """Whether the weights have changed since `version` was read last; cheaper than `version`."""
        return self._observed() != self._state

    def settle(self) -> None:
        """Wait for all-gathers of updated parameters that `step` has left unfinished."""
        for group in self._groups:
            group.wait()

    # -- gathering ------------------------------------------------------------------------------------------------

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """Context of a pass over the model without calls of its modules, of which `gathered` is called inside."""
        with ExitStack() as stack:
            for hooks in {id(hooks): hooks for hooks in map(_hooks_of, self.sharded) if hooks is not None}.values():
                stack.enter_context(hooks.pass_by_groups())
            yield

    @contextmanager
    def gathered(self, params: Iterable[Any]) -> Iterator[None]:
        """Context in which parameters have their values in memory."""
        groups = [group for group in groups_of(params) if group.policy.gathers_before_use]
        with ExitStack() as stack:
            hooks = _hooks_of(groups[0]) if groups else None
            if hooks is not None:
                stack.enter_context(hooks.groups_in_use(groups))
            else:
                for group in groups:  # of `zero.Init`, without an engine
                    stack.enter_context(group.whole())
            yield

    def pin(self) -> None:
        """Gather all sharded parameters until `unpin`. All ranks call this together."""
        if not self._pinned:
            self.look()
            self._pinned = self.sharded
            for group in self._pinned:
                group.users += 1
            for group in self._pinned:
                group.gather_for_module()

    def unpin(self) -> None:
        """Undo `pin`: parameters that nothing else uses are sharded again."""
        pinned, self._pinned = self._pinned, []
        for group in pinned:
            group.users = max(0, group.users - 1)
        for group in pinned:
            if not group.users:
                group.reshard()


def _hooks_of(group: ShardGroup) -> ModuleHooks | None:
    return group.lifecycle if isinstance(group.lifecycle, ModuleHooks) else None
