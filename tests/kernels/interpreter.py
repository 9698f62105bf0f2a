"""Kernels run by Triton's interpreter on the CPU, with every address checked against the tensors of its launch.

The interpreter of Triton 3.7 cuts fp32 to bf16 where a device rounds to the nearest, takes an integer for the bits of
its bf16 value, and multiplies the bits of bf16 matrices and numbers as integers. All of it is replaced here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402


class OutOfBoundsError(AssertionError):
    """A kernel reads or writes outside of the tensors of its launch."""


def widened(bits: np.ndarray) -> np.ndarray:
    """The fp32 values of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """The bits of the bf16 values that are nearest to fp32 values, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


_plain_cast, _plain_dot = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot
_plain_binary = interpreter.InterpreterBuilder.binary_op
_plain_load = interpreter.InterpreterBuilder.create_masked_load
_plain_store = interpreter.InterpreterBuilder.create_masked_store


def _cast(self: Any, source: Any, target: Any) -> Any:
    before, after = source.dtype.scalar, target.scalar
    if before == tl.bfloat16 and after == tl.float32:
        return interpreter.TensorHandle(widened(source.data), after)
    if before.is_int() and after == tl.bfloat16:
        return interpreter.TensorHandle(rounded(source.data.astype(np.float32)), after)
    if before == tl.float32 and after == tl.bfloat16:
        return interpreter.TensorHandle(rounded(source.data), after)
    return _plain_cast(self, source, target)


def _dot(self: Any, a: Any, b: Any, sums: Any, *options: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        a, b = (interpreter.TensorHandle(widened(each.data), tl.float32) for each in (a, b))
    return _plain_dot(self, a, b, sums, *options)


def _binary(self: Any, a: Any, b: Any, operation: Any) -> Any:
    if a.dtype.scalar == tl.bfloat16:
        result = operation(widened(a.data), widened(b.data))
        return interpreter.TensorHandle(rounded(result.astype(np.float32)), tl.bfloat16)
    return _plain_binary(self, a, b, operation)


class Bounds:
    """Address ranges of a launch's tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ranges = sorted((each.data_ptr(), _end(each)) for each in tensors if each.numel())
        self.starts = np.array([start for start, _ in ranges], np.uint64)
        self.ends = np.array([end for _, end in ranges], np.uint64)
        self.bytes: dict[tuple[str, int], int] = {}  # by what was done, and the tensor's address
        self.places: dict[tuple[str, int], list[np.ndarray]] = {}  # addresses of bytes, the same way

    def check(self, what: str, addresses: np.ndarray, mask: np.ndarray, width: int) -> None:
        """Raise unless every address that the mask lets through lies in a tensor."""
        shape = np.broadcast_shapes(addresses.shape, mask.shape)
        used = np.broadcast_to(addresses, shape)[np.broadcast_to(mask, shape) != 0].astype(np.uint64)
        if not used.size:
            return
        which = np.searchsorted(self.starts, used, side="right").astype(np.int64) - 1
        inside = (which >= 0) & (used + np.uint64(width) <= self.ends[np.maximum(which, 0)])
        if not inside.all():
            raise OutOfBoundsError(f"a kernel {what} {int((~inside).sum())} addresses outside of its tensors")
        for number, count in zip(*np.unique(which, return_counts=True), strict=True):
            key = what, int(self.starts[number])
            self.bytes[key] = self.bytes.get(key, 0) + int(count) * width
            first = np.unique(used[which == number])
            self.places.setdefault(key, []).append((first[:, None] + np.arange(width, dtype=np.uint64)).ravel())


def _end(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


_bounds: list[Bounds] = []


def _load(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
    if _bounds:
        width = pointers.get_element_ty().primitive_bitwidth // 8
        _bounds[-1].check("reads", pointers.data, mask.data, width)
    return _plain_load(self, pointers, mask, other, *options)


def _store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
    if _bounds:
        width = pointers.get_element_ty().primitive_bitwidth // 8
        _bounds[-1].check("writes", pointers.data, mask.data, width)
    return _plain_store(self, pointers, value, mask, *options)


for _name, _function in (
    ("cast_impl", _cast), ("create_dot", _dot), ("create_masked_load", _load), ("create_masked_store", _store),
    ("binary_op", _binary),
):  # fmt: skip
    setattr(interpreter.InterpreterBuilder, _name, _function)
# Aliases that were bound when the class was made.
for _name, _value in list(vars(interpreter.InterpreterBuilder).items()):
    if getattr(_value, "__name__", "") == "<lambda>" and _name in {"create_fp_ext", "create_fp_trunc"}:
        setattr(interpreter.InterpreterBuilder, _name, lambda self, source, target: self.cast_impl(source, target))


@contextmanager
def bounded(tensors: Sequence[torch.Tensor]) -> Iterator[Bounds]:
    """Context in which kernels may touch these tensors alone."""
    _bounds.append(Bounds(tensors))
    try:
        yield _bounds[-1]
    finally:
        _bounds.pop()


@contextmanager
def in_host_memory(arguments: Sequence[Any]) -> Iterator[list[Any]]:
    """Context with the arguments of a launch whose tensors lie in host memory.

    The emulated device's memory is protected outside of its own operators. So whole storages are copied, and copied
    back at the end; the tensors keep their offsets and overlaps.
    """
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    given = []
    for each in arguments:
        if isinstance(each, torch.Tensor) and each.device.type != "cpu":
            storage = each.untyped_storage()
            if storage.data_ptr() not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=each.device).set_(storage)
                copies[storage.data_ptr()] = flat, flat.cpu()
            host = copies[storage.data_ptr()][1].untyped_storage()
            each = torch.empty(0, dtype=each.dtype).set_(host, each.storage_offset(), each.shape, each.stride())
        given.append(each)
    yield given
    for flat, host in copies.values():
        flat.copy_(host)


class InterpretedKernels:
    """Kernels of a module, run by the interpreter; `launches` are the names and grids of those that ran.

    Args:
        module: module of the kernels, or one with changed source.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        self.bytes: Counter[tuple[str, int]] = Counter()  # read and written, by tensors' addresses
        self.last: Bounds | None = None  # of the last launch

    def has(self, variant: Any) -> bool:
        return hasattr(self.module, variant.kernel)

    def prepare(self, variants: Iterable[Any]) -> None:
        pass

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        self.launches.append((variant.name, grid))
        with in_host_memory(arguments) as given:
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            with bounded(tensors) as bounds, np.errstate(all="ignore"):
                getattr(self.module, variant.kernel)[grid](*given, **variant.constants)
        self.bytes.update(bounds.bytes)
        self.last = bounds


class AllInterpreted(InterpretedKernels):
    """The kernels of all files of `deepspeed.ops.triton`."""

    def __init__(self) -> None:
        super().__init__(importlib.import_module("deepspeed.ops.triton.row_kernels"))

    def has(self, variant: Any) -> bool:
        return True

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        self.module = importlib.import_module(f"deepspeed.ops.triton.{variant.module}")
        super().launch(variant, grid, arguments)


def interpreted(name: str) -> InterpretedKernels:
    """The kernels of a file of `deepspeed.ops.triton`."""
    return InterpretedKernels(importlib.import_module(f"deepspeed.ops.triton.{name}"))


def module_of(path: str, name: str) -> ModuleType:
    """The module of a source file, under another name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
