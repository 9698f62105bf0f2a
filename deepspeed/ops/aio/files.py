"""Open file with two descriptors: for direct I/O of aligned blocks, and through the page cache for other bytes."""

from __future__ import annotations

import os
import tempfile

from deepspeed.foundation.log import warn_once

ALIGNMENT = 4096  # alignment of addresses, offsets and lengths for direct I/O on all common file systems, in bytes


class BlockFile:
    """Open file with two descriptors.

    Attributes:
        name: name in error messages.
        plain: descriptor with page cache.
        direct: descriptor without page cache (direct I/O); -1 if the file system does not support it.
    """

    def __init__(self, name: str, plain: int, direct: int) -> None:
        self.name = name
        self.plain = plain
        self.direct = direct

    @classmethod
    def open(cls, path: str, flags: int) -> BlockFile:
        """Open a file with flags of `os.open`; OSError if this fails."""
        return cls(path, os.open(path, flags, 0o666), cls._open_direct(path, flags & ~os.O_CREAT, path))

    @classmethod
    def unnamed(cls, folder: str) -> BlockFile:
        """Create an unnamed file in `folder`; the system frees it when this process ends, even after a crash."""
        with tempfile.TemporaryFile(dir=folder, prefix="deepspeed-", buffering=0) as temporary:
            plain = os.dup(temporary.fileno())
        name = f"{os.path.join(folder, '')}#{os.fstat(plain).st_ino} (unnamed, /proc/{os.getpid()}/fd/{plain})"
        return cls(name, plain, cls._open_direct(f"/proc/self/fd/{plain}", os.O_RDWR, folder))

    def size(self) -> int:
        """Return the current size of the file in bytes."""
        return os.fstat(self.plain).st_size

    def free(self) -> int:
        """Return the bytes of the file system that are free for this user."""
        state = os.fstatvfs(self.plain)
        return state.f_bavail * state.f_frsize

    def disk_state(self) -> str:
        """Describe the free space of the disk in a sentence, for errors."""
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
        except (AttributeError, OSError) as error:  # the system or file system does not support the flag
            folder = where if os.path.isdir(where) else os.path.dirname(where) or "."
            warn_once(
                f"no direct I/O in '{folder}' ({error}): files there go through the page cache", ("direct", folder)
            )
            return -1


def size_text(nbytes: int) -> str:
    """Format a number of bytes, such as "1.5 GB" or "1.5 MB" (powers of 1000), or "10 bytes"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.1f} {unit}"
    return f"{nbytes} bytes"
