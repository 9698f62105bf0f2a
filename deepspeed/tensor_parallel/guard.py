"""Methods of a cut model that look at what they are given before they do what the dense model's did."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


def guard(model: nn.Module, name: str, look: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
    """Call `look(model, args, kwargs)` before a method of this one model, and of its copies.

    Args:
        model: has the method by its class, as an attribute of its own, or from what it wraps; else it stays as it is.
        name: of the method.
        look: may raise.
    """
    if not hasattr(model, name):
        return
    own = f"_ds_dense_{name}"  # in the model, so that a copy has a method of its own
    if name in vars(model):
        object.__setattr__(model, own, vars(model)[name])

    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        look(self, args, kwargs)
        if own in vars(self):
            return vars(self)[own](*args, **kwargs)
        if hasattr(type(self), name):
            return getattr(type(self), name)(self, *args, **kwargs)
        return self.__getattr__(name)(*args, **kwargs)  # a wrapper, which asks what is inside

    object.__setattr__(model, name, MethodType(guarded, model))
