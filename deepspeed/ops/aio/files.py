"""One file with two descriptors: a direct one for aligned pieces, and one through the page cache for the rest."""

from __future__ import annotations

import os
import tempfile

from deepspeed.foundation.log import warn_once

ALIGNMENT = 4096  # bytes; what direct I/O asks of addresses, offsets and lengths on every common file system


class BlockFile:
    """An open file.

    Attributes:
        name: what messages call it.
        plain: a descriptor that goes through the page cache.
        direct: a descriptor that goes past it; -1 where the file system has no direct I/O.
    """

    def __init__(self, name: str, plain: int, direct: int) -> None:
        self.name = name
        self.plain = plain
        self.direct = direct

    @classmethod
    def open(cls, path: str, flags: int) -> BlockFile:
        """Open a file of the user's with the given flags of `os.open`."""
        return cls(path, os.open(path, flags, 0o666), cls._open_direct(path, flags & ~os.O_CREAT, path))

    @classmethod
    def unnamed(cls, folder: str) -> BlockFile:
        """Make a file in `folder` that has no name: the system frees it when this process ends, however it ends."""
        with tempfile.TemporaryFile(dir=folder, prefix="deepspeed-", buffering=0) as temporary:
            plain = os.dup(temporary.fileno())
        name = f"{os.path.join(folder, '')}#{os.fstat(plain).st_ino} (unnamed, /proc/{os.getpid()}/fd/{plain})"
        return cls(name, plain, cls._open_direct(f"/proc/self/fd/{plain}", os.O_RDWR, folder))

    def size(self) -> int:
        """Bytes the file holds now."""
        return os.fstat(self.plain).st_size

    def free(self) -> int:
        """Bytes its file system can still give to this user."""
        state = os.fstatvfs(self.plain)
        return state.f_bavail * state.f_frsize

    def disk_state(self) -> str:
        """How full the disk is, as a sentence for an error."""
        return f"Its disk has {size_text(self.free())} free"

    def close(self) -> None:
        for descriptor in (self.plain, self.direct):
            if descriptor >= 0:
                os.close(descriptor)
        self.plain = self.direct = -1

    @staticmethod
    def _open_direct(path: str, flags: int, where: str) -> int:
        try:
            return os.open(path, flags | os.O_DIRECT)
        except (AttributeError, OSError) as error:  # no such flag on this system, or not on this file system
            folder = where if os.path.isdir(where) else os.path.dirname(where) or "."
            warn_once(
                f"no direct I/O in '{folder}' ({error}): files there go through the page cache", ("direct", folder)
            )
            return -1


def size_text(nbytes: int) -> str:
    """Bytes in the unit a reader expects."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.1f} {unit}"
    return f"{nbytes} bytes"
