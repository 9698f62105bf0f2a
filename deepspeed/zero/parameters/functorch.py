"""Support for torch.func: transforms get dense copies, and all-gathers run outside of them.

`torch.vmap`, `torch.func.grad` and similar functions wrap their arguments below every hook that a tensor's class has,
so they would compute with the placeholder of a sharded parameter. Their wrapping functions therefore get dense
copies (`functionalize` raises, since it writes to its arguments). Tensors created inside a transform belong to it, also
those that are sent to another rank: so code that gathers or reads parameters leaves all transforms meanwhile.
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
    """Return whether `tensor` is a transform's wrapper, which has no memory of its own."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def outside_transforms(method: Method) -> Method:
    """Decorate a function that moves memory to run as if no transform were active."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _functorch.peek_interpreter_stack() is None:
            return method(*args, **kwargs)
        with temporarily_clear_interpreter_stack():
            return method(*args, **kwargs)

    return run  # type: ignore[return-value]


@functools.cache
def feed_transforms(dense: Callable[[Any], Any], refuse: Callable[[Any], Any]) -> None:
    """Pass the arguments of transforms through `dense`, and those of `functionalize` through `refuse`, from now on."""
    vmap._add_batch_dim = _after(dense, vmap._add_batch_dim)
    eager_transforms._wrap_for_grad = _after(dense, eager_transforms._wrap_for_grad)
    eager_transforms._maybe_wrap_functional_tensor = _after(refuse, eager_transforms._maybe_wrap_functional_tensor)


def _after(first: Callable[[Any], Any], wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_what_it_gives(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return wrap(first(tensor), *args, **kwargs)

    return wrap_what_it_gives
