"""Storage for the inputs of checkpointed blocks: whole or partitioned, on the device or the host."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from deepspeed.comm.collectives.collectives import SPREAD, spread
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.config.sections.memory import ActivationCheckpointing
from deepspeed.foundation.partition import partition_uniform


@dataclass(eq=False)
class Saved:
    """Stored form of one saved input.

    Args:
        values: elements that this rank stores, 1-D.
        shape, stride: of the restored tensor.
        device: device that backward needs the tensor on.
        tier: "device" or "host".
    """

    values: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    tier: str


@dataclass(eq=False)
class _Row:
    """Buffer and its fill counters, in elements."""

    buffer: torch.Tensor
    filled: int = 0
    live: int = 0  # elements in use, inside or outside of the buffer
    most: int = 0  # maximum of `live`

    def give_back(self, count: int) -> None:
        self.live -= count
        if self.live == 0:
            self.filled = 0


class ActivationBuffers:
    """Contiguous buffers, one per dtype and device. Tensors are placed one after the other until all are returned.

    An empty buffer grows to the peak number of elements in use. Tensors that do not fit get memory of their own.

    Args:
        count: initial size of a buffer, in multiples of its first tensor.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[tuple[torch.dtype, torch.device], _Row] = {}

    def take(self, count: int, dtype: torch.dtype, place: torch.device, pinned: bool) -> tuple[torch.Tensor, _Row]:
        """Allocate `count` elements on the device `place`, pinned if `pinned`; returns the tensor and its row.

        The caller returns the elements with `row.give_back(count)`.
        """
        key = (dtype, place)
        if key not in self._rows:
            self._rows[key] = _Row(empty(count * self._count, dtype, place, pinned))
        row = self._rows[key]
        if row.live == 0 and row.most > row.buffer.numel():
            row.buffer = empty(row.most, dtype, place, pinned)
        row.live += count
        row.most = max(row.most, row.live)
        if row.filled + count > row.buffer.numel():
            return empty(count, dtype, place, pinned), row
        row.filled += count
        return row.buffer[row.filled - count : row.filled], row

    def clear(self) -> None:
        """Free the buffers, each as soon as no tensor uses it any more."""
        self._rows.clear()


def empty(count: int, dtype: torch.dtype, place: torch.device, pinned: bool) -> torch.Tensor:
    """Allocate an uninitialized 1-D tensor of `count` elements on the device `place`, pinned if `pinned`."""
    return torch.empty(count, dtype=dtype, device=place, pin_memory=pinned)


class Saver:
    """Storage for the inputs of checkpoints according to the flags; backward restores them.

    Inputs that need no gradient (masks, positions, the batch) and parameters are not moved: they stay in memory anyway,
    and blocks share them.

    Args:
        flags: the `activation_checkpointing` block.
        axis: ranks that have the same activations and can each store a part; None: no partitioning.
    """

    def __init__(self, flags: ActivationCheckpointing, axis: Axis | None) -> None:
        self._axis = axis if flags.partition_activations and axis is not None and axis.size > 1 else None
        self._host = flags.cpu_checkpointing
        self.buffers = (
            ActivationBuffers(flags.number_checkpoints or 1) if flags.contiguous_memory_optimization else None
        )
        self._channel = self._axis.channel() if self._axis is not None else 0
        self._turns = itertools.count()

    def hooks(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context with hooks for the tensors that torch's checkpoint saves, which are its inputs."""
        if self._axis is None and not self._host and self.buffers is None:
            return contextlib.nullcontext()
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Saved:
        if not tensor.requires_grad or isinstance(tensor, Parameter) or tensor.layout != torch.strided:
            return tensor
        whole = tensor.detach()
        if whole.stride() != torch.empty_like(whole, device="meta").stride():  # it has gaps or overlaps
            whole = whole.contiguous()
        flat = whole.as_strided((whole.numel(),), (1,))
        if self._axis is not None:
            cuts = partition_uniform(flat.numel(), self._axis.size)
            flat = flat[cuts[self._axis.rank] : cuts[self._axis.rank + 1]]
        place = torch.device("cpu") if self._host else flat.device
        pinned = self._host and flat.device.type != "cpu"
        row = None
        if self.buffers is None:
            values = empty(flat.numel(), flat.dtype, place, pinned)
        else:
            values, row = self.buffers.take(flat.numel(), flat.dtype, place, pinned)
        values.copy_(flat, non_blocking=True)
        saved = Saved(values, whole.shape, whole.stride(), flat.device, "host" if self._host else "device")
        if row is not None:
            weakref.finalize(saved, row.give_back, flat.numel()).atexit = False
        return saved

    def _unpack(self, saved: torch.Tensor | Saved) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        axis, count = self._axis, saved.shape.numel()
        if axis is None:
            return saved.values.to(saved.device, non_blocking=True).as_strided(saved.shape, saved.stride)
        cuts = partition_uniform(count, axis.size)
        flat = torch.empty(count, dtype=saved.values.dtype, device=saved.device)
        flat[cuts[axis.rank] : cuts[axis.rank + 1]].copy_(saved.values, non_blocking=True)
        tag = tag_of(self._channel, SPREAD, next(self._turns))
        spread(axis, flat, cuts, tag, f"gather of a saved activation of {count} elements").wait()
        return flat.as_strided(saved.shape, saved.stride)
