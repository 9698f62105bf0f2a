"""Point-to-point messages of nested values between two ranks, in order: pipeline activations and gradients.

A message consists of a notice (byte counts of header and tensors), a header (structure, shapes and dtypes) unless it
equals the previous one, and the tensors. Ranks with shared memory read the message in the sender's buffer and
acknowledge it after its last tensor is freed; other CPU ranks use tagged messages of gloo. Between devices, the tensors
use a separate communicator for each direction, and notice and header use gloo. A send does not block.
"""

from __future__ import annotations

import io
import math
import pickle
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deepspeed.comm.collectives.collectives import EXCHANGE, READ, SMALL, Handle, delay, post, wait_all
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.errors import CommError, NotAvailableError

_ALIGN = 64
_NOTICE = 16  # bytes: two integers, the length of the header (0: as before) and of the tensors


class _TensorRef(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return this tensor as a view of the message's buffer."""
        return buffer[self.offset : self.end].view(self.dtype).view(self.shape)


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._places[id(obj)]


class _TreeUnpickler(pickle.Unpickler):
    def __init__(self, tree: bytes, tensors: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(tree))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


@dataclass(frozen=True)
class Header:
    """Metadata of a message.

    Args:
        tree: pickle of the nested value, with each tensor replaced by its index.
        leaves: shape, dtype, requires_grad and offset (bytes from the first tensor) of each tensor.
    """

    tree: bytes
    leaves: tuple[_TensorRef, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors together, each aligned to 64 bytes."""
        return self.leaves[-1].end if self.leaves else 0

    @classmethod
    def take_apart(cls, value: Any) -> tuple[Header, list[torch.Tensor]]:
        """Split a nested value into header and tensors; raises CommError if it cannot be pickled."""
        file = io.BytesIO()
        writer = _Writer(file)
        try:
            writer.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise CommError(f"a {type(value).__name__} cannot be sent to another rank: {error}") from error
        leaves: list[_TensorRef] = []
        for tensor in writer.tensors:
            offset = -(-(leaves[-1].end if leaves else 0) // _ALIGN) * _ALIGN
            leaves.append(_TensorRef(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, offset))
        return cls(file.getvalue(), tuple(leaves)), writer.tensors

    def put_together(self, tensors: list[torch.Tensor]) -> Any:
        return _TreeUnpickler(self.tree, tensors).load()


@dataclass(frozen=True)
class P2PChannel:
    """Communicator for tensors in one direction: a process group of the two ranks, and this rank's device."""

    group: Any
    device: torch.device

    @staticmethod
    def require(axis: Axis, link: P2PChannel | None) -> None:
        """Raise NotAvailableError if an axis without tags has no `link` or no backend for headers in host memory."""
        if not axis.tagged and not (link is not None and axis.has_host_backend):
            raise NotAvailableError(
                "stages of a pipeline send what describes their messages from host to host, and the process group has "
                'no backend for that: start it with init_distributed(dist_backend="cpu:gloo,cuda:nccl")'
            )


class Sender:
    """Sender of messages to one rank.

    Args:
        axis: axis of both ranks.
        peer: position of the other rank on the axis.
        channel: number of the message channel (`Axis.channel`), equal on both ranks.
        link: communicator for tensors between devices; None: tensors are sent from host memory.

    Raises:
        NotAvailableError: the axis has no backend that sends headers from host memory.
    """

    def __init__(self, axis: Axis, peer: int, channel: int, link: P2PChannel | None = None) -> None:
        P2PChannel.require(axis, link)
        self.axis, self.peer, self.channel, self.link = axis, peer, channel, link
        self.bytes_sent = self.headers_sent = 0
        self._sequence = 0
        self._last: Header | None = None
        self._idle: list[torch.Tensor] = []  # buffers that no pending message uses
        self._underway: deque[tuple[list[Any], torch.Tensor]] = deque()

    def send(self, header: Header, tensors: list[torch.Tensor], label: str) -> None:
        """Send the output of `Header.take_apart` without blocking; the tensors may be modified after the call.

        Raises CommError with the last label of every rank of the axis if the backend fails; `label`: name in the error.
        """
        header_bytes = b"" if header == self._last else pickle.dumps(header)
        self._last = header
        self._sequence += 1
        self.headers_sent += bool(header_bytes)
        self.bytes_sent += header.nbytes
        self._collect()
        link, start = self.link, -(-(_NOTICE + len(header_bytes)) // _ALIGN) * _ALIGN
        whole = self._buffer(start + header.nbytes) if link is None else torch.empty(start, dtype=torch.uint8)
        buffer = whole[: start + header.nbytes]  # between devices: notice and header, without tensors
        buffer[:_NOTICE].view(torch.int64).copy_(torch.tensor([len(header_bytes), header.nbytes]))
        if header_bytes:
            buffer[_NOTICE : _NOTICE + len(header_bytes)] = torch.frombuffer(bytearray(header_bytes), dtype=torch.uint8)
        staging = self._buffer(header.nbytes) if link is not None and header.nbytes else buffer[start:]
        payload = staging[: header.nbytes]
        for leaf, tensor in zip(header.leaves, tensors, strict=True):
            leaf.view(payload).copy_(tensor.detach())
        self._underway.append((post(self.axis, label, lambda: self._start(buffer, len(header_bytes), start)), whole))
        if link is not None and header.nbytes:
            target = self.axis.ranks[self.peer]
            works = post(self.axis, label, lambda: [dist.isend(payload, target, group=link.group)])
            self._underway.append((works, staging))

    def _start(self, buffer: torch.Tensor, header_bytes: int, start: int) -> list[Any]:
        shared, group = self.axis.shared, self.axis.group
        if shared is not None:
            tag = tag_of(self.channel, EXCHANGE, self._sequence)
            shared.post(tag, buffer, [self.peer])
            return [shared.acknowledged(tag, [self.peer])]
        pieces = {SMALL: buffer[:_NOTICE], READ: buffer[_NOTICE : _NOTICE + header_bytes], EXCHANGE: buffer[start:]}
        if group is None:
            raise RuntimeError("nothing can be sent without a process group")
        return [
            group.send([piece], self.peer, tag_of(self.channel, kind, self._sequence))
            for kind, piece in pieces.items()
            if piece.numel()
        ]

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Return a buffer for a message, in shared memory if possible.

        The smallest idle buffer that is large enough is reused. If there is none, a new buffer replaces an idle one, so
        that messages of many sizes need no more buffers than messages of one size.
        """
        large = [index for index, idle in enumerate(self._idle) if idle.numel() >= nbytes]
        if large:
            return self._idle.pop(min(large, key=lambda index: self._idle[index].numel()))
        if self._idle:
            self._idle.pop()
        return self.axis.empty(nbytes, torch.uint8, self._device)

    @property
    def _device(self) -> torch.device:
        return torch.device("cpu") if self.link is None else self.link.device

    def _collect(self) -> None:
        if self.axis.shared is not None:
            self.axis.shared.drain()
        left: deque[tuple[list[Any], torch.Tensor]] = deque()
        for works, buffer in self._underway:
            if all(self._is_over(work) for work in works):
                self._keep(buffer)
            else:
                left.append((works, buffer))
        self._underway = left

    def settle(self, label: str) -> None:
        """Wait until gloo has sent all messages; gloo reports this only to a waiting caller. `label`: name in error."""
        if self.axis.shared is not None:
            return
        for works, buffer in self._underway:
            if buffer.device.type == "cpu":
                wait_all(self.axis, label, works)
                self._keep(buffer)
        # A device needs no waiting caller: the next send checks its messages.
        self._underway = deque(entry for entry in self._underway if entry[1].device.type != "cpu")

    def _keep(self, buffer: torch.Tensor) -> None:
        if buffer.device.type == self._device.type:
            self._idle.append(buffer)

    @staticmethod
    def _is_over(work: Any) -> bool:
        return work.ready() if hasattr(work, "ready") else work.is_completed()


class Receiver:
    """Receiver of the messages of one rank, in the order of sending; arguments and errors as in `Sender`."""

    def __init__(self, axis: Axis, peer: int, channel: int, link: P2PChannel | None = None) -> None:
        P2PChannel.require(axis, link)
        self.axis, self.peer, self.channel, self.link = axis, peer, channel, link
        self._sequence = 0
        self._header: Header | None = None
        self._read: deque[int] = deque()  # tags of messages whose tensors were all freed

    def receive(self, label: str) -> tuple[Header, list[torch.Tensor]]:
        """Wait for the next message; returns its header and tensors, which may be views of the sender's memory.

        Raises CommError if the sender has ended or the wait times out; `label`: name of the message in the error.
        """
        delay(label)
        self._sequence += 1
        payload = self._from_memory(label) if self.axis.shared is not None else self._from_group(label)
        header = self._header
        if header is None:
            raise CommError(f"{label}: the first message has no header")
        return header, [leaf.view(payload) for leaf in header.leaves]

    def _from_memory(self, label: str) -> torch.Tensor:
        shared, tag = self.axis.shared, tag_of(self.channel, EXCHANGE, self._sequence)
        if shared is None:
            raise RuntimeError("these ranks share no memory")
        self.release()
        wait_all(self.axis, label, [shared.posted(tag, [self.peer])])
        try:
            array = shared.read(self.peer, tag, torch.uint8).numpy()
        except CommError as error:  # the sender posted the message, and has ended since
            raise CommError(f"{label}: {error}") from error
        buffer = torch.from_numpy(array)
        # Every tensor of the message references this array, which may be freed at any time, in any thread.
        weakref.finalize(array, self._read.append, tag).atexit = False
        header_bytes, nbytes = buffer[:_NOTICE].view(torch.int64).tolist()
        if header_bytes:
            self._learn(buffer[_NOTICE : _NOTICE + header_bytes])
        start = -(-(_NOTICE + header_bytes) // _ALIGN) * _ALIGN
        return buffer[start : start + nbytes]

    def _from_group(self, label: str) -> torch.Tensor:
        notice = torch.empty(2, dtype=torch.int64)
        self._take(notice, SMALL, label)
        header_bytes, nbytes = notice.tolist()
        if header_bytes:
            header = torch.empty(header_bytes, dtype=torch.uint8)
            self._take(header, READ, label)
            self._learn(header)
        link = self.link
        payload = torch.empty(nbytes, dtype=torch.uint8, device="cpu" if link is None else link.device)
        if nbytes and link is None:
            self._take(payload, EXCHANGE, label)
        elif nbytes and link is not None:
            source = self.axis.ranks[self.peer]
            works = post(self.axis, label, lambda: [dist.irecv(payload, source, group=link.group)])
            # `wait` orders the device's stream and does not block the host.
            Handle(self.axis, label, works, None, payload).unrecorded().wait()
        return payload

    def _take(self, into: torch.Tensor, kind: int, label: str) -> None:
        group, tag = self.axis.group, tag_of(self.channel, kind, self._sequence)
        if group is None:
            raise RuntimeError("nothing can be received without a process group")
        works = post(self.axis, label, lambda: [group.recv([into.view(torch.uint8)], self.peer, tag)])
        wait_all(self.axis, label, works)

    def _learn(self, header_bytes: torch.Tensor) -> None:
        self._header = pickle.loads(header_bytes.numpy().tobytes())

    def release(self) -> None:
        """Acknowledge the messages in shared memory whose tensors were all freed."""
        shared = self.axis.shared
        while self._read and shared is not None:
            shared.acknowledge(self._read.popleft(), [self.peer])
