"""The trace of a step, without times: streams, kernels, messages, copies and waits."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import ArgumentError

KERNEL = "kernel"  # an operator on a stream of the device
MESSAGE = "message"  # a collective on the stream of its communicator; starts behind the stream it is posted from
COPY = "copy"  # between host and device, on a stream
ORDER = "order"  # a stream goes on behind an earlier entry
WAIT = "wait"  # the host goes on behind an earlier entry
HOST = "host"  # arithmetic on host memory
DISK = "disk"  # a transfer beside the host
MARK = "mark"  # a place in the step: forward, backward, step
EMPTIED = -1
NOTHING = -1  # an order behind a stream on which nothing was


@dataclass(slots=True)
class HostEvent:
    """One thing that the host does or launches, in the order in which it does so.

    Args:
        kind: one of the names above.
        name: the operator, the collective, `to_host` or `to_device`, `read` or `write`, or the mark's.
        stream: that it is launched on; of a disk: 0.
        flops: floating-point operations of matrix products and attention.
        nbytes: read and written by a kernel or the host; of a message: of the whole tensor, gathered or to be reduced.
        dtype: of the arithmetic: `bf16`, `fp16`, `fp32`.
        group: of a message: its ranks.
        lane: of a message: its communicator, whose messages keep their order.
        after: of an order and a wait: the number of the entry behind which it goes on.
        where: the last mark.
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


Entry = HostEvent  # the former name, still importable


@dataclass(slots=True)
class MemoryEvent:
    """A piece of device memory that comes, goes, or is used by another stream than its own.

    Args:
        position: entries recorded before; "at" in files.
        number: of the storage; `EMPTIED`: free memory goes back to the system (`empty_cache`).
        nbytes: that it takes from now on; 0: it is freed.
        stream: that it was allocated on; or the other stream that uses it.
        used: the other stream was named by `record_stream`.
        new: an operator of the recording made it; else it was there before, or its size has changed.
    """

    position: int
    number: int
    nbytes: int
    stream: int
    used: bool = False
    new: bool = False


@dataclass
class Recording:
    """One rank's step.

    Args:
        name: what was recorded.
        rank, size: as which rank of how many.
        entries: in the order of the host.
        blocks: of device memory, in the same order.
        host_time: seconds of the host per launch, measured apart; 0: unknown.
        facts: what else is to be printed with it: tokens, parameters, model operations.
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
        """Kernels, messages and copies."""
        return sum(entry.kind in (KERNEL, MESSAGE, COPY) for entry in self.entries)

    @property
    def flops(self) -> float:
        """Operations of all kernels."""
        return sum(entry.flops for entry in self.entries)

    def sent(self) -> dict[str, float]:
        """Bytes of messages, by collective."""
        bytes_by_name: dict[str, float] = {}
        for entry in self.entries:
            if entry.kind == MESSAGE:
                bytes_by_name[entry.name] = bytes_by_name.get(entry.name, 0) + entry.nbytes
        return bytes_by_name

    def save(self, path: str | Path) -> None:
        """Write the file that `load` reads; packed where its name ends in `.gz`."""
        blocks = [{"at": block.pop("position"), **block} for block in map(asdict, self.blocks)]
        encoded = (json.dumps({**asdict(self), "blocks": blocks}) + "\n").encode()
        Path(path).write_bytes(gzip.compress(encoded, mtime=0) if str(path).endswith(".gz") else encoded)

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """A recording from its file.

        Raises:
            ArgumentError: the file cannot be read, or is something else.
        """
        try:
            held = Path(path).read_bytes()
            fields: dict[str, Any] = json.loads(gzip.decompress(held) if str(path).endswith(".gz") else held)
            entries = [HostEvent(**{**each, "group": tuple(each["group"])}) for each in fields.pop("entries")]
            blocks = [MemoryEvent(position=each.pop("at"), **each) for each in fields.pop("blocks")]
            return cls(**fields, entries=entries, blocks=blocks)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ArgumentError(f"recording {path}: {error}; `Recording.save` writes one") from error
