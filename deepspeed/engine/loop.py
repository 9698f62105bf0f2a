"""Iteration in equal steps: all ranks make the same number of steps however long their loaders are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from deepspeed.errors import DataError
from deepspeed.foundation.recorder import LOADER, recorder
from deepspeed.foundation.tree import leaves_in
from deepspeed.optim.construct import nearest

POLICIES = ("drop", "pad", "cycle")
# What a rank tells the others of its next batch: its loader failed, has just ended, had ended before, has a batch; or
# that it needs none, and goes along with the others.
FAILED, ENDING, ENDED, READY = range(4)
ALONG = -1
Agree = Callable[[int], tuple[int, int]]


def count_samples(batch: Any) -> int:
    """The size of the first dim of the first tensor or numpy array in a nest.

    Args:
        batch: what a loader gave.

    Returns:
        The number of samples; 1 when there is none of them or it has no dims.
    """
    found = next(leaves_in(batch, (torch.Tensor, np.ndarray)), None)
    return int(found.shape[0]) if found is not None and len(found.shape) else 1


class _Reader:
    """One rank's loader, read one batch at a time so that its failures can be told to the others."""

    def __init__(self, loader: Iterable[Any], agree: Agree) -> None:
        self.loader = loader
        self.agree = agree
        self.batches: Iterator[Any] | None = None
        self.batch: Any = None
        self.steps = 0
        self.ended = False
        self.problem: Exception | None = None

    def advance(self, *, cycle: bool) -> int:
        """Read the next batch, from a further pass too when `cycle`; what to tell the others."""
        if self.ended:
            return self.cycle() if cycle else ENDED
        if self._read():
            return READY
        self.ended = self.problem is None
        return ENDING if self.ended else FAILED

    def cycle(self) -> int:
        """Read the next batch of a further pass; what to tell the others."""
        for _ in range(2):  # the second try starts the loader again
            if self.problem is None and self._read():
                return ENDED
        self.problem = self.problem or DataError(
            f"policy 'cycle': {type(self.loader).__name__} gives no batch when started again; it is an iterator or "
            "generator that can be read once (pass the object that makes it, or use policy 'pad')"
        )
        return FAILED

    def _read(self) -> bool:
        try:
            if self.batches is None:
                self.batches = iter(self.loader)
            with recorder.span(LOADER, "next batch"):
                self.batch = next(self.batches)
            return True
        except StopIteration:
            self.batches = None
        except Exception as problem:  # raised in tell(), once every rank knows
            self.problem = problem
        return False

    def tell(self, flag: int) -> tuple[int, int]:
        """The least and the greatest flag of all ranks; all raise when one has failed."""
        low, high = self.agree(flag)
        if self.problem is not None:
            raise self.problem
        if low == FAILED:
            raise DataError(
                f"the data loader of another rank failed at batch {self.steps}; the traceback of that rank says why"
            )
        return low, high


class _Companion(_Reader):
    """A rank that needs no data: a stage in the middle of layers in a row."""

    def __init__(self, agree: Agree) -> None:
        super().__init__((), agree)

    def advance(self, *, cycle: bool) -> int:
        """Nothing to read."""
        return ALONG

    def cycle(self) -> int:
        """Nothing to read."""
        return ALONG


def equal_steps(
    loader: Iterable[Any] | None, *, agree: Agree, policy: str, weigh: Callable[[float], None]
) -> Iterator[Any]:
    """Yield batches so that every rank makes as many steps.

    Each step costs one exchange of a small number, so that a loader that ends or fails on one rank ends the loop on
    all of them instead of leaving them in a collective.

    Args:
        loader: this rank's loader; None: it needs no data, and gets None as often as the others get a batch.
        agree: gives the least and the greatest of all ranks' flags but `ALONG`; a collective.
        policy: "drop" ends with the shortest loader; "pad" ends with the longest, the others repeat their last
            batch with weight 0; "cycle" ends with the longest, the others start again.
        weigh: told the number of samples of the batch that follows, 0 for a padded one.

    Yields:
        The batches.

    Raises:
        DataError: an unknown policy, a loader without any batch, or a loader that failed on another rank.
    """
    if policy not in POLICIES:
        raise DataError(f"policy {policy!r} is unknown{nearest(policy, POLICIES)}; use one of {', '.join(POLICIES)}")
    reader = _Companion(agree) if loader is None else _Reader(loader, agree)
    while True:
        low, high = reader.tell(reader.advance(cycle=policy == "cycle"))
        if reader.steps == 0 and low == ENDING:
            whose = "this" if reader.ended else "another"
            raise DataError(f"the data loader of {whose} rank gives no batch at all; every rank needs data")
        if high <= ENDED or (policy == "drop" and low <= ENDED):
            return
        if policy == "cycle" and low == ENDING:
            # Some rank has to start again, and may fail; the others hear of it before they step.
            reader.tell(reader.cycle() if reader.batches is None else READY)
        reader.steps += 1
        weigh(0.0 if reader.ended and policy == "pad" else float(count_samples(reader.batch)))
        yield reader.batch
