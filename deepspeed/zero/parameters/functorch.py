"""Support for torch.func: transforms get unsharded copies of parameters, and all-gathers run outside of transforms.

`torch.vmap`, `torch.func.grad` and similar functions wrap their arguments without calling `__torch_function__`, so they
would compute with the placeholder of a sharded parameter. The wrapping functions are therefore patched to use unsharded
copies (`functionalize` raises, since it writes to its arguments). Tensors that are created within a transform are
wrapped too, also communication buffers; code that gathers or reads parameters therefore suspends all transforms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import eager_transforms, vmap
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Method = TypeVar("Method", bound=Callable[..., Any])


def in_transform(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a wrapper of a torch.func transform, which has no memory of its own."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def outside_transforms(method: Method) -> Method:
    """Decorate a function so that torch.func transforms are suspended while it runs."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _functorch.peek_interpreter_stack() is None:
            return method(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


@functools.cache
def feed_transforms(dense: Callable[[Any], Any], refuse: Callable[[Any], Any]) -> None:
    """Patch torch.func: arguments of transforms pass through `dense`, those of `functionalize` through `refuse`.

    Args:
        dense: returns an unsharded copy of a sharded parameter, and any other value unchanged.
        refuse: raises for a sharded parameter, and returns any other value.
    """
    vmap._add_batch_dim = _after(dense, vmap._add_batch_dim)
    eager_transforms._wrap_for_grad = _after(dense, eager_transforms._wrap_for_grad)
    eager_transforms._maybe_wrap_functional_tensor = _after(refuse, eager_transforms._maybe_wrap_functional_tensor)


def _after(first: Callable[[Any], Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    """Return the composition of both functions: `first` is applied to the first argument of `wrap`."""

    def wrap_what_it_gives(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(first(tensor), *args, **kwargs)

    return wrap_what_it_gives
