"""Page-aligned host memory, which direct I/O and the device can use without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.log import warn_once


class _Pages(mmap.mmap):
    """Anonymous memory of this process; what locked its pages is undone before they go."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def aligned_bytes(nbytes: int, *, pin: bool = False) -> torch.Tensor:
    """A new zeroed uint8 tensor of `nbytes` bytes that begins on a page.

    torch's own pinned memory comes in powers of two; this takes whole pages, no more.

    Args:
        nbytes: at least 1.
        pin: lock the pages where there is a device; where the system refuses, one line says so and they stay pageable.
    """
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # not on this system, or not in this kernel
        # The kernel looks up every page of a direct request: with 4 KiB pages that alone halves a fast disk's speed.
        pages.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    if pin:
        try:
            pages.unlock = get_accelerator().lock_pages(tensor)
        except RuntimeError as error:
            warn_once(f"host memory stays pageable, copies to the device wait: {error}", "pageable")
    return tensor
