"""Reading of numbers from tensors, and their exchange between ranks.

A step depends on a few numbers (which parameters have gradients, the norm, whether a loader has ended). All of them are
read through `current`, so that a simulation, whose tensors have no values, can supply them.
"""

from __future__ import annotations

from array import array

import torch

from deepspeed.comm.collectives.collectives import spread
from deepspeed.comm.process_groups.axis import Axis


class Scalars:
    """Access to the values of tensors, and exchange of numbers between ranks."""

    device: torch.device | None = None  # device of models, if not the accelerator

    def value(self, tensor: torch.Tensor) -> float:
        return float(tensor)

    def table(self, axis: Axis, row: list[float], tag: int, label: str, device: torch.device) -> list[list[float]]:
        """Gather a row of float64 numbers from every rank, in rank order; other arguments as in `rows`."""
        rows = self.rows(axis, array("d", row).tobytes(), tag, label, device)
        return [array("d", row_bytes).tolist() for row_bytes in rows]

    def rows(self, axis: Axis, row: bytes, tag: int, label: str, device: torch.device) -> list[bytes]:
        """Gather a row of bytes from every rank, in rank order. All ranks must call this.

        Args:
            row: as many bytes as on the other ranks, a multiple of eight.
            tag: message tag, as in `spread`.
            label: name in error reports.
            device: device of the exchange if the axis cannot send from host memory.
        """
        if axis.group is None or not row:
            return [row] * axis.size
        n = len(row) // 8
        # From host memory if possible: reading a result from the device would wait for all its queued work.
        where = torch.device("cpu") if axis.tagged or axis.has_host_backend else device
        flat = torch.empty(axis.size * n, dtype=torch.float64, device=where)
        flat[axis.rank * n : (axis.rank + 1) * n] = torch.frombuffer(bytearray(row), dtype=torch.float64)
        spread(axis, flat, [r * n for r in range(axis.size + 1)], tag, label).wait()
        received = flat.cpu().numpy().tobytes()
        return [received[start : start + len(row)] for start in range(0, len(received), len(row))]


class FakeScalars(Scalars):
    """Replacement for models on `device` (None: meta): every rank sends the same row, and every number is 1."""

    device = torch.device("meta")

    def __init__(self, device: torch.device | None = None) -> None:
        if device is not None:
            self.device = device

    def value(self, tensor: torch.Tensor) -> float:
        return 1.0

    def rows(self, axis: Axis, row: bytes, tag: int, label: str, device: torch.device) -> list[bytes]:
        return [row] * axis.size


current: Scalars = Scalars()
