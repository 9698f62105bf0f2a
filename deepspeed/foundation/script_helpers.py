"""Small things that training scripts ask for: one seed for all generators, a nest on another device, a folder."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

from deepspeed.foundation.pytree import map_tensors

T = TypeVar("T")


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, those of devices included."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]


def move_to_device(
    item: Any, device: str | torch.device, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """The same nest with its tensors on a device.

    Args:
        item: a tensor, a nest of them, or an object with a `to` of its own (a module, a batch of a tokenizer).
        device: where to.
        criterion_func: move only the tensors it is true for.
    """
    if criterion_func is None and hasattr(item, "to"):
        return item.to(device)
    return map_tensors(lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t, item)


def ensure_directory_exists(filename: str | Path) -> None:
    """Make the folder that `filename` is to be written into."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def noop_decorator(func: T) -> T:
    """`func` itself."""
    return func


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """A call as it would be written, as for log lines: `base(1, key=2)`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


class DummyOptim:
    """Stands where an optimizer's `param_groups` are read and nothing is updated."""

    def __init__(self, params: Any) -> None:
        """Keep the parameters.

        Args:
            params: of the one group.
        """
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


@contextlib.contextmanager
def OnDevice(
    dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
) -> Generator[None, None, None]:
    """Inside, tensor constructors make tensors on `device`, and floating ones of `dtype`.

    Args:
        dtype: dtype of floating tensors whose dtype is not named.
        device: where tensors whose device is not named are made; "meta" gives them no values and no memory.
        enabled: False makes the context do nothing.

    Example:
        >>> with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        ...     model = MyLargeModel()
    """
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
