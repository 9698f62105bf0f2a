"""A rank's place: its last collective, in a page of memory that its neighbours can read even after its death."""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import time
from functools import cache
from pathlib import Path

OUTSIDE, INSIDE, LEFT = range(3)

_SIZE = 1024  # bytes of a page; longer labels are cut
_HEAD = struct.Struct("=QdBH16s")  # number of the collective, wall-clock second it began, state, label's length, token
_STATE_AT = struct.calcsize("=Qd")


class StatusPage:
    """The page this process writes. One `write` costs under two microseconds."""

    def __init__(self) -> None:
        self.number = 0
        self._token = secrets.token_bytes(16)
        self._descriptor = -1
        self._page: mmap.mmap | bytearray = bytearray(_SIZE)
        self.write("start", OUTSIDE)

    def write(self, label: str, state: int) -> None:
        """Enter a collective (`INSIDE`) or another state, from now on."""
        text = label.encode()[: _SIZE - _HEAD.size]
        _HEAD.pack_into(self._page, 0, self.number, time.time(), state, len(text), self._token)
        self._page[_HEAD.size : _HEAD.size + len(text)] = text

    def turn(self, state: int) -> None:
        """Change the state alone: the label stays, as that of the last collective."""
        self._page[_STATE_AT] = state

    @property
    def inside(self) -> bool:
        """Whether this process is in a collective."""
        return self._page[_STATE_AT] == INSIDE

    @property
    def label(self) -> str:
        """What was written last."""
        return bytes(self.snapshot()[_HEAD.size :]).decode(errors="replace")

    def snapshot(self) -> bytes:
        """The page as it is now."""
        return bytes(self._page[: _HEAD.size + _HEAD.unpack_from(self._page)[3]])

    def share(self) -> str:
        """Move the page to memory that neighbours can map; returns the address they need, "" where there is none."""
        if not hasattr(os, "memfd_create"):
            return ""
        if self._descriptor < 0:
            self._descriptor = os.memfd_create("deepspeed.status")
            os.ftruncate(self._descriptor, _SIZE)
            shared = mmap.mmap(self._descriptor, _SIZE)
            shared[:] = bytes(self._page)
            self._page = shared
        return f"{os.getpid()} {self._descriptor} {self._token.hex()}"

    def keep_to_itself(self) -> None:
        """Move the page back to this process's own memory; who has mapped it keeps what it said last."""
        if self._descriptor >= 0:
            self._page = bytearray(self._page[:])
            os.close(self._descriptor)
            self._descriptor = -1


def neighbour(address: str) -> mmap.mmap | None:
    """The page at an address of `StatusPage.share`; None when its process is gone or hidden from this one."""
    process, descriptor, token = address.split(" ")
    try:
        with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
            page = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    return page if _HEAD.unpack_from(page)[4].hex() == token else None  # containers number their processes alike


def describe(page: bytes | mmap.mmap) -> tuple[str, int]:
    """A place in words ("'all_reduce w' #7, 3.1 s ago") and its state."""
    number, since, state, length, _ = _HEAD.unpack_from(page)
    label = bytes(page[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
    return f"'{label}' #{number}, {max(0.0, time.time() - since):.1f} s ago", state


@cache
def boot() -> str:
    """What tells this machine since its last start from all others; empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
