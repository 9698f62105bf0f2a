"""Where the output of each rank is kept: a folder per attempt, never one that somebody else could have made."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

KEPT_JOBS = 10
"""Folders of earlier jobs that stay where no folder was named."""


def attempt_folder(named: str, job: str, attempt: str) -> Path | None:
    """The folder of this attempt's logs.

    Args:
        named: the folder the user asked for; empty takes one of this user in the temporary folder.
        job: identifier of the job.
        attempt: its number, from 0.

    Returns:
        The folder, or None where nothing can be written: that is no reason not to train.
    """
    if named:
        folder = Path(named) / f"attempt{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    parent = Path(tempfile.gettempdir(), f"deepspeed-{os.getuid()}")
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        if parent.is_symlink() or parent.stat().st_uid != os.getuid():
            parent = Path(tempfile.mkdtemp(prefix="deepspeed-"))
        folder = parent / job / f"attempt{attempt}"
        if not folder.parent.exists():
            _prune(parent)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def jobs() -> list[Path]:
    """The folders of this user's jobs where no folder was named, the last one first."""
    parent = Path(tempfile.gettempdir(), f"deepspeed-{os.getuid()}")
    with contextlib.suppress(OSError):
        if not parent.is_symlink() and parent.stat().st_uid == os.getuid():
            return _by_age(parent)
    return []


def _by_age(parent: Path) -> list[Path]:
    return sorted(parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)


def _prune(parent: Path) -> None:
    """Remove the folders of old jobs, those that are being written excepted."""
    with contextlib.suppress(OSError):
        for old in _by_age(parent)[KEPT_JOBS - 1 :]:
            shutil.rmtree(old, ignore_errors=True)
