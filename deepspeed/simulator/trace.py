"""Recording of a step without times: streams, kernels, messages, copies and waits."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import ArgumentError

KERNEL = "kernel"  # an operator on a stream of the device
MESSAGE = "message"  # a collective on its communicator's stream; starts after the work of the posting stream
COPY = "copy"  # a copy between host and device, on a stream
ORDER = "order"  # a stream waits for an earlier entry
WAIT = "wait"  # the host waits for an earlier entry
HOST = "host"  # arithmetic on host memory
DISK = "disk"  # a transfer that overlaps the host
GRAPH = "graph"  # one launch of all kernels that follow it with `captured`
MARK = "mark"  # a mark in the step: forward, backward, step
EMPTIED = -1
NOTHING = -1  # waits for a stream without entries


@dataclass(frozen=True, slots=True)
class KernelWork:
    """How a kernel divides its work, for machines with `CardRates`.

    Args:
        programs: programs that have something to do; 0: as many as the memory needs, as of a library's kernels.
        resident: programs that a multiprocessor holds at once, if `programs` is given.
        waiting: bytes of memory that one program has asked for and not received, at most.
        cached: bytes that are read again, from the L2 cache.
        instructions: instructions of warps, if they were counted; 0: not counted.
    """

    programs: int = 0
    resident: int = 1
    waiting: float = 0.0
    cached: float = 0.0
    instructions: float = 0.0


@dataclass(slots=True)
class HostEvent:
    """Entry of a recording: an operation that the host runs or launches, in host order.

    Args:
        kind: one of this module's constants.
        name: the operator, the collective, `to_host` or `to_device`, `read` or `write`, or the name of the mark.
        stream: stream of the launch; of a disk: 0.
        flops: floating-point operations of matrix products and attention.
        nbytes: bytes read and written; of a copy, bytes copied; of a message, bytes of the whole tensor.
        dtype: dtype of a kernel's arithmetic: `bf16`, `fp16`, `fp32`, `fp64`; "": none of these.
        group: for a message, its ranks.
        lane: for a message, its communicator, within which messages keep their order.
        after: for an order or a wait, the index of the entry to wait for; `NOTHING`: none.
        where: name of the last mark before it.
        work: of a kernel, how it divides its work; None: not recorded.
        captured: whether a kernel is part of a graph, and costs the host nothing.
    """

    kind: str
    name: str
    stream: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = ""
    group: tuple[int, ...] = ()
    lane: int = 0
    after: int = NOTHING
    where: str = ""
    work: KernelWork | None = None
    captured: bool = False


Entry = HostEvent  # former name, still importable


@dataclass(slots=True)
class MemoryEvent:
    """Event of device memory: allocation, release, or use by another stream.

    Args:
        position: number of entries recorded before; "at" in files.
        number: number of the storage; `EMPTIED`: free memory is released to the system (`empty_cache`).
        nbytes: size of the storage after the event; 0: it is freed.
        stream: stream of the allocation; or the other stream that uses it.
        used: whether the event is a use by another stream (`record_stream`).
        new: whether a recorded operator allocated it; else it existed before, or its size has changed.
    """

    position: int
    number: int
    nbytes: int
    stream: int
    used: bool = False
    new: bool = False


@dataclass
class Recording:
    """Recording of one rank's step.

    Args:
        name: name of the recorded program.
        rank, size: index of the rank, and number of ranks.
        entries: entries in host order.
        blocks: events of device memory, in the same order.
        host_time: host seconds per launch, measured separately; 0: unknown.
        facts: further numbers for reports, such as tokens, parameters, model operations.
    """

    name: str
    rank: int
    size: int
    entries: list[HostEvent] = field(default_factory=list)
    blocks: list[MemoryEvent] = field(default_factory=list)
    host_time: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Return the number of kernels, messages and copies."""
        return sum(entry.kind in (KERNEL, MESSAGE, COPY) for entry in self.entries)

    @property
    def flops(self) -> float:
        """Return the floating-point operations of all kernels."""
        return sum(entry.flops for entry in self.entries)

    def sent(self) -> dict[str, float]:
        """Return the bytes of messages by collective; each message counts with its whole tensor."""
        bytes_by_name: dict[str, float] = {}
        for entry in self.entries:
            if entry.kind == MESSAGE:
                bytes_by_name[entry.name] = bytes_by_name.get(entry.name, 0) + entry.nbytes
        return bytes_by_name

    def save(self, path: str | Path) -> None:
        """Write a file for `load`; compressed if its name ends in `.gz`."""
        blocks = [{"at": block.pop("position"), **block} for block in map(asdict, self.blocks)]
        encoded = (json.dumps({**asdict(self), "blocks": blocks}) + "\n").encode()
        Path(path).write_bytes(gzip.compress(encoded, mtime=0) if str(path).endswith(".gz") else encoded)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """Load a recording from its file.

        Raises:
            ArgumentError: the file cannot be read, or is no recording.
        """
        try:
            held = Path(path).read_bytes()
            fields: dict[str, Any] = json.loads(gzip.decompress(held) if str(path).endswith(".gz") else held)
            entries = [_event(each) for each in fields.pop("entries")]
            blocks = [MemoryEvent(position=each.pop("at"), **each) for each in fields.pop("blocks")]
            return cls(**fields, entries=entries, blocks=blocks)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(f"recording {path}: {error}; `Recording.save` writes one") from error


def _event(fields: dict[str, Any]) -> HostEvent:
    work = fields.get("work")
    return HostEvent(
        **{**fields, "group": tuple(fields["group"]), "work": None if work is None else KernelWork(**work)}
    )
