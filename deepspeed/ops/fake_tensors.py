"""Operators without values: shapes, strides, dtypes and lifetimes are real, large float tensors have no values.

[Note: without values] A tensor of such a run is an ordinary CPU tensor with untouched memory, so the system allocates
no pages for it. A model of any size runs in a few megabytes, with the kernel choices, classes and hooks of a real run.
Output shapes come from torch's meta kernels. Integers and booleans keep their values unless they are computed from a
tensor without values, because models branch on masks and positions. Small floating-point tensors keep theirs too.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Generator, Iterable
from typing import Any

import torch

from deepspeed.foundation.fake_mode import computing
from deepspeed.foundation.pytree import map_tensors, tensors_in
from deepspeed.ops.dispatch import DispatchMode

_SMALL = 1024  # maximum elements of tensors that keep values
_NUMBER = 1.0  # value read from a tensor without values
_RESIZES = ("resize_", "resize_as_", "set_", "_resize_output_")
_VIEWS = ("_unsafe_view", "_reshape_alias", "lift_fresh", "alias", "detach")
_EMPTY = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted")
_RUN = ("mkldnn_rnn_layer",)  # operators with meta kernels that do not size the tensors saved for backward
_INDICES = ("topk", "sort", "argsort", "argmax", "argmin", "multinomial", "max", "min", "randperm")


class Valueless(DispatchMode):
    """Context in which operators on large floating-point tensors do no arithmetic and touch no memory."""

    def __init__(self) -> None:
        super().__init__()
        self._without: dict[int, Any] = {}  # storages without values, by identity

    def has_values(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has its real values."""
        return tensor.untyped_storage()._cdata not in self._without

    def stand_ins(self, nest: Any) -> Any:
        """Replace large floating-point tensors in nested containers by tensors without values, inside the context."""
        return map_tensors(lambda t: t.clone() if t.is_floating_point() and t.numel() > _SMALL else t, nest)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if dispatches(types):
            return NotImplemented if not is_fake(types) else func(*args, **kwargs)
        if computing():
            return func(*args, **kwargs)
        kind, name = _kind(func), func._overloadpacket.__name__
        if kind == "view" or name in _RESIZES or name in _EMPTY:
            return func(*args, **kwargs)
        without = not all(self.has_values(tensor) for tensor in tensors_in((args, kwargs)))
        if name in ("_local_scalar_dense", "equal") and without:
            return True if name == "equal" else _NUMBER
        if kind == "write":
            return self._write(func, without, args, kwargs)
        shapes = None if name in _RUN else self._shapes(func, args, kwargs)
        if shapes is None:  # no meta kernel, or data-dependent sizes
            out = func(*args, **kwargs)
            if without:
                self._mark(tensor for tensor in tensors_in(out) if tensor.is_floating_point())
            return out
        floats = [t for t in tensors_in(shapes) if t.is_floating_point() or t.is_complex()]
        if not without and not any(t.numel() > _SMALL for t in floats):
            return func(*args, **kwargs)
        # The device argument of the call, or else the device of the arguments.
        devices = (tensor.device for tensor in tensors_in((args, kwargs)) if tensor.device.type != "cpu")
        device = kwargs["device"] if kwargs.get("device") is not None else next(devices, "cpu")
        return self._stand_in(shapes, args, name, torch.device(device))

    def _write(self, func: Any, without: bool, args: Any, kwargs: Any) -> Any:
        written = list(_written(func, args, kwargs))
        large = [t for t in written if t.numel() > _SMALL and (t.is_floating_point() or t.is_complex())]
        if not without and not large:
            return func(*args, **kwargs)
        if any(t.numel() == 0 for t in written) and "out" in kwargs:
            return func(*args, **kwargs)  # torch sets its size
        self._mark(t for t in written if t.is_floating_point() or t.is_complex())
        returned = func._schema.returns
        if not returned:
            return None
        if len(returned) == 1:
            return written if "[]" in str(returned[0].type) else written[0]
        return tuple(written[: len(returned)])

    def _shapes(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a call's outputs on the meta device; None if torch cannot."""
        named = {key: _mapped(value, _to_meta) for key, value in kwargs.items() if key != "pin_memory"}
        if any(argument.name == "device" for argument in func._schema.arguments):
            named["device"] = torch.device("meta")
        try:
            return func(*_mapped(args, _to_meta), **named)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, IndexError, AssertionError):
            return None

    def _stand_in(self, shapes: Any, args: Any, name: str, device: torch.device) -> Any:
        def stand(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_floating_point() or tensor.is_complex():
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                self._mark([new])
                return new
            if name in _INDICES and tensor.numel() and not tensor.dtype == torch.bool:
                first = next(t for t in tensors_in(args))
                most = max(1, first.shape[-1] if first.dim() else 1)
                # Uniform, so that a router's tokens go to all experts.
                return (torch.arange(tensor.numel()) % most).view(tensor.shape).to(device, tensor.dtype)
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

        return _mapped(shapes, stand)

    def _mark(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._without:
                self._without[key] = weakref.ref(storage, functools.partial(self._forget, self._without, key))

    @staticmethod
    def _forget(known: dict[int, Any], key: int, _reference: Any) -> None:
        known.pop(key, None)


def dispatches(types: Iterable[Any]) -> bool:
    """Return whether one of the tensor classes has its own dispatch, as DTensor has.

    Such a class converts a call to calls on plain tensors, which are intercepted instead.
    """
    plain: Any = torch.Tensor
    return any(kind.__torch_dispatch__ != plain.__torch_dispatch__ for kind in types)


def is_fake(types: Iterable[Any]) -> bool:
    """Return whether torch only computes shapes, with FakeTensor, as DTensor does once for each operator."""
    return any(kind.__name__ == "FakeTensor" for kind in types)


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the same shape, strides and dtype; TypeError for sparse tensors."""
    if tensor.layout != torch.strided:
        raise TypeError("sparse")
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _mapped(tree: Any, change: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(each, change) for each in tree)
    return tree


@functools.cache
def _kind(func: Any) -> str:
    """Classify an operator: `write` changes an argument, `view` returns an alias, `new` returns new tensors."""
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "write"
    aliases = any(r.alias_info is not None for r in schema.returns)
    return "view" if aliases or func._overloadpacket.__name__ in _VIEWS else "new"


def _written(func: Any, args: Any, kwargs: Any) -> Iterable[torch.Tensor]:
    """Yield the tensors that a call of an operator changes, in the order of its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        yield from tensors_in(value)


_ONE_KERNEL = ("_fused_rms_norm", "_fused_rms_norm_backward")
# A device has one kernel for these; the CPU decomposes them, which saves more for backward.


@contextlib.contextmanager
def device_kernels() -> Generator[None]:
    """Context in which operators of `_ONE_KERNEL` are not decomposed on the CPU; only inside `Valueless`."""
    library = torch.library.Library("aten", "IMPL")
    for name in _ONE_KERNEL:
        library.impl(name, _without_values, "CPU")
    try:
        yield
    finally:
        library._destroy()


def _without_values(*_args: Any, **_kwargs: Any) -> Any:
    return NotImplemented
