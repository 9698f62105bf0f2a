"""Interface of all accelerators. Each device type has its own file with its constants and methods."""

from __future__ import annotations

import importlib
from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from deepspeed.errors import ArgumentError

_TENSOR_TYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class Accelerator:
    """Base class for one type of device.

    Three tables define most methods: `facts` (the method returns a constant; None: the device needs no action),
    `passed` (the method calls the function of the same name in the device's torch module) and the tensor types
    (`FloatTensor(data)` creates a tensor on the device).
    """

    name: str
    torch_module: ModuleType
    facts: dict[str, Any]
    passed: frozenset[str]

    def __init__(self) -> None:
        self._name = self.name  # programs read it to tell a CPU from a device
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.facts:
            return partial(self._fact, name)
        if name in self.passed:
            return getattr(self.torch_module, name)
        if name in _TENSOR_TYPES:
            return partial(torch.tensor, dtype=_TENSOR_TYPES[name], device=self.device_name())
        raise AttributeError(f"the {self.name} accelerator has no {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.facts, *self.passed, *_TENSOR_TYPES})

    def _fact(self, name: str, *_: Any) -> Any:
        value = self.facts[name]
        return list(value) if isinstance(value, list) else value

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device name in torch's form, such as "cuda", or "cuda:1" with an index."""
        return self.name if device_index is None else f"{self.name}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device as a torch.device; None: the current device."""
        return torch.device(self.current_device_name() if device_index is None else self.device_name(device_index))

    def current_device_name(self) -> str:
        """Return the name of the current device with its index, in torch's form."""
        return self.device_name(self.current_device())

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is on this type of device."""
        return tensor.device.type == self.name

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is in page-locked host memory."""
        return tensor.is_pinned()

    def random(self) -> ModuleType:
        """Return the module with torch's random generators."""
        return torch.random

    def set_visible_devices_envs(
        self, current_env: MutableMapping[str, str], local_accelerator_ids: Sequence[int]
    ) -> None:
        """Set the variables in `current_env` that make only the devices with these indices visible to a process."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def get_compile_backend(self) -> str:
        """Return the backend that is passed to torch.compile."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Choose the backend of torch.compile.

        Raises:
            ArgumentError: torch does not know the backend.
        """
        known = torch._dynamo.list_backends(exclude_tags=())
        if backend not in known:
            raise ArgumentError(f"compile backend {backend!r} is unknown; torch has {known}.")
        self._compile_backend = backend

    def op_builder_dir(self) -> str:
        """Return the name of the package with the operator builders of this accelerator."""
        return "deepspeed.ops.op_builder"

    def get_op_builder(self, class_name: str) -> Any:
        """Return the builder class `class_name`, or None if there is none."""
        return getattr(importlib.import_module(self.op_builder_dir()), class_name, None)

    def create_op_builder(self, class_name: str) -> Any:
        """Create a builder of class `class_name`; None if there is none."""
        builder = self.get_op_builder(class_name)
        return None if builder is None else builder()

    def build_extension(self) -> type:
        """Return the setuptools command that builds torch extensions."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension
