"""Asynchronous scheduling: a pass of next tokens is launched before the tokens of the pass in front of it are read.

The device chooses these tokens and hands them to the next pass itself, so it does not wait while the host reads them,
writes outputs and plans. A request that ends by an end token or a stop string is only known to have ended one pass
later; the row that it has in the pass ahead is then ignored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.log import describe_error, warn_once
from deepspeed.inference.device_sampling import launch_pass, read_tokens
from deepspeed.inference.executors.ragged_batch import BatchSlice, ChosenTokens, RaggedBatch
from deepspeed.inference.scheduler import Scheduler


@dataclass
class LaunchedPass:
    """A pass that the device may still run.

    Args:
        slices: its rows.
        batch: its batch, with hidden states if they are requested.
        logits: requested logits, [rows, vocabulary]; they are valid until the next launch.
    """

    slices: Sequence[BatchSlice]
    batch: RaggedBatch
    logits: torch.Tensor

    @property
    def chosen(self) -> ChosenTokens | None:
        """The tokens, if every slice gets one, and all are chosen on the device by logits alone; else None."""
        sampling = self.batch.sampling
        if sampling is None or sampling.seen is not None:
            return None
        plain = all(rows.wanted == 1 and rows.adapter is None for rows in self.slices)
        return sampling.chosen if plain and all(sampling.on_device) else None

    def read(self) -> list[int]:
        """Wait for the tokens of the pass; a token for each row with logits, as `device_sampling.read_tokens`."""
        return read_tokens(self.batch, self.logits)


class PassAhead:
    """Launches passes ahead of their tokens, at most one at a time.

    Such a pass may still run when a step ends. An event behind it orders what comes later on other streams.

    Args:
        scheduler: scheduler of the sequences.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._launched: LaunchedPass | None = None
        self._end: Any = None  # event behind the last launch; None: on a CPU, or nothing was launched

    def take(self) -> LaunchedPass | None:
        """Return the pass that was launched ahead, which the caller reads; None if there is none of use any more.

        The current stream waits for it, on whichever stream it was launched.
        """
        if self._end is not None:
            get_accelerator().current_stream().wait_event(self._end)
        launched, self._launched = self._launched, None
        return launched if launched is not None and any(map(holds, launched.slices)) else None

    def launch(self, executor: Any, current: LaunchedPass) -> None:
        """Launch the pass behind `current`, which is not read yet, if nothing but its tokens is missing.

        The executor's own logits of `current` are overwritten. If the launch fails, a warning says so; `current` is not
        concerned, and the next step plans its pass anew.
        """
        chosen = current.chosen
        if chosen is None:
            return
        held = [(row, rows) for row, rows in enumerate(current.slices) if holds(rows)]
        going = [(row, rows) for row, rows in held if _goes_on(rows.sequence)]
        slices = self._scheduler.plan_behind([rows for _, rows in going], len(held))
        if not slices:
            return
        after = chosen, [row for row, _ in going]
        try:
            self._launched = LaunchedPass(slices, *launch_pass(executor, slices, self._scheduler.pool.size, after))
        except Exception as error:  # such as memory that two passes need at once
            warn_once(f"a pass was not launched before the tokens in front of it were read: {describe_error(error)}")
        finally:
            if chosen.on_device.device.type != "cpu":
                self._end = get_accelerator().Event()
                self._end.record()

    def drop(self) -> None:
        """Forget the pass that was launched ahead, after the device has ended it."""
        self._launched, (end, self._end) = None, (self._end, None)
        if end is not None:
            end.synchronize()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at the interpreter's end
            self.drop()


def holds(rows: BatchSlice) -> bool:
    """Whether the sequence of these rows is still where they begin: neither ended nor begun anew."""
    return rows.sequence.reason is None and rows.sequence.computed == rows.start


def _goes_on(sequence: Any) -> bool:
    """Whether a sequence may have a token behind its next one."""
    return sequence.sampler.count + 1 < sequence.sampling.max_new_tokens
