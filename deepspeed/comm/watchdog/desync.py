"""Detection of desynchronized ranks, which call different collectives.

[Note: comparing trails] Ranks that run different code may call collectives of equal sizes: nothing fails, and unrelated
tensors are summed. So each rank can record, for each set of ranks, its trail: a hash over the labels of all collectives
so far. Every `interval` collectives the hash is saved as a mark; the watchdog's thread publishes the marks and compares
them with those of the lowest rank of the set (`deepspeed/comm/watchdog/watchdog.py`). The main thread does not wait.
Fewer marks are stored of older calls, so that ranks whose threads compare at different times still have marks in
common. The newest calls are stored with the user's file and line, so the first difference of two trails can be
reported. Only ordered calls are recorded: tagged messages (reductions of gradients) and one-sided gathers may differ
between ranks, and `step` synchronizes the ranks.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import CodeType
from typing import Any

from deepspeed.comm.watchdog.last_collective import users_frame

_LEVELS = (1, 16, 256)  # levels of marks: every mark, every 16th, every 256th
_MARKS = 16  # newest marks that are stored of each level
_LEAST_ENTRIES = 1024  # minimum number of newest calls that are stored for a set of ranks
_TOLD_SETS = 4  # maximum number of sets of ranks in a report
_TOLD_RANKS = 8  # maximum number of ranks that a report lists one by one

Mark = tuple[int, int]
"""Number of the collective, and the hash over all collectives up to it."""


class _CollectiveLog:
    def __init__(self, ranks: Sequence[int], entries: int) -> None:
        self.ranks = tuple(ranks)
        self.count = self.hash = 0
        self.entries: deque[tuple[str, CodeType | None, int]] = deque(maxlen=entries)
        self.marks: list[deque[Mark]] = [deque(maxlen=_MARKS) for _ in _LEVELS]


class DesyncDetector:
    """Record of the collectives that this process calls (the desync trail), and its comparison; off until `start`."""

    def __init__(self) -> None:
        self.interval = 0
        self._lock = threading.Lock()
        self._streams: dict[str, _CollectiveLog] = {}
        self._known: dict[
            tuple[int, str], tuple[Any, _CollectiveLog]
        ] = {}  # by the owner's id, with the owner, so that its id is not reused

    def start(self, interval: int) -> None:
        """Start recording, with a mark every `interval` collectives; later calls do not change the interval.

        All ranks must call this at the same point of the program.
        """
        self.interval = self.interval or interval

    def forget(self) -> None:
        with self._lock:
            self._streams.clear()
            self._known.clear()

    def enter(self, owner: Any, kind: str, ranks: Callable[[], Sequence[int]], label: str, size: int = 0) -> None:
        """Record a collective before it begins.

        Args:
            owner: process group or axis of the collective.
            kind: kind of caller; each kind has its own order.
            ranks: returns the participating ranks; called once per owner and kind.
            label: text that is equal on these ranks.
            size: number of elements, equal on these ranks; 0: not compared.
        """
        if not self.interval:
            return
        known = self._known.get((id(owner), kind))
        stream = self._open(owner, kind, ranks()) if known is None else known[1]
        frame = users_frame(sys._getframe(1))
        code, line = (None, 0) if frame is None else (frame.f_code, frame.f_lineno)
        label = f"{label} [{size}]" if size else label
        with self._lock:
            stream.count += 1
            stream.hash = zlib.crc32(label.encode(), stream.hash)
            stream.entries.append((label, code, line))
            number, past = divmod(stream.count, self.interval)
            if not past:
                for level, marks in zip(_LEVELS, stream.marks, strict=True):
                    if number % level == 0:
                        marks.append((stream.count, stream.hash))

    def _open(self, owner: Any, kind: str, ranks: Sequence[int]) -> _CollectiveLog:
        """Return the log of an owner (a stream), created at the first call; equal kind and ranks share one log."""
        entries = max(_LEAST_ENTRIES, 4 * self.interval)
        name = f"{kind} {len(ranks)} {zlib.crc32(repr(list(ranks)).encode()):x}"
        with self._lock:
            stream = self._streams.setdefault(name, _CollectiveLog(ranks, entries))
            self._known[id(owner), kind] = (owner, stream)
        return stream

    def leaders(self, rank: int) -> dict[int, list[str]]:
        """Return the names of streams by the lowest rank of their set; not those in which `rank` is the lowest."""
        by_rank: dict[int, list[str]] = {}
        with self._lock:
            for name, stream in self._streams.items():
                if stream.ranks[0] != rank:
                    by_rank.setdefault(stream.ranks[0], []).append(name)
        return by_rank

    def marks(self) -> bytes:
        with self._lock:
            held = {name: sorted({m for level in s.marks for m in level}) for name, s in self._streams.items()}
        return json.dumps({name: marks for name, marks in held.items() if marks}).encode()

    def differs(self, remote_marks: bytes, names: Sequence[str]) -> str:
        """Describe the first difference of the streams `names` from another rank's `marks()`; "" if there is none."""
        local, others = json.loads(self.marks()), json.loads(remote_marks)
        for name in names:
            known = dict(map(tuple, others.get(name, ())))
            for number, mark in local.get(name, ()):
                if known.get(number, mark) != mark:
                    return f"the ranks took different paths, seen at collective {number} of {self._set(self._of(name))}"
        return ""

    def _of(self, name: str) -> Sequence[int]:
        with self._lock:
            return self._streams[name].ranks

    def latest(self, count: int = 3) -> list[str]:
        """Describe this rank's last `count` collectives in at most `_TOLD_SETS` streams, one collective per line."""
        lines: list[str] = []
        with self._lock:
            for stream in list(self._streams.values())[:_TOLD_SETS]:
                lines.append(f"The last collectives of {self._set(stream.ranks)} that this rank entered:")
                last = list(stream.entries)[-count:]
                lines += [
                    f"  {label!r} at {self._place(code, line) or 'no line of the script'}" for label, code, line in last
                ]
        return lines

    def recent(self) -> bytes:
        """Serialize the host and the newest calls of all streams, with file and line, for `parting` on another rank."""
        recent: dict[str, Any] = {}
        with self._lock:
            for name, stream in self._streams.items():
                entries = [(label, self._place(code, line)) for label, code, line in stream.entries]
                recent[name] = {"ranks": stream.ranks, "count": stream.count, "entries": entries}
        return zlib.compress(json.dumps({"host": socket.gethostname(), "streams": recent}).encode(), 1)

    @classmethod
    def parting(cls, marks: Mapping[int, bytes]) -> str:
        """Describe the first difference in at most `_TOLD_SETS` streams; returns "" if no difference is known.

        Args:
            marks: result of `recent`, by rank.
        """
        read = {rank: json.loads(zlib.decompress(text)) for rank, text in marks.items()}
        hosts = {rank: record["host"] for rank, record in read.items()}
        partings: list[tuple[bool, str]] = []
        for name in dict.fromkeys(name for record in read.values() for name in record["streams"]):
            streams = {rank: record["streams"][name] for rank, record in read.items() if name in record["streams"]}
            part = cls._first_difference(streams, hosts)
            if part is not None:
                partings.append(part)
        # first the streams in which ranks called different collectives, then those in which ranks are only behind
        return "\n".join(text for _, text in sorted(partings, key=lambda part: not part[0])[:_TOLD_SETS])

    @classmethod
    def _first_difference(cls, streams: Mapping[int, Any], hosts: Mapping[int, str]) -> tuple[bool, str] | None:
        """Return (whether labels differ, description of the first collective that differs) of a stream, or None.

        Labels do not differ if some ranks have only not reached the collective.
        """
        begins = {rank: stream["count"] - len(stream["entries"]) for rank, stream in streams.items()}
        ends = {rank: stream["count"] for rank, stream in streams.items()}
        ranks = next(iter(streams.values()))["ranks"]
        for number in range(max(begins.values()), max(ends.values())):
            entries = {r: streams[r]["entries"][number - begins[r]] if number < ends[r] else None for r in streams}
            labels = {entry[0] for entry in entries.values() if entry is not None}
            if len(labels) > 1 or None in entries.values():
                head = f"The paths part at collective {number + 1} of {cls._set(ranks)}:"
                return len(labels) > 1, "\n".join([head, *cls._odd_ones(entries, hosts)])
        return None

    @staticmethod
    def _odd_ones(entries: Mapping[int, Any], hosts: Mapping[int, str]) -> list[str]:
        """Return a line for each rank's call, the rarest call first; of equal calls, at most `_TOLD_RANKS` ranks."""
        ways: dict[str | None, list[int]] = {}
        for rank, entry in sorted(entries.items()):
            ways.setdefault(entry and entry[0], []).append(rank)
        lines: list[str] = []
        for label, ranks in sorted(ways.items(), key=lambda way: len(way[1])):
            for rank in islice(ranks, _TOLD_RANKS):
                entry = entries[rank]
                did = "has not entered it" if entry is None else f"{label!r} at {entry[1] or 'no line of the script'}"
                lines.append(f"  rank {rank} on {hosts[rank]}: {did}")
            if len(ranks) > _TOLD_RANKS:
                lines.append(f"  and {len(ranks) - _TOLD_RANKS} more like rank {ranks[_TOLD_RANKS - 1]}")
        return lines

    @staticmethod
    def _place(code: CodeType | None, line: int) -> str:
        return "" if code is None else f"{code.co_filename}:{line} in {code.co_name}"

    @staticmethod
    def _set(ranks: Sequence[int]) -> str:
        shown = ", ".join(map(str, ranks[:_TOLD_RANKS]))
        return f"ranks {shown}" + (f" and {len(ranks) - _TOLD_RANKS} more" if len(ranks) > _TOLD_RANKS else "")


trail = DesyncDetector()
"""The desync trail of this process."""
