"""Stores the saved inputs of a checkpointed block: whole or partitioned, on the device or the host."""

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
    """What is kept of one tensor.

    Args:
        values: 1-D; the elements this rank keeps.
        shape, stride: of the tensor.
        device: where it is needed again.
        tier: "device" or "host".
    """

    values: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device
    tier: str


@dataclass(eq=False)
class _Row:
    """A buffer and how it is filled, in elements."""

    buffer: torch.Tensor
    filled: int = 0
    live: int = 0  # lent and not given back, inside the buffer or beside it
    most: int = 0  # the most that was live at once

    def give_back(self, count: int) -> None:
        self.live -= count
        if self.live == 0:
            self.filled = 0


class ActivationBuffers:
    """One buffer per dtype and place, in which tensors lie one behind the other until all are given back.

    It has room for the most that was ever lent at once; what exceeds it, as in the first pass, lies on its own.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rows: dict[tuple[torch.dtype, torch.device], _Row] = {}

    def take(self, count: int, dtype: torch.dtype, place: torch.device, pinned: bool) -> tuple[torch.Tensor, _Row]:
        """Room for `count` elements, and the row to give them back to."""
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
        """Let the buffers go; tensors that still lie in them keep theirs alive."""
        self._rows.clear()


def empty(count: int, dtype: torch.dtype, place: torch.device, pinned: bool) -> torch.Tensor:
    """A 1-D tensor without values."""
    return torch.empty(count, dtype=dtype, device=place, pin_memory=pinned)


class Saver:
    """Packs the inputs of checkpoints as the flags say, and gives them back in backward.

    Inputs that need no gradient (masks, positions, the batch) are shared between blocks and held by their owner, as
    parameters are: they stay as they are.

    Args:
        axis: the ranks that hold the same activations and may each keep a part; None: this rank alone.
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
        """Around a call of torch's checkpoint: the only tensors saved outside of its own hooks are its inputs."""
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
