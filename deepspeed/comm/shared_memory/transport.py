"""Shared memory between the ranks of one machine: posted buffers that peers read in place, and fast collectives.

[Note: shared memory] Ranks of one machine can read each other's buffers instead of receiving copies. A *post* gives the
peers the address of a buffer; each reads the buffer there, in any order, and acknowledges, so that the sender may reuse
it. An *ordered* collective streams through small slots (`native/shm.cpp`); all ranks call such collectives in the same
order. Sums of both kinds are fp32 sums in rank order. While a rank waits, it also completes other messages that peers
may be waiting for (`comm/shared_memory/doorbell.py`). The memory consists of memfds, which peers open in /proc of their
owner (`comm/shared_memory/allocator.py`): memfds have no names, so a killed rank leaves no files behind.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import struct
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from deepspeed.comm.shared_memory import doorbell
from deepspeed.comm.shared_memory.allocator import SharedAllocator, open_shared, shared_memory
from deepspeed.comm.shared_memory.doorbell import Alive, Until, groups
from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.last_collective import boot
from deepspeed.errors import CommError
from deepspeed.foundation.log import log_once
from deepspeed.native import KINDS, library

_TOKEN = 16  # random bytes at the end of a segment that identify it: containers can use the same process ids
_SLOT = 1 << 18  # bytes of a slot, so that a chunk stays in the second-level cache
_CROWDED_SLOT = 1 << 20  # with more ranks than cores: fewer context switches
_SPIN_NS = 400_000  # a waiting rank polls the memory for this time before it sleeps; waking up takes about 60 us
_MESSAGE = struct.Struct("=8Q")  # kind, tag, descriptor, bytes of the file, offset, bytes
_POST, _ACK, _SERVE = range(1, 4)
_MISMATCH = -1000
_STOPPED = 1

Location = tuple[int, int, int, int]  # descriptor, bytes of the file, offset, bytes


class SharedMemory:
    """This process's view of a group's shared memory, created by `shared_memory_of`; needs the native library."""

    def __init__(
        self, rank: int, segments: Sequence[mmap], bells: Sequence[mmap], processes: Sequence[int], slot: int, spin: int
    ) -> None:
        native = library()
        if native is None:
            raise RuntimeError("shared memory needs the native library")
        self.rank, self.size = rank, len(segments)
        self.allocator = SharedAllocator()
        self._native, self._processes = native, processes
        self._kept = segments, bells  # mapped as long as native code may read them
        self._lock, self._pushing, self._draining = threading.RLock(), threading.Lock(), threading.Lock()
        self._buffer = ctypes.create_string_buffer(_MESSAGE.size)
        self._trouble: BaseException | None = None
        self._deadline = 0.0  # deadline of the running collective, once it waits
        this: weakref.ref[SharedMemory] = weakref.ref(self)
        answers = self._answers(this)
        next(answers)
        # Kept: native code calls it.
        self._callback = ctypes.CFUNCTYPE(ctypes.c_int)(answers.__next__)
        self._context = ctypes.c_void_p(
            native.ds_shm_open(
                rank,
                self.size,
                slot,
                spin,
                doorbell.NAP_US,
                self._addresses(segments),
                self._addresses(bells),
                self._callback,
            )
        )
        weakref.finalize(self, native.ds_shm_close, self._context).atexit = False
        self.peers = [r for r in range(self.size) if r != rank]
        self._posts: list[dict[int, Location]] = [{} for _ in segments]
        self._acks: dict[int, int] = defaultdict(int)
        self._served: list[dict[int, Location]] = [{} for _ in segments]
        self._staged: dict[int, torch.Tensor] = {}  # posted copies of buffers outside of shared memory
        self.serving: dict[int, torch.Tensor] = {}  # by channel: peers may read the tensor as long as it is here
        self._foreign: dict[tuple[int, int], torch.Tensor] = {}
        self._mapped: list[tuple[int, int]] = []  # their address ranges
        self.alive = Alive([processes[r] for r in self.peers])
        groups.memories.append(self)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a 1-D uninitialized tensor that can be posted without a copy."""
        return self.allocator.empty(numel, dtype)

    # -- waiting --------------------------------------------------------------------------------------------------

    def bell_count(self) -> int:
        return self._native.ds_shm_bell(self._context)

    def nap(self, seen: int, microseconds: int) -> None:
        self._native.ds_shm_nap(self._context, seen, microseconds)

    @staticmethod
    def _answers(this: weakref.ref[SharedMemory]) -> Iterator[int]:
        """Yield the results of the callback, without end; the first belongs to no call.

        A function would lose what a signal handler raises: handlers run before its first line, where it can catch
        nothing, and ctypes ignores the exceptions of callbacks. A generator continues inside of its `try`.
        """
        code = 0
        while True:
            try:
                while True:
                    yield code
                    memory = this()
                    code = _STOPPED if memory is None else memory.while_waiting()
                    del memory  # it owns the generator, which would keep it alive
            except GeneratorExit:
                return
            except BaseException as trouble:  # passed on to the caller of the collective
                code, memory = _STOPPED, this()
                if memory is not None:
                    memory._trouble = trouble
                del memory

    def while_waiting(self) -> int:
        """Make progress and check for failures; native code calls this during a wait, which a non-zero result ends."""
        groups.drain()
        groups.work()
        self.alive.check()
        watchdog.here.raise_if_alarmed()
        now, limit = time.monotonic(), watchdog.timeout().total_seconds()
        self._deadline = self._deadline or now + limit
        if now > self._deadline:
            raise RuntimeError(f"timed out after {limit:g} s")
        return 0

    # -- posts ----------------------------------------------------------------------------------------------------

    def _push(self, peer: int, *words: int) -> None:
        message = _MESSAGE.pack(*words, *(0,) * (8 - len(words)))

        def pushed() -> bool:
            with self._pushing:  # two threads must not write to the same slot of the ring
                return bool(self._native.ds_shm_push(self._context, peer, message))

        if not pushed():
            Until(self, pushed).wait()

    def drain(self) -> bool:
        """Receive the messages that have arrived; returns False if another thread is doing so."""
        if not self._draining.acquire(blocking=False):
            return False
        try:
            while (peer := self._native.ds_shm_pop(self._context, self._buffer)) >= 0:
                kind, tag, *where = _MESSAGE.unpack(self._buffer.raw)
                if kind == _ACK:
                    self._acks[tag] += 1
                else:
                    (self._posts if kind == _POST else self._served)[peer][tag] = tuple(where[:4])
        finally:
            self._draining.release()
        return True

    def _locate(self, tensor: torch.Tensor) -> Location | None:
        place = self.allocator.place(tensor)
        return None if place is None else (*place, tensor.numel() * tensor.itemsize)

    def post(self, tag: int, flat: torch.Tensor, peers: Sequence[int]) -> None:
        """Let `peers` read a contiguous tensor under a tag: in place, or a copy if it is not in shared memory.

        The tensor must not change until all peers have acknowledged the tag.
        """
        where = self._locate(flat)
        if where is None:
            copied = self._staged[tag] = self.empty(flat.numel(), flat.dtype)
            copied.copy_(flat.reshape(-1))
            where = self._locate(copied)
        if where is not None:
            for peer in peers:
                self._push(peer, _POST, tag, *where)

    def posted(self, tag: int, peers: Sequence[int]) -> Until:
        return Until(self, lambda: all(tag in self._posts[peer] for peer in peers))

    def read(self, peer: int, tag: int, dtype: torch.dtype) -> torch.Tensor:
        return self._view(peer, self._posts[peer][tag]).view(dtype)

    def acknowledge(self, tag: int, peers: Sequence[int]) -> None:
        for peer in peers:
            del self._posts[peer][tag]
            self._push(peer, _ACK, tag)

    def acknowledged(self, tag: int, peers: Sequence[int]) -> Until:
        """Return a handle that completes once all of `peers` have acknowledged this rank's post under `tag`."""

        def ready() -> bool:
            if self._acks[tag] < len(peers):
                return False
            del self._acks[tag]
            self._staged.pop(tag, None)
            return True

        return Until(self, ready)

    def maps(self, storage: torch.UntypedStorage) -> bool:
        return any(low <= storage.data_ptr() < high for low, high in self._mapped)

    @staticmethod
    def require(shared: SharedMemory | None) -> SharedMemory:
        if shared is None:
            raise CommError("these ranks share no memory")
        return shared

    @staticmethod
    def is_of_a_peer(storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is mapped memory of another rank."""
        return any(isinstance(memory, SharedMemory) and memory.maps(storage) for memory in groups.memories)

    def _view(self, peer: int, where: Location) -> torch.Tensor:
        descriptor, size, offset, nbytes = where
        key = (peer, descriptor)
        if key not in self._foreign:
            try:
                memory = open_shared(self._processes[peer], descriptor, size)
            except OSError as error:
                if error.errno == errno.ENOMEM:  # the limit of this process, not a failure of its peer
                    raise
                raise CommError(
                    f"process {self._processes[peer]}, member {peer} of the group, ended: its memory is gone ({error})"
                ) from error
            array = np.frombuffer(memory, dtype=np.uint8)
            self._mapped.append((array.ctypes.data, array.ctypes.data + array.nbytes))
            self._foreign[key] = torch.from_numpy(array)
        return self._foreign[key][offset : offset + nbytes]

    # -- slices that peers may read at any time -------------------------------------------------------------------

    def can_serve(self, channel: int, tensor: torch.Tensor) -> bool:
        """Return whether `serve` can be called: the tensor is in shared memory, and the channel number small enough."""
        return channel < self._native.ds_shm_channels() and (tensor.numel() == 0 or self._locate(tensor) is not None)

    def serve(self, channel: int, tensor: torch.Tensor) -> None:
        """Let all peers read `tensor` (see `can_serve`) at any time, as long as it is in `serving`."""
        self.serving[channel] = tensor
        where = self._locate(tensor)
        for peer in self.peers if where else ():
            self._push(peer, _SERVE, channel, *(where or ()))

    def advance(self, channel: int) -> None:
        self._native.ds_shm_advance(self._context, channel)

    def reached(self, channel: int, peers: Sequence[int]) -> Until:
        version = self._native.ds_shm_version

        def ready() -> bool:
            local_version = version(self._context, self.rank, channel)
            return all(
                channel in self._served[p] and version(self._context, p, channel) >= local_version for p in peers
            )

        return Until(self, ready)

    def level(self, peer: int, channel: int) -> bool:
        version = self._native.ds_shm_version
        return version(self._context, peer, channel) == version(self._context, self.rank, channel)

    def served(self, peer: int, channel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._view(peer, self._served[peer][channel]).view(dtype)

    # -- ordered collectives --------------------------------------------------------------------------------------

    def _run(self, function: Callable[..., int], *args: Any) -> None:
        with self._lock:
            self._deadline = 0.0
            self.alive.check(ended=False)
            code = function(self._context, *args)
            if code == 0:
                return
            trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble
        raise RuntimeError(f"peer rank {_MISMATCH - code} of the group runs another collective, or one of another size")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous fp32, bf16 or fp16 tensor over the ranks, in place; raises as `broadcast` does."""
        self._run(self._native.ds_shm_all_reduce, tensor.data_ptr(), tensor.numel(), KINDS[tensor.dtype])

    def reduce_scatter(self, flat: torch.Tensor, cuts: Sequence[int], out: torch.Tensor) -> None:
        """Write the sum of all ranks' `flat`, in this rank's slice flat[cuts[rank] : cuts[rank + 1]], to `out`.

        Contiguous tensors of one dtype: fp32, bf16 or fp16; raises as `broadcast` does.
        """
        bounds = (ctypes.c_uint64 * len(cuts))(*cuts)
        run = self._native.ds_shm_reduce_scatter
        self._run(run, flat.data_ptr(), bounds, KINDS[flat.dtype], out.data_ptr())

    def all_gather(self, full: torch.Tensor, cuts: Sequence[int], own: torch.Tensor, mark: int = 0) -> None:
        """Copy each rank r's `own` to full[cuts[r] : cuts[r + 1]] on all ranks; contiguous, any dtype.

        `own` may be this rank's slice of `full`; `mark` and errors as in `broadcast`.
        """
        width = full.itemsize
        bounds = (ctypes.c_uint64 * len(cuts))(*(cut * width for cut in cuts))
        self._run(self._native.ds_shm_all_gather, full.data_ptr(), bounds, own.data_ptr(), mark)

    def broadcast(self, tensor: torch.Tensor, src: int, mark: int = 0) -> None:
        """Copy a contiguous tensor of any dtype from group rank `src` to all ranks, in place.

        Args:
            mark: number that identifies the call, equal on all ranks.

        Raises:
            RuntimeError: operation, size or mark differ between ranks; also the errors of `Until.wait`.
        """
        nbytes = tensor.numel() * tensor.itemsize
        self._run(self._native.ds_shm_broadcast, tensor.data_ptr(), nbytes, src, mark)

    def close(self) -> None:
        """Release the peers' memory and stop serving; later waits raise RuntimeError."""
        self.alive.close()
        self._foreign.clear()
        self._mapped.clear()
        self.serving.clear()
        if self in groups.memories:
            groups.memories.remove(self)

    @staticmethod
    def declare(native: ctypes.CDLL) -> None:
        pointer, u64, i64, i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int
        functions: dict[str, tuple[list[Any], Any]] = {
            "ds_shm_bytes": ([u64, u64], u64),
            "ds_shm_open": ([u64, u64, u64, u64, i64, pointer, pointer, ctypes.CFUNCTYPE(i32)], pointer),
            "ds_shm_close": ([pointer], None),
            "ds_shm_push": ([pointer, u64, ctypes.c_char_p], i32),
            "ds_shm_pop": ([pointer, pointer], i32),
            "ds_shm_bell": ([pointer], ctypes.c_uint32),
            "ds_shm_nap": ([pointer, ctypes.c_uint32, i64], None),
            "ds_shm_advance": ([pointer, u64], None),
            "ds_shm_version": ([pointer, u64, u64], u64),
            "ds_shm_channels": ([], u64),
            "ds_shm_all_reduce": ([pointer, pointer, u64, i32], i32),
            "ds_shm_reduce_scatter": ([pointer, pointer, pointer, i32, pointer], i32),
            "ds_shm_all_gather": ([pointer, pointer, pointer, pointer, u64], i32),
            "ds_shm_broadcast": ([pointer, pointer, u64, u64, u64], i32),
            "ds_sum": ([pointer, i32, u64, i32, pointer, i32, ctypes.c_float, i32], None),
        }
        for name, (arguments, result) in functions.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, result

    @staticmethod
    def _addresses(mapped: Sequence[mmap]) -> ctypes.Array[ctypes.c_void_p]:
        return (ctypes.c_void_p * len(mapped))(*(np.frombuffer(each, dtype=np.uint8).ctypes.data for each in mapped))


def sum_natively(parts: Sequence[torch.Tensor], out: torch.Tensor, scale: float, add: bool) -> bool:
    """Do `sum_in_rank_order` in native code, in one pass over memory.

    Returns:
        True, or False with `out` unchanged: no native library, `out` is not on the CPU, or dtypes are not supported.
    """
    native = library()
    kinds = [KINDS.get(part.dtype) for part in parts]
    if native is None or out.dtype not in KINDS or len(set(kinds)) > 1 or kinds[0] is None or out.device.type != "cpu":
        return False
    pointers = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
    SharedMemory.declare(native)
    native.ds_sum(pointers, len(parts), out.numel(), kinds[0], out.data_ptr(), KINDS[out.dtype], scale, add)
    return True


# By the id of the process group, with the group, since Python reuses ids.
_shared_memories: dict[int, tuple[Any, SharedMemory | None]] = {}


class _Offer(NamedTuple):
    """Machine, process and file descriptors of a rank's memory segment and bell, for its peers."""

    boot: str
    slot: int
    process: int
    descriptor: int
    nbytes: int
    bell: int
    token: bytes

    @staticmethod
    def map_all(
        offers: list[_Offer], rank: int, memory: mmap | None, bell: mmap | None
    ) -> tuple[list[mmap], list[mmap]] | None:
        """Map the memory of all ranks; returns (segments, bells), or None if an entry cannot be mapped."""
        if memory is None or bell is None or len({offer[:2] for offer in offers}) > 1:
            return None
        segments, bells = [], []
        for peer, offer in enumerate(offers):
            try:
                segment = memory if peer == rank else open_shared(offer.process, offer.descriptor, offer.nbytes)
                if segment[-_TOKEN:] != offer.token:
                    return None
                bells.append(bell if peer == rank else groups.bell_of(offer.process, offer.bell))
            except OSError:
                return None
            segments.append(segment)
        return segments, bells


def shared_memory_of(group: dist.ProcessGroup) -> SharedMemory | None:
    """Return the shared memory of a gloo group; None if not all ranks can map it. All ranks must call this."""
    known = _shared_memories.get(id(group))
    if known is not None and known[0] is group:
        return known[1]
    native, size, rank = library(), dist.get_world_size(group), dist.get_rank(group)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    crowded = size > cores
    slot = _CROWDED_SLOT if crowded else _SLOT
    descriptor, memory, token = -1, None, secrets.token_bytes(_TOKEN)
    if native is not None and hasattr(os, "memfd_create"):
        SharedMemory.declare(native)
        descriptor, memory = shared_memory(native.ds_shm_bytes(size, slot) + _TOKEN)
        memory[-_TOKEN:] = token
    bell = groups.bell() if memory is not None else (-1, None)
    offer = _Offer(boot(), slot, os.getpid(), descriptor, len(memory) if memory else 0, bell[0], token)
    offers: list[Any] = [None] * size
    dist.all_gather_object(offers, offer, group=group)
    mapped = _Offer.map_all(offers, rank, memory, bell[1])
    votes: list[Any] = [None] * size
    dist.all_gather_object(votes, mapped is not None, group=group)
    if descriptor >= 0:
        os.close(descriptor)  # every rank that can has mapped it
    if mapped is None or not all(votes):
        machines = len({offer.boot for offer in offers})
        why = f"{machines} machines" if machines > 1 else "not every rank has the native library, or can map the others"
        log_once(f"no shared memory among {size} CPU ranks ({why}): their messages go through gloo")
        shared = None
    else:
        shared = SharedMemory(rank, *mapped, [offer.process for offer in offers], slot, 0 if crowded else _SPIN_NS)
    _shared_memories[id(group)] = (group, shared)
    return shared


def forget_shared_memory() -> None:
    for _, shared in _shared_memories.values():
        if shared is not None:
            shared.close()
    _shared_memories.clear()
    groups.forget()
