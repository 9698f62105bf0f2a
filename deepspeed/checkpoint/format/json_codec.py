"""Typed JSON for plain values, containers, numpy, dates, paths, enums and dataclasses; decoding returns equal values.

A value that JSON cannot express becomes an object with the name of its type under the key "!". Tensors and arrays are
stored separately and referred to by number. Decoding executes no code from the file: enums and dataclasses must be
among the classes that the process has already imported, and the constructor of a dataclass is not called.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from deepspeed.errors import CheckpointError

_TYPE, _VALUE = "!", "v"
_FACTORIES = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "NoneType": None}
_DATES = (datetime.datetime, datetime.date, datetime.time)


class Encoder:
    """Converter from objects to JSON values.

    Args:
        tensors: list to which tensors and arrays are appended.
        pickled: list to which objects without a JSON form are appended; None: such objects raise CheckpointError.
    """

    def __init__(self, tensors: list[torch.Tensor], pickled: list[Any] | None = None) -> None:
        self.tensors, self.pickled = tensors, pickled
        self._open: set[int] = set()

    def encode(self, value: Any, path: str) -> Any:
        """Return the JSON form of a value.

        Args:
            value: the value, which may be nested.
            path: name of the value in errors, such as `client_state['loops']`.

        Raises:
            CheckpointError: a value contains itself, or has no JSON form while `pickled` is None.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else _typed("float", repr(value))
        make = _SIMPLE.get(kind)
        if make is not None:
            return make(value)
        if id(value) in self._open:
            raise CheckpointError(f"{path} contains itself, which JSON cannot express; take the cycle out")
        self._open.add(id(value))
        try:
            return self._container(value, kind, path)
        finally:
            self._open.discard(id(value))

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if kind is dict:
            return self._dict(value, path)
        if kind in (list, tuple, set, frozenset, collections.deque):
            items = [self.encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return items if kind is list else _typed(kind.__name__, items)
        if kind is torch.Size:
            return _typed("Size", list(value))
        if kind in (collections.OrderedDict, collections.Counter, argparse.Namespace):
            inside = vars(value) if kind is argparse.Namespace else dict(value)
            return _typed(kind.__name__, self._pairs(inside, path))
        if kind is collections.defaultdict:
            factory = getattr(value.default_factory, "__name__", "NoneType")
            if factory in _FACTORIES and _FACTORIES[factory] is value.default_factory:
                return _typed("defaultdict", [factory, self._pairs(value, path)])
        return self._special(value, kind, path)

    def _special(self, value: Any, kind: type, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return _typed("parameter" if isinstance(value, torch.nn.Parameter) else "tensor", self._aside(value))
        if isinstance(value, np.generic) and value.dtype.kind in "biufc":
            return _typed("numpy", [value.dtype.str, base64.b64encode(value.tobytes()).decode()])
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and kind is np.ndarray:
            data = bytearray(value.tobytes())
            bytes_of_array = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
            return _typed("array", [value.dtype.str, list(value.shape), self._aside(bytes_of_array)])
        if isinstance(value, pathlib.PurePath):
            return _typed("path", str(value))
        if isinstance(value, enum.Enum) and self._is_found(kind):
            return _typed("enum", [kind.__module__, kind.__qualname__, self.encode(value.value, f"{path}.value")])
        if dataclasses.is_dataclass(value) and self._is_found(kind):
            names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
            inside = {name: self.encode(getattr(value, name), f"{path}.{name}") for name in names}
            return _typed("dataclass", [kind.__module__, kind.__qualname__, inside])
        if isinstance(value, tuple) and hasattr(kind, "_fields") and self._is_found(kind):
            items = [self.encode(item, f"{path}.{name}") for name, item in zip(kind._fields, value, strict=True)]
            return _typed("namedtuple", [kind.__module__, kind.__qualname__, items])
        if self.pickled is None:
            raise CheckpointError(
                f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no place in a checkpoint: store its "
                f"plain values, or admit pickles with checkpoint.client_state_pickle: true (in saving and loading)"
            )
        self.pickled.append(value)
        return _typed("pickle", len(self.pickled) - 1)

    def _dict(self, value: dict[Any, Any], path: str) -> Any:
        if all(type(key) is str for key in value) and _TYPE not in value:
            return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
        return _typed("dict", self._pairs(value, path))

    def _pairs(self, value: dict[Any, Any], path: str) -> list[Any]:
        return [
            [self.encode(key, f"{path} key {key!r}"), self.encode(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]

    @staticmethod
    def _is_found(kind: type) -> bool:
        """Whether a class can be looked up under its module and name, which excludes local classes."""
        return "<locals>" not in kind.__qualname__ and _look_up(kind.__module__, kind.__qualname__) is kind

    def _aside(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class Decoder:
    """Converter from JSON values of an `Encoder` to objects.

    Args:
        tensors: function that returns a tensor by its number.
        pickled: objects without a JSON form; None: there are none.
    """

    def __init__(self, tensors: Callable[[int], torch.Tensor], pickled: list[Any] | None = None) -> None:
        self._tensors, self._pickled = tensors, pickled or []

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if _TYPE not in value:
            return {key: self.decode(item) for key, item in value.items()}
        name, inside = value[_TYPE], value.get(_VALUE)
        make = getattr(self, f"_as_{name}", None) if isinstance(name, str) and name.isidentifier() else None
        if make is not None:
            return make(inside)
        if name in _READ:
            return _READ[name](inside)
        raise CheckpointError(f"the checkpoint holds a value of unknown type {name!r}; a newer version has written it")

    def _pairs(self, pairs: Any) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in pairs}

    def _as_dict(self, inside: Any) -> Any:
        return self._pairs(inside)

    def _as_OrderedDict(self, inside: Any) -> Any:  # noqa: N802 - the names are those of the types
        return collections.OrderedDict(self._pairs(inside))

    def _as_Counter(self, inside: Any) -> Any:  # noqa: N802
        return collections.Counter(self._pairs(inside))

    def _as_Namespace(self, inside: Any) -> Any:  # noqa: N802
        return argparse.Namespace(**self._pairs(inside))

    def _as_defaultdict(self, inside: Any) -> Any:
        return collections.defaultdict(_FACTORIES[inside[0]], self._pairs(inside[1]))

    def _as_tuple(self, inside: Any) -> Any:
        return tuple(self.decode(inside))

    def _as_set(self, inside: Any) -> Any:
        return set(self.decode(inside))

    def _as_frozenset(self, inside: Any) -> Any:
        return frozenset(self.decode(inside))

    def _as_deque(self, inside: Any) -> Any:
        return collections.deque(self.decode(inside))

    def _as_tensor(self, inside: Any) -> Any:
        return self._tensors(inside)

    def _as_parameter(self, inside: Any) -> Any:
        return torch.nn.Parameter(self._tensors(inside), requires_grad=False)

    def _as_array(self, inside: Any) -> Any:
        dtype, shape, number = inside
        return np.frombuffer(self._tensors(number).numpy().tobytes(), dtype=dtype).reshape(shape).copy()

    def _as_enum(self, inside: Any) -> Any:
        return self._class(inside[0], inside[1], enum.Enum)(self.decode(inside[2]))

    def _as_dataclass(self, inside: Any) -> Any:
        cls = self._class(inside[0], inside[1], object)
        instance = object.__new__(cls)
        for name, item in inside[2].items():
            object.__setattr__(instance, name, self.decode(item))
        return instance

    def _as_namedtuple(self, inside: Any) -> Any:
        return tuple.__new__(self._class(inside[0], inside[1], tuple), self.decode(inside[2]))

    @staticmethod
    def _class(module: str, name: str, parent: type) -> Any:
        target = _look_up(module, name)
        fits = isinstance(target, type) and issubclass(target, parent)
        if not fits or (parent is object and not dataclasses.is_dataclass(target)):
            raise CheckpointError(f"the checkpoint holds a {module}.{name}; import it before loading")
        return target

    def _as_pickle(self, inside: Any) -> Any:
        return self._pickled[inside]


def _typed(name: str, value: Any) -> dict[str, Any]:
    return {_TYPE: name, _VALUE: value}


def _look_up(module: str, name: str) -> Any:
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return target


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint names the dtype {name!r}, which this torch does not have")
    return dtype


_SIMPLE: dict[type, Callable[[Any], Any]] = {
    complex: lambda v: _typed("complex", [v.real.hex(), v.imag.hex()]),
    bytes: lambda v: _typed("bytes", base64.b64encode(v).decode()),
    range: lambda v: _typed("range", [v.start, v.stop, v.step]),
    slice: lambda v: _typed("slice", [v.start, v.stop, v.step]),
    datetime.timedelta: lambda v: _typed("timedelta", [v.days, v.seconds, v.microseconds]),
    torch.dtype: lambda v: _typed("dtype", str(v).removeprefix("torch.")),
    torch.device: lambda v: _typed("device", str(v)),
    **{kind: (lambda v: _typed(type(v).__name__, v.isoformat())) for kind in _DATES},
}

_READ: dict[Any, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda v: complex(float.fromhex(v[0]), float.fromhex(v[1])),
    "bytes": base64.b64decode,
    "range": lambda v: range(*v),
    "slice": lambda v: slice(*v),
    "timedelta": lambda v: datetime.timedelta(*v),
    "dtype": lambda v: _dtype(v),
    "device": torch.device,
    "Size": torch.Size,
    "path": pathlib.Path,
    "numpy": lambda v: np.frombuffer(base64.b64decode(v[1]), dtype=v[0])[0],
    **{kind.__name__: kind.fromisoformat for kind in _DATES},
}
