"""File operations of checkpoints; tests replace `current` to make an operation fail."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from deepspeed.errors import CheckpointError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"

# A tag is a plain folder name, and never one of the hidden names of an unfinished save.
_TAG = re.compile(r"[^/\\\x00-\x1f]{1,200}")
_STAGING, _REPLACED = ".saving", ".replaced"

# Linux only; elsewhere the disk starts when the file is synced.
_START_WRITING = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "sync_file_range", None)
if _START_WRITING is not None:
    _START_WRITING.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_WRITE = 2


class FileSystem:
    """File operations of a save; tests replace the object `current`."""

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents; an existing folder is kept."""
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """Create an empty file for writing, or empty an existing one; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)

    def write(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data` at byte `offset`. On Linux, writing to disk starts at once, so that `sync` is short."""
        first = offset
        while len(data):
            done = os.pwrite(fd, data, offset)
            data, offset = data[done:], offset + done
        if _START_WRITING is not None:
            _START_WRITING(fd, first, offset - first, _SYNC_FILE_RANGE_WRITE)  # only a hint: its result is ignored

    def sync(self, fd: int) -> None:
        """Wait until the contents of the file are on disk (fsync)."""
        os.fsync(fd)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on disk (fsync of the folder)."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically; an existing file `new` is replaced."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a folder with its contents, or a file if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """Return the free bytes of the file system that contains `path`."""
        return shutil.disk_usage(path).free


# Tests put a file system that fails here.
current = FileSystem()


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Context with the descriptor of an empty file, which is closed on exit and, without an error, synced to disk."""
    fd = current.create(path)
    try:
        yield fd
        current.sync(fd)
    finally:
        os.close(fd)


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Write small files, given their contents by path, and sync them to disk; scripts (`#!`) become executable."""
    with ExitStack() as stack:
        for path, data in contents.items():
            fd = stack.enter_context(created(path))
            current.write(fd, memoryview(data), 0)
            os.fchmod(fd, 0o755 if data.startswith(b"#!") else 0o644)


def checked_tag(tag: object) -> str:
    """Return the tag as text; CheckpointError if the text is no plain, visible folder name or names a `latest` file."""
    text = str(tag)
    if not _TAG.fullmatch(text) or text.startswith(".") or text in (LATEST, LATEST_UNIVERSAL):
        raise CheckpointError(
            f"checkpoint tag {text!r} cannot be used: a tag is one folder name without '/', not beginning with '.', "
            f"and not '{LATEST}'"
        )
    return text


def staging_of(folder: Path, tag: str) -> Path:
    """Return the hidden staging folder into which a save writes; `publish` renames it to the tag."""
    return folder / f".{tag}{_STAGING}"


def replaced_of(folder: Path, tag: str) -> Path:
    """Return the hidden folder to which `publish` renames an earlier checkpoint of the same tag before its removal."""
    return folder / f".{tag}{_REPLACED}"


def tag_under_way(name: str) -> str | None:
    """Return the tag of a hidden folder's name (`staging_of` or `replaced_of`); None for other names."""
    for suffix in (_STAGING, _REPLACED):
        if name.startswith(".") and name.endswith(suffix):
            return name[1 : -len(suffix)]
    return None


def publish(folder: Path, tag: str, small_files: Mapping[str, bytes]) -> None:
    """Rename a complete staging folder to its tag, and remove an earlier checkpoint of this tag.

    Args:
        folder: folder that contains the tags.
        tag: name of the tag.
        small_files: contents of small files in `folder`, such as `latest`, by name; each file is replaced atomically
            after the rename.
    """
    final, old = folder / tag, replaced_of(folder, tag)
    hidden = {name: folder / f".{name}{_STAGING}" for name in small_files}
    write_files({hidden[name]: data for name, data in small_files.items()})
    if old.exists():
        current.remove(old)
    if final.exists():
        current.rename(final, old)
    current.rename(staging_of(folder, tag), final)
    for name, path in hidden.items():
        current.rename(path, folder / name)
    current.sync_folder(folder)
    if old.exists():
        current.remove(old)
