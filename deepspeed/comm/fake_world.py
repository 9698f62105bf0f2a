"""Simulated world: this process is one rank, and the other ranks do not exist.

Every function that communicates with other ranks is replaced (`Replaceable` of `foundation/fake_mode.py`). Absent ranks
are assumed to have the same values as this one. Messages take no time and allocate the same memory as real ones: where
real ranks use shared memory, `SimulatedMemory` allocates the same buffers, and messages of peers have the same shapes.

The stages of a pipeline are simulated in order. A stage's input has the shapes that the previous stage sent, and its
integer values, since models branch on masks. The gradients that a stage receives have the shapes of its outputs. The
memory of a message is counted for the sender until the receiver has freed it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed import native
from deepspeed.comm.collectives import one_sided, same_error, scalars, torch_api
from deepspeed.comm.collectives.collectives import Handle
from deepspeed.comm.collectives.p2p import Header, Sender
from deepspeed.comm.process_groups import axis as axes
from deepspeed.comm.process_groups.axis import Axis, AxisRegistry
from deepspeed.comm.process_groups.process_group import destroy_process_group
from deepspeed.comm.shared_memory.doorbell import Until
from deepspeed.comm.shared_memory.transport import SharedMemory
from deepspeed.comm.watchdog import watchdog
from deepspeed.errors import CommError, UsageError
from deepspeed.foundation.fake_mode import late, of_device, per_host, simulation
from deepspeed.native.simulated import simulated_library

_KIND = 7 << 10  # bits of a tag that contain the kind (`axis.tag_of`)
_EXCHANGE = 0


class _There(Until):
    """Handle of a simulated message: complete at once; if ranks are late, complete only for a wait."""

    def __init__(self) -> None:
        self._late = late()

    def ready(self) -> bool:
        return not self._late

    def within(self, seconds: float) -> bool:
        return seconds > 0 or self.ready()

    def wait(self) -> None:
        return None


class SimulatedMemory(SharedMemory):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers = [r for r in range(size) if r != rank]
        self.serving: dict[int, torch.Tensor] = {}
        self._lent: set[int] = set()  # storages that peers could read, by identity
        self._posted: dict[int, torch.Tensor] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._one = torch.zeros(1)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        storage = tensor.untyped_storage()
        self._lent.add(storage._cdata)
        weakref.finalize(storage, self._lent.discard, storage._cdata).atexit = False
        return tensor

    def _readable(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._lent

    def drain(self) -> bool:
        return True

    def post(self, tag: int, flat: torch.Tensor, peers: Sequence[int]) -> None:
        """Store the posted tensor; allocate a copy if peers could not read it in place."""
        self._posted[tag] = flat
        if peers and not self._readable(flat):
            self._staged[tag] = self.empty(flat.numel(), flat.dtype)

    def posted(self, tag: int, peers: Sequence[int]) -> Until:
        return _There()

    def read(self, peer: int, tag: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a substitute for a peer's message: this rank's own posted tensor, or a tensor of one zero."""
        if tag & _KIND == _EXCHANGE << 10 and tag in self._posted:
            return self._posted[tag]
        return self._one.to(dtype)

    def acknowledge(self, tag: int, peers: Sequence[int]) -> None:
        """Do nothing: no peer waits for an acknowledgement."""

    def acknowledged(self, tag: int, peers: Sequence[int]) -> Until:
        self._posted.pop(tag, None)
        self._staged.pop(tag, None)
        return _There()

    def can_serve(self, channel: int, tensor: torch.Tensor) -> bool:
        """Return whether peers could read the tensor in place; the maximum number of channels is not simulated."""
        return tensor.numel() == 0 or self._readable(tensor)

    def serve(self, channel: int, tensor: torch.Tensor) -> None:
        self.serving[channel] = tensor

    def advance(self, channel: int) -> None:
        """Do nothing: versions always agree."""

    def reached(self, channel: int, peers: Sequence[int]) -> Until:
        return _There()

    def level(self, peer: int, channel: int) -> bool:
        return True

    def served(self, peer: int, channel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._one.to(dtype)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor keeps its values."""

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> None:
        """Do nothing: `out` keeps its values."""

    def all_gather(self, full: torch.Tensor, cuts: Sequence[int], own: torch.Tensor, mark: int = 0) -> None:
        """Do nothing: `full` keeps its values."""

    def broadcast(self, tensor: torch.Tensor, src: int, mark: int = 0) -> None:
        """Do nothing: the tensor keeps its values."""

    def close(self) -> None:
        self.serving.clear()


_arrived: set[int] = set()  # addresses of memory that a peer would own


class UnheardError(CommError):
    """Error for the input of a pipeline stage if its sender, global rank `rank`, was not simulated before."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} has not been run without values yet: what it sends is not known")
        self.rank = rank


@dataclass(frozen=True)
class FakeMessage:
    """Contents of a simulated message.

    Args:
        header: structure, shapes and dtypes.
        integers: by tensor, the values as an array; None for floating-point and complex tensors.
    """

    header: Header
    integers: list[Any]

    @classmethod
    def of(cls, header: Header, tensors: list[torch.Tensor]) -> FakeMessage:
        arrays = [None if t.is_floating_point() or t.is_complex() else t.detach().numpy().copy() for t in tensors]
        return cls(header, arrays)

    def gradients(self) -> FakeMessage:
        """Return the message that the receiver sends back in backward: one gradient per differentiable tensor."""
        leaves = [leaf for leaf in self.header.leaves if leaf.differentiable]
        header, tensors = Header.take_apart(
            [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in leaves]
        )
        return FakeMessage(header, [None] * len(tensors))

    def arrive(self, shared: bool) -> list[torch.Tensor]:
        if not shared:
            payload = torch.empty(self.header.nbytes, dtype=torch.uint8)
        else:
            array = np.empty(self.header.nbytes, dtype=np.uint8)
            _arrived.add(array.ctypes.data)
            weakref.finalize(array, _arrived.discard, array.ctypes.data).atexit = False
            payload = torch.from_numpy(array)
        tensors = [leaf.view(payload) for leaf in self.header.leaves]
        for tensor, held in zip(tensors, self.integers, strict=True):
            if held is not None:
                tensor.numpy()[...] = held
        return tensors

    @staticmethod
    def owns(storage: torch.UntypedStorage) -> bool:
        """Return whether a storage represents memory of an absent rank."""
        return storage.data_ptr() in _arrived


class _ReadReceipt(Until):
    """Handle that is complete once its message is marked as read, or was waited for."""

    def __init__(self) -> None:
        self.over = False

    def ready(self) -> bool:
        return self.over

    def within(self, seconds: float) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


class SimulatedSender(Sender):
    """Sender to an absent rank with shared memory. `read` marks a message as read."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reads: dict[Any, _ReadReceipt] = {}
        self._name: Any = None

    def name(self, message: Any) -> None:
        self._name = message

    def unread(self) -> list[Any]:
        return list(self._reads)

    def read(self, message: Any) -> None:
        self._reads.pop(message).over = True

    def _start(self, buffer: torch.Tensor, header_bytes: int, start: int) -> list[Any]:
        super()._start(buffer, header_bytes, start)
        self._reads[self._name] = _ReadReceipt()
        return [self._reads[self._name]]


class FakeFetchService(one_sided.FetchService):
    """Fetch service of an axis with absent ranks, which request this rank's slice whenever this rank pulls."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self._served, self._lock, self._sent = axis, {}, threading.Lock(), deque()

    def pull(
        self, channel: int, full: torch.Tensor, cuts: tuple[int, ...], label: str, within: slice | None = None
    ) -> Handle:
        """Load this rank's slice, as for a request of a peer, and return a handle that is already complete."""
        slice_ = self._served[channel].slice
        if not isinstance(slice_, torch.Tensor):
            with slice_():
                pass
        return Handle(self.axis, label, [], None, full, self.axis.bytes_of_others(full, cuts))

    def close(self) -> None:
        """Do nothing: no socket is open."""


class FakeRun(same_error.CollectiveRun):
    def meet(self, label: str, error: str = "") -> None:
        self.texts[self.axis.rank] = error


class FakeObjectExchange(torch_api.ObjectExchange):
    def gather(self, axis: Axis, local: Any) -> list[Any]:
        return [local] * axis.size

    def gather_present(self, axis: Axis, local: Any) -> dict[int, Any]:
        return {axis.rank: local}


class FakeAxisRegistry(AxisRegistry):
    """Registry of axes with absent ranks. On devices, a fake backend moves no data; on CPU, ranks share memory."""

    def make_groups(self, rows: Sequence[tuple[int, ...]], where: str) -> None:
        if where != "cpu" or of_device():
            super().make_groups(rows, where)

    def new_axis(self, ranks: tuple[int, ...], name: str, where: str, group: dist.ProcessGroup | None) -> Axis:
        if len(ranks) == 1 or where != "cpu" or of_device():
            return super().new_axis(ranks, name, where, group)
        me = ranks.index(self.rank)
        shared = SimulatedMemory(me, len(ranks)) if native.library() is not None else None
        return Axis(name, ranks, me, None, True, shared)

    def _host_of(self, rank: int) -> int:
        return rank // (per_host() or int(os.environ.get("LOCAL_WORLD_SIZE") or self.size))

    def find_hosts(self) -> None:
        self.hosts = {rank: str(self._host_of(rank)) for rank in range(self.size)}

    def _all_of_world(self, shares: bool) -> bool:
        return shares

    def _make_reductions(self, lacking: list[Axis], everyone: Axis) -> None:
        if everyone.tagged:
            return
        backend = self.device_backend(everyone.group)
        for axis in lacking:
            rows = self.by_host(axis.ranks, {rank: self._host_of(rank) for rank in axis.ranks})
            own = [row for row in rows if axis.ranks[axis.rank] in row]
            groups = {
                (on, ranks): axes.make_group(list(ranks), watchdog.timeout(), backend)
                for on, ranks in self.communicators_of(axis.ranks, own)
            }
            axis._reductions = self.reducing_axis(axis, rows, groups)


@contextlib.contextmanager
def absent_peers(
    numbers: scalars.Scalars,
    *,
    late: bool = False,
    device: bool = False,
    per_host: int = 0,
    stage_outputs: dict[int, Any] | None = None,
) -> Generator[None]:
    """Simulate the other ranks of this process's group inside the context.

    Args:
        numbers: source of the numbers that code reads from tensors without values.
        late: complete messages only when they are waited for, instead of at once.
        device, per_host, stage_outputs: as in `planner.memory.simulate`.
    """
    before, scalars.current = scalars.current, numbers
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, scalars, "current", before)
        stack.enter_context(simulation(late=late, device=device, per_host=per_host, outputs=stage_outputs))
        stack.enter_context(native.presented.replaced(simulated_library))
        stack.enter_context(axes.registries.replaced(FakeAxisRegistry))
        stack.enter_context(torch_api.object_exchange.replaced(FakeObjectExchange()))
        stack.enter_context(same_error.runs.replaced(FakeRun))
        stack.enter_context(same_error.comparison.replaced(lambda _differences: ""))
        stack.enter_context(one_sided.fetch_services.replaced(FakeFetchService))
        yield


@contextlib.contextmanager
def fake_ranks(rank: int, size: int, **world: Any) -> Generator[None]:
    """Simulate a world of `size` ranks inside the context; this process is `rank`, and the other ranks are absent.

    Args:
        world: keyword arguments of `absent_peers`.

    Raises:
        UsageError: this process has a process group.
    """
    if dist.is_initialized():
        raise UsageError(
            "this process has a process group, and a simulation creates its own world: predict before "
            "deepspeed.init_distributed(), or in another process"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # takes 0.1 s

    numbers = scalars.FakeScalars(torch.device("cpu"))  # tensors are on the CPU, without values
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with absent_peers(numbers, **world):
            yield
    finally:
        destroy_process_group()
