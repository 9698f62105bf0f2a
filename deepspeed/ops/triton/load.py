"""Loader of compiled GPU kernels: reads machine code from a folder and launches it by the CUDA driver.

Nothing is compiled here, and Triton is not needed. The folder is made by `python -m deepspeed.ops.triton.build`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from deepspeed.accelerator.cuda_driver import CudaDriver, compute_capability
from deepspeed.errors import CheckpointCorruptError, NotAvailableError, UsageError
from deepspeed.ops.triton.build import COMPILED, FORMAT, MANIFEST, SCRATCH, WARP, source_hash
from deepspeed.ops.triton.variants import KernelForm

_FLOAT, _FLOAT_BITS = struct.Struct("<f").pack, struct.Struct("<I").unpack


class KernelDriver(Protocol):
    """The few calls of a driver that a loader makes; as `CudaDriver`."""

    def load(self, code: bytes, function: str, shared: int) -> Any: ...

    def launch(
        self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, words: list[int]
    ) -> None: ...


def architecture_of(capability: tuple[int, int]) -> str | None:
    """Return the architecture whose code a device of this compute capability runs, or None."""
    if capability[0] == 8:
        return "sm_80"
    return "sm_90" if capability == (9, 0) else None


class LoadedKernels:
    """Compiled kernels of one architecture.

    Args:
        folder: folder of the build command.
        architecture: "sm_80" or "sm_90".
        driver: CUDA driver; None: that of this machine.
        device: device of the kernels; None: the current one of each call.

    Raises:
        NotAvailableError: the folder has no kernels of this architecture, they are of other sources, or the driver is
            missing.
    """

    def __init__(
        self,
        folder: Path,
        architecture: str,
        driver: KernelDriver | None = None,
        device: torch.device | None = None,
    ) -> None:
        path = folder / MANIFEST
        if not path.exists():
            raise NotAvailableError(f"no compiled kernels in {folder}: python -m deepspeed.ops.triton.build makes them")
        manifest = json.loads(path.read_text())
        if manifest.get("format") != FORMAT or manifest.get("sources") != source_hash():
            raise NotAvailableError(f"the kernels in {folder} are compiled from other sources; build them again")
        if not manifest["kernels"].get(architecture):
            have = ", ".join(sorted(manifest["kernels"])) or "none"
            raise NotAvailableError(f"{folder} has no kernels for {architecture}, only for {have}")
        self.folder, self.architecture = folder, architecture
        self._driver: KernelDriver = CudaDriver(device) if driver is None else driver
        entries: dict[str, dict[str, Any]] = manifest["kernels"][architecture]
        self._entries = {name: {**entry, "aligned": set(entry["aligned"])} for name, entry in entries.items()}
        self._functions: dict[str, Any] = {}

    def has(self, variant: KernelForm) -> bool:
        """Whether the variant was compiled."""
        return variant.name in self._entries

    def prepare(self, variants: Iterable[KernelForm]) -> None:
        """Load variants on the current device, so that later launches, also captured ones, only launch.

        Raises:
            NotAvailableError: a variant was not compiled.
            CheckpointCorruptError: its file is missing or differs from what was written.
        """
        for variant in variants:
            if variant.name in self._functions:
                continue
            if not self.has(variant):
                raise NotAvailableError(f"{self.folder} has no kernel {variant.name} for {self.architecture}")
            entry = self._entries[variant.name]
            path = self.folder / entry["file"]
            code = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(code).hexdigest() != entry["sha256"]:
                raise CheckpointCorruptError(f"{path} is missing or damaged; build the kernels again")
            self._functions[variant.name] = self._driver.load(code, entry["function"], entry["shared"])

    def launch(self, variant: KernelForm, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        """Launch a variant that is loaded; arguments as in `attention.Kernels`.

        Raises:
            UsageError: it is not loaded, the number of arguments is another one, an argument is of another kind or not
                aligned as it was compiled for, or the driver refuses the launch.
        """
        name = variant.name
        if name not in self._functions:
            raise UsageError(f"kernel {name} is not loaded; call `prepare` at the start")
        entry = self._entries[name]
        words = pack(name, arguments, entry["types"], entry["aligned"])
        self._driver.launch(self._functions[name], grid, entry["warps"] * WARP, entry["shared"], words)


def pack(name: str, arguments: Sequence[Any], types: Sequence[str], aligned: set[int]) -> list[int]:
    """Return the arguments of a launch as words of 8 bytes, with those that Triton adds; errors as in `launch`."""
    if len(arguments) != len(types):
        raise UsageError(f"kernel {name} takes {len(types)} arguments, not {len(arguments)}")
    words: list[int] = []
    for number, (value, kind) in enumerate(zip(arguments, types, strict=True)):
        tensor = isinstance(value, torch.Tensor)
        if tensor != (kind[0] == "*"):
            raise UsageError(f"argument {number} of kernel {name} is {kind}, not {type(value).__name__}")
        word = value.data_ptr() if tensor else _FLOAT_BITS(_FLOAT(value))[0] if kind == "fp32" else value & 0xFFFFFFFF
        if number in aligned and word % 16:
            raise UsageError(f"argument {number} of kernel {name} is {word}, and it was compiled for multiples of 16")
        words.append(word)
    return words + [0] * SCRATCH


def load_kernels(folder: Path | None = None, device: torch.device | None = None) -> LoadedKernels:
    """Return the compiled kernels for a GPU.

    Args:
        folder: folder of the build command; None: the one in the package, its default.
        device: the GPU; None: the current one.

    Raises:
        NotAvailableError: there are none, they are of other sources or for other GPUs, or the driver is missing.
        RuntimeError, AssertionError: torch has no CUDA device (torch's own errors).
    """
    capability = compute_capability(device)
    architecture = architecture_of(capability)
    if architecture is None:
        raise NotAvailableError(f"no kernels for GPUs of compute capability {capability[0]}.{capability[1]}")
    return LoadedKernels(COMPILED if folder is None else folder, architecture, device=device)
