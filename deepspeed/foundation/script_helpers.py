"""Small helpers that programs import: seeds, moving of nested tensors, versions, constants."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch

from deepspeed.errors import ArgumentError
from deepspeed.foundation.pytree import map_tensors

T = TypeVar("T")

# Values of the JSON and of launchers.
ADAGRAD_OPTIMIZER = "adagrad"
ADAMW_OPTIMIZER = "adamw"
ADAM_OPTIMIZER = "adam"
LAMB_OPTIMIZER = "lamb"
LION_OPTIMIZER = "lion"
MUON_OPTIMIZER = "muon"
DEEPSPEED_OPTIMIZERS = [
    ADAGRAD_OPTIMIZER,
    ADAM_OPTIMIZER,
    ADAMW_OPTIMIZER,
    LAMB_OPTIMIZER,
    LION_OPTIMIZER,
    MUON_OPTIMIZER,
]

CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"
LOCAL_RANK = "LOCAL_RANK"
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500


def set_random_seed(seed: int) -> None:
    """Seed the random generators of Python, numpy and torch, including all devices."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]


def move_to_device(
    item: Any, device: str | torch.device, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Move the tensors of nested containers to a device.

    Args:
        item: a tensor, nested containers of tensors, or an object with a `to` method (a module, a tokenizer's batch).
        device: target device.
        criterion_func: selects the tensors to move, by returning True; None: all tensors.

    Returns:
        The same structure with moved tensors; containers without moved tensors are the same objects.
    """
    if criterion_func is None and hasattr(item, "to"):
        return item.to(device)
    return map_tensors(lambda t: t.to(device) if criterion_func is None or criterion_func(t) else t, item)


def ensure_directory_exists(filename: str | Path) -> None:
    """Create the parent folder of `filename`, and its parents, if they do not exist."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


def noop_decorator(func: T) -> T:
    """Return `func` unchanged."""
    return func


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Format a call as source text, for log lines: `base(1, key=2)`."""
    return f"{base}({', '.join([*map(repr, args), *(f'{key}={value!r}' for key, value in kwargs.items())])})"


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Return whether a parameter is marked as a slice: `model_parallel` or `tensor_model_parallel` is True."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def detach_variable(inputs: tuple[Any, ...], device: Any = None) -> tuple[Any, ...]:
    """Return inputs detached from their graph; the new leaves require gradients where the inputs do.

    Args:
        inputs: tensors, and other values, which are returned unchanged.
        device: device of the results; None: that of each tensor.

    Raises:
        ArgumentError: the inputs are not a tuple.
    """
    if not isinstance(inputs, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"detach_variable takes a tuple, not a {type(inputs).__name__}")
    leaves: list[Any] = []
    for value in inputs:
        if isinstance(value, torch.Tensor):
            asks, value = value.requires_grad, value if device is None else value.to(device)
            value = value.detach().requires_grad_(asks)
        leaves.append(value)
    return tuple(leaves)


class MultiTensorApply:
    """Callable that passes a fixed chunk size to an operator on lists of tensors, as in NVIDIA Apex.

    Args:
        chunk_size: number of elements that a kernel processes at a time.
    """

    def __init__(self, chunk_size: int) -> None:
        """Store the chunk size."""
        self.chunk_size = chunk_size

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Return the result of `op(chunk_size, noop_flag_buffer, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


class DummyOptim:
    """Optimizer placeholder that has `param_groups` but updates nothing."""

    def __init__(self, params: Any) -> None:
        """Store the parameters.

        Args:
            params: parameters of the only group.
        """
        self.param_groups: list[dict[str, Any]] = [{"params": params}]


@contextlib.contextmanager
def OnDevice(
    dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
) -> Generator[None, None, None]:
    """Context that creates tensors on `device`, and floating-point tensors with `dtype`.

    Args:
        dtype: default dtype of floating-point tensors.
        device: default device; "meta": tensors without values and memory.
        enabled: False: the context does nothing.

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


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether torch is at least `min_version` and at most `max_version`, by major and minor number.

    Args:
        min_version: a number or text such as 2.1 or "2.10" (the number 2.10 is 2.1); None: no minimum.
        max_version: a number or text; None: no maximum.
    """
    here = _major_minor(torch.__version__)
    at_least = min_version is None or here >= _major_minor(min_version)
    return at_least and (max_version is None or here <= _major_minor(max_version))


def _major_minor(version: float | str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", f"{version}.0")[:2]
    return int(major), int(minor)
