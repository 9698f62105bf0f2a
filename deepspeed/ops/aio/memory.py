"""Page-aligned host memory for direct I/O and device copies without an intermediate copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.log import warn_once


class _Pages(mmap.mmap):
    """Anonymous memory mapping; locked pages are unlocked before it is freed."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def aligned_bytes(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """Return a zeroed uint8 tensor (nbytes,) that is aligned to a page.

    torch rounds the size of pinned memory up to a power of two, this function only to whole pages.

    Args:
        nbytes: number of bytes, at least 1.
        pin: whether the pages are locked if there is a device; if this fails, a warning is logged once.
    """
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # unsupported by the system or kernel
        # The kernel looks up every page of a direct request: with 4 KiB pages that alone halves a fast disk's speed.
        pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if pin:
        try:
            pages.unlock = get_accelerator().lock_pages(tensor)
        except RuntimeError as error:
            warn_once(f"host memory stays pageable, copies to the device wait: {error}", "pageable")
    return tensor
