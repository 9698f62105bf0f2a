"""Kernels on a device for checks whose tensors lie on the host: each launch copies its tensors there and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


class NotBuiltError(Exception):
    """A kernel that a check needs was not compiled."""


def _aligned(variant: Any, arguments: Sequence[Any]) -> bool:
    """Whether addresses and sizes are such as the variant is compiled for."""
    types = variant.signature
    names = [name for name in types if types[name] != "constexpr"]
    pairs = zip(names, arguments, strict=True)
    return not any(
        (value.storage_offset() * value.element_size() if isinstance(value, torch.Tensor) else value) % 16
        for name, value in pairs
        if name in variant.aligned
    )


class MovedKernels:
    """Kernels of a device, launched on copies of the arguments' storages.

    Args:
        kernels: compiled kernels, or others in a test of this class.
        device: where the copies lie.
    """

    def __init__(self, kernels: Any, device: torch.device) -> None:
        self.kernels, self.device = kernels, device

    def has(self, variant: Any) -> bool:
        return self.kernels.has(variant)

    def prepare(self, variants: Iterable[Any]) -> None:
        self.kernels.prepare(variants)

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        if not self.has(variant) or not variant.even or not _aligned(variant, arguments):
            raise NotBuiltError(variant.name)
        self.prepare([variant])
        storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # as bytes: arguments may be views of one memory

        def moved(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                # By `data`, copying back does not count as a change of a weight.
                whole = value.data.as_strided((storage.nbytes() // value.element_size(),), (1,), 0).view(torch.uint8)
                storages[storage.data_ptr()] = whole, whole.to(self.device, copy=True)
            copy = storages[storage.data_ptr()][1]
            typed = copy[: len(copy) // value.element_size() * value.element_size()].view(value.dtype)
            return typed.as_strided(value.shape, value.stride(), value.storage_offset())

        self.kernels.launch(variant, grid, [moved(value) for value in arguments])
        for whole, copy in storages.values():
            whole.copy_(copy)
