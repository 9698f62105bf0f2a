"""Records of this rank's last collective, its main thread's position and its pending device work, for reports."""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator

OUTSIDE, INSIDE, LEFT = range(3)

_SIZE = 1024  # bytes of a page; longer labels are cut
_HEAD = struct.Struct("=QdBH16s")  # number of the collective, wall-clock second it began, state, label's length, token
_STATE_AT = struct.calcsize("=Qd")


class LastCollectivePage:
    """Memory page with this process's last collective. One `write` takes less than two microseconds."""

    def __init__(self) -> None:
        self.number = 0
        self._token = secrets.token_bytes(16)
        self._descriptor = -1
        self._page: mmap.mmap | bytearray = bytearray(_SIZE)
        self.write("start", OUTSIDE)

    def write(self, label: str, state: int) -> None:
        """Write the label of a collective and the state (`INSIDE` or another one), with the current time."""
        text = label.encode()[: _SIZE - _HEAD.size]  # stored only in the page, since several threads write
        _HEAD.pack_into(self._page, 0, self.number, time.time(), state, len(text), self._token)
        self._page[_HEAD.size : _HEAD.size + len(text)] = text

    def turn(self, state: int) -> None:
        """Change only the state (`INSIDE`, `OUTSIDE` or `LEFT`); the label stays that of the last collective."""
        self._page[_STATE_AT] = state

    @property
    def inside(self) -> bool:
        return self._page[_STATE_AT] == INSIDE

    @property
    def label(self) -> str:
        return bytes(self.snapshot()[_HEAD.size :]).decode(errors="replace")

    def snapshot(self) -> bytes:
        return bytes(self._page[: _HEAD.size + _HEAD.unpack_from(self._page)[3]])

    def share(self) -> str:
        """Move the page to shared memory; returns its address for ranks on this machine, or "" if impossible."""
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
        """Move the page back to this process's own memory; readers keep the last content."""
        if self._descriptor >= 0:
            self._page = bytearray(self._page[:])
            os.close(self._descriptor)
            self._descriptor = -1

    @staticmethod
    def map(address: str) -> mmap.mmap | None:
        """Map the page of another process, whose `share` returned the address; None if it has ended or is hidden."""
        process, descriptor, token = address.split(" ")
        try:
            with open(f"/proc/{process}/fd/{descriptor}", "rb") as file:
                page = mmap.mmap(file.fileno(), _SIZE, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        return page if _HEAD.unpack_from(page)[4].hex() == token else None  # containers can use the same process ids


def describe(page: bytes | mmap.mmap) -> tuple[str, int]:
    """Describe a page ("'all_reduce w' #7, 3.1 s ago"); returns the text and the state."""
    number, since, state, length, _ = _HEAD.unpack_from(page)
    label = bytes(page[_HEAD.size : _HEAD.size + length]).decode(errors="replace")
    return f"'{label}' #{number}, {max(0.0, time.time() - since):.1f} s ago", state


def place(page: bytes | mmap.mmap) -> tuple[int, int, str]:
    """Return number, state and label of a rank's last collective from its page."""
    number, _, state, length, _ = _HEAD.unpack_from(page)
    return number, state, bytes(page[_HEAD.size : _HEAD.size + length]).decode(errors="replace")


def runs(process: int) -> bool:
    """Return whether a process of this machine is running, by its id; zombies are not. False without /proc."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1] not in ("Z", "X")
    return False


@cache
def boot() -> str:
    """Return an identifier of this machine since its last boot; "" if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent, Path(os.__file__).parent)
)


def backend_settings() -> str:
    """Return one line with the environment variables that configure NCCL or gloo; "" if none is set."""
    names = sorted(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "TP_SOCKET_")))
    return ", ".join(f"{name}={os.environ[name]}" for name in names)


def whereabouts() -> str:
    """Describe the host, the main thread's innermost line of the user's code, and the oldest pending device message."""
    late = underway.oldest()
    frame = users_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    place = "" if frame is None else f", {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return f"{socket.gethostname()}{place}" + (f", the device waits for '{late[0]}'" if late is not None else "")


@cache
def is_users(path: str) -> bool:
    """Return whether a file is the user's code, not that of this package, torch, Python or an installed package."""
    return not path.startswith((*_LIBRARIES, "<frozen")) and "site-packages" not in path


def users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


_MOST = 4096  # maximum number of entries: without the watchdog's thread nothing removes them


class PendingDeviceWork:
    """Queue of the messages that this process's device streams wait for, oldest first.

    Threads that communicate add messages; `oldest` removes finished messages.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[str, Any, float]] = deque(maxlen=_MOST)
        self._spent: deque[Any] = deque(maxlen=_MOST)  # events for reuse: creating one takes longer than recording

    def add(self, label: str, tensor: torch.Tensor) -> None:
        """Add a message that the current stream has just started to wait for; ignored if `tensor` is on the host."""
        if tensor.device.type in ("cpu", "meta"):
            return
        try:
            event = self._spent.pop()
        except IndexError:
            event = get_accelerator().Event()
        event.record()
        self._entries.append((label, event, time.monotonic()))

    def oldest(self) -> tuple[str, float] | None:
        """Return (label, age in seconds) of the oldest unfinished message; None without one or after a device error."""
        while self._entries:
            label, event, since = self._entries[0]
            try:
                over = event.query()
            except RuntimeError:  # the device has failed; its next use raises the error
                return None
            if not over:
                return label, time.monotonic() - since
            with suppress(IndexError):  # the full queue has dropped it meanwhile
                self._entries.popleft()
            self._spent.append(event)
        return None


underway = PendingDeviceWork()
