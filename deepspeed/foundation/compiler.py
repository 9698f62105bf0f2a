"""What this package needs from torch.compile without importing its compiler, which takes seconds.

Dynamo is the part of torch.compile that traces Python. While a compiled function runs, it takes over each new frame.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

# Known without an import of the compiler.
_frames = cast("Any", torch._C)._dynamo.eval_frame  # pyright: ignore[reportPrivateUsage]
# Sets the function that takes over new frames (None: none), and returns the one before.
set_frame_callback = cast("Callable[[Any], Any]", _frames.set_eval_frame)


def opaque(function: Function, inner: bool = True) -> Function:
    """Mark a function that torch.compile calls and does not trace, as `torch.compiler.disable` does; returns it.

    Args:
        function: a function written in Python.
        inner: whether that holds for the functions that it calls, too.
    """
    action = _frames._FrameAction
    strategy = _frames._FrameExecStrategy(action.SKIP, action.SKIP if inner else action.DEFAULT)
    _frames.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


class CompiledForward:
    """Compiled replacement for a module's `forward`. A copy or pickle of the module has the original `forward`.

    Args:
        inner: the original `forward`.
        compiler: compiles a function, as `torch.compile` does.
    """

    def __init__(self, inner: Callable[..., Any], compiler: Callable[[Any], Any]) -> None:
        functools.update_wrapper(self, inner)  # keeps the signature, which callers inspect
        self.inner, self._compiled = inner, compiler(inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.inner,)


def _itself(value: Any) -> Any:
    return value


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether the module's call or its forward is compiled as a whole."""
    own = vars(module)
    return (
        isinstance(own.get("forward"), CompiledForward)
        or own.get("_compiled_call_impl") is not None
        or "_orig_mod" in own.get("_modules", ())
    )
