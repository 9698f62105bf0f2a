"""Where this process's main thread is, in the user's words: host, file and line."""

from __future__ import annotations

import os
import socket
import sys
import threading
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_LIBRARIES = tuple(
    f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, Path(os.__file__).parent)
)


def backend_settings() -> str:
    """The variables of this process's environment that change how NCCL or gloo work, in one line; "" without any."""
    found = sorted(name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_", "GLOO_", "TP_SOCKET_")))
    return ", ".join(f"{name}={os.environ[name]}" for name in found)


def whereabouts() -> str:
    """`host, file:line` of the innermost frame of the main thread that is the user's; taken by another thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    own = _own(frame)
    place = "" if own is None else f", {own.f_code.co_filename}:{own.f_lineno} in {own.f_code.co_name}"
    return f"{socket.gethostname()}{place}"


@cache
def is_users(path: str) -> bool:
    """Whether the code in a file is the user's: not of this package, of torch, of Python or of another package."""
    return not path.startswith((*_LIBRARIES, "<frozen")) and "site-packages" not in path


def _own(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None
