"""Simulated disk: counts the reserved bytes and transfers no data."""

from __future__ import annotations

import os

import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.ops.aio.files import ALIGNMENT
from deepspeed.storage.tensor_file import Disk, Extent, Transfer


class _DoneTransfer(Transfer):
    """Transfer that has already finished."""

    def __init__(self) -> None:
        self._job = None


class SimulatedDisk(Disk):
    """Disk that only counts the reserved bytes: transfers finish immediately and move nothing.

    Args:
        folder: see `Disk`; it is not created.
        settings: ignored.
    """

    def __init__(self, folder: str | os.PathLike[str], *, settings: Aio) -> None:
        self.folder, self._end = os.fspath(folder), 0

    def create(self, label: str, nbytes: int) -> Extent:
        extent = Extent(label, nbytes, self._end)
        self._end += -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return extent

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        return _DoneTransfer()

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        return _DoneTransfer()

    def preflight(self, need_bytes: int) -> float:
        return 0.0

    def close(self) -> None:
        """Do nothing: there is no file."""

    def cut(self) -> str:
        return ""
