"""Asynchronous save: copies the state into one pooled host buffer, a thread writes it."""

from __future__ import annotations

import atexit
import itertools
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from deepspeed import comm
from deepspeed.checkpoint.format.safetensors_file import TensorToWrite
from deepspeed.checkpoint.ranks import Ranks
from deepspeed.checkpoint.save.save import Saving
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import CheckpointError
from deepspeed.foundation.log import log_rank0, logger

_ALIGN = 64


class Background:
    """At most one save under way; the buffer is kept for the next one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._group: Any = None
        self._left = False

    def ranks(self, axis: Axis) -> Ranks:
        """The ranks of `axis`, over a process group of their own: training uses the other one meanwhile."""
        if self._group is None and axis.size > 1:
            self._group = comm.new_group(list(axis.ranks), backend="gloo")
        return Ranks(axis, self._group)

    def start(self, saving: Saving, ranks: Ranks, finish: Callable[[], None]) -> None:
        """Copy what is to be written and return; a thread writes it and calls `finish`.

        Args:
            saving: a save that has begun.
            ranks: to be used by the thread.
            finish: what follows the writing.
        """
        saving.entries = self._copied(saving.entries)
        saving.copy_small()
        saving.ranks = ranks
        self._thread = threading.Thread(target=self._run, args=(saving, finish), name="deepspeed-save", daemon=True)
        if not self._left:
            self._left = True
            atexit.register(_at_exit, weakref.ref(self))
        self._thread.start()

    def _copied(self, entries: list[TensorToWrite]) -> list[TensorToWrite]:
        places, size = [], 0
        for entry in entries:
            places.append(size)
            size += -(-entry.nbytes // _ALIGN) * _ALIGN
        if self._buffer.numel() < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
            log_rank0(
                f"async_save: a host buffer of {size / 2**20:.0f} MiB on each rank holds the state while it is written"
            )
        copies = []
        numbered = zip(entries, places, strict=True)
        for hold, together in itertools.groupby(numbered, lambda pair: pair[0].hold):
            with hold() if hold is not None else nullcontext():
                for entry, position in together:
                    copy = self._buffer[position : position + entry.nbytes].view(entry.dtype)
                    copy.copy_(entry.values().detach().reshape(-1))
                    copies.append(replace(entry, values=lambda copy=copy: copy, hold=None))
        return copies

    def _run(self, saving: Saving, finish: Callable[[], None]) -> None:
        try:
            saving.place()
            saving.write()
            finish()
        except Exception as error:  # raised by the next save, load or the end
            self._failure = error

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: it failed; the checkpoints before it are as they were.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the last checkpoint was not saved: {failure}") from failure


def _at_exit(reference: Any) -> None:
    background = reference()
    if background is not None:
        try:
            background.wait()
        except CheckpointError as error:
            logger.error("%s", error)
