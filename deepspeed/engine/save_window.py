"""A client gathers the whole weights, drops them, and has a module inside save itself: it saves those weights.

Gathering needs all ranks, and what follows may run on one of them or on all. So `save_pretrained` of the parts of a
sharded model takes the weights that were gathered last, while somebody holds them and none has changed: rank 0 writes
them, and the others, which have none, write nothing. No collective runs, and nothing is kept alive for it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from deepspeed.foundation.log import warn_once
from deepspeed.zero.parameters.parameter import StandIn
from deepspeed.zero.parameters.shard_group import ShardGroup

_METHOD = "save_pretrained"
_windows: weakref.WeakKeyDictionary[nn.Module, SaveWindow] = weakref.WeakKeyDictionary()


class SaveWindow:
    """The weights gathered last, from then until one of them changes.

    Args:
        module: the model.
        state: the whole weights by name, on rank 0; None elsewhere.
        groups: those that are sharded.
    """

    def __init__(
        self, module: nn.Module, state: Mapping[str, torch.Tensor] | None, groups: Iterable[ShardGroup]
    ) -> None:
        self._changes = [(weakref.ref(group), group.changes) for group in groups]
        self._copies: dict[int, weakref.ref[torch.Tensor]] | None = None
        if state is not None:
            members = [member for group in groups for member in group.members]
            names = {id(param): name for name, param in module.named_parameters()}
            found = [(member.uid, state.get(names.get(id(member.param), ""))) for member in members]
            self._copies = {uid: weakref.ref(copy) for uid, copy in found if copy is not None}
        for part in module.modules() if self._changes else ():
            if _METHOD not in vars(part) and _takes_a_state(type(part)):
                object.__setattr__(part, _METHOD, MethodType(save_pretrained, part))
            _windows[part] = self

    @property
    def open(self) -> bool:
        """Whether no value has changed."""
        groups = [(group(), changes) for group, changes in self._changes]
        return all(group is not None and group.changes == changes for group, changes in groups)

    @property
    def writes(self) -> bool:
        """Whether this rank has the weights."""
        return self._copies is not None

    def state_of(self, part: nn.Module) -> dict[str, Any] | None:
        """The state dict of a part of the model with whole weights; None where nobody holds one of them any more."""
        state: dict[str, Any] = {}
        for name, value in part.state_dict().items():
            if isinstance(value, StandIn):
                value = (self._copies or {}).get(value._ds_member.uid, lambda: None)()
                if value is None:
                    return None
            state[name] = value
        return state


def _takes_a_state(kind: type[nn.Module]) -> bool:
    method = getattr(kind, _METHOD, None)
    return callable(method) and "is_main_process" in inspect.signature(method).parameters


def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What the class of a part of the model saves, with the weights that were gathered last."""
    save, window = getattr(type(self), _METHOD), _windows.get(self)
    if window is None or kwargs.get("state_dict") is not None or not window.open:
        return save(self, *args, **kwargs)
    if not window.writes:
        warn_once("save_pretrained writes nothing here: rank 0 has the weights that were gathered, and writes them")
        return None
    state = window.state_of(self)
    return save(self, *args, **kwargs) if state is None else save(self, *args, **{**kwargs, "state_dict": state})
