"""Replacements of a module's `forward`: the module's class, parameters, hooks and names stay as they are."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch


class ReplacedForward:
    """Base class of replacements of a module's `forward`, which may be stacked: each calls the one before as `inner`.

    A copy or pickle of the module has the original `forward`.

    Args:
        module: the module; its present `forward` becomes `inner`.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        inner: Callable[..., Any] = module.forward
        wrapper: Any = self
        functools.update_wrapper(wrapper, inner, updated=())  # keeps the signature, which callers inspect
        self.inner = inner

    def __reduce__(self) -> Any:
        return _itself, (self.inner,)


class TrainingOnlyForward(ReplacedForward):
    """Base class of replacements that change a layer's `forward` only in training mode; subclasses check the mode.

    Attributes:
        names: names of the arguments of `forward` that may be passed by position; the first are the hidden states.
        active: False once it was removed, for what a caller has wrapped around it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.active = True
        parameters = inspect.signature(self.inner).parameters.values()
        self.names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name, those passed by position first."""
        names = [*self.names, *(f"argument {index}" for index in range(len(self.names), len(args)))]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def call(self, named: Mapping[str, Any], positional: int) -> Any:
        """Call `inner` with arguments of `named`, of which the first `positional` are passed by position."""
        entries = list(named.items())
        return self.inner(*(value for _, value in entries[:positional]), **dict(entries[positional:]))


def _itself(value: Any) -> Any:
    return value


def replacements(module: torch.nn.Module) -> Iterator[Any]:
    """Yield the replacements of a module's `forward`, the last one first."""
    present = module.__dict__.get("forward")
    while isinstance(present, ReplacedForward):
        yield present
        present = present.inner


def withdraw(module: torch.nn.Module, replacement: Any) -> None:
    """Remove a replacement from a module's `forward`, if it is there; others around it and in it stay.

    Args:
        module: the module.
        replacement: an object with the replaced function as `inner`.
    """
    holder, name = cast("Any", module), "forward"
    while name in getattr(holder, "__dict__", {}):
        present: Any = holder.__dict__[name]
        if present is replacement:
            _put_back(holder, name, replacement.inner)
            return
        holder, name = present, "inner"


def withdraw_all(replaced: list[tuple[torch.nn.Module, Any]]) -> None:
    """Withdraw and deactivate each (module, `TrainingOnlyForward`), and empty the list."""
    for module, replacement in replaced:
        replacement.active = False
        withdraw(module, replacement)
    replaced.clear()


def _put_back(holder: Any, name: str, inner: Callable[..., Any]) -> None:
    own: Any = getattr(inner, "__func__", None)
    if own is not None and own is getattr(cast("type[object]", type(holder)), name, None):
        delattr(holder, name)  # the method of the class is seen again
    else:
        setattr(holder, name, inner)
