"""Errors that are raised on all ranks: failed functions, different collectives, different batches.

Without this, the other ranks would wait in the next collective until the watchdog's timeout. In `run_collectively`,
each collective of `deepspeed/comm/collectives/autograd.py`, and each collective gather of sharded parameters, begins
with a check-in: every rank reports the collective that it has reached, its end or its error. If the reports differ, the
collective does not start. So ranks that run different code are detected too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.collectives.torch_api import all_gather_into_tensor, all_gather_objects
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.comm.watchdog import watchdog
from deepspeed.errors import CommError, DataError, DeepSpeedError, OrderError
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import describe_error

T = TypeVar("T")
_END_LABEL = "the end"
_MAX_ERROR_CHARS = 200  # characters of an error


class _Apart(Exception):
    """Signal that the ranks reached different collectives; `CollectiveRun.texts` has their reports."""


@dataclass
class Outcome(Generic[T]):
    """Result of a computation on all ranks.

    Args:
        result: this rank's result; None if any rank failed.
        texts: by position on the axis, the rank's error, or the collective it reached if the ranks diverged; all empty
            if no rank failed.
        error: exception of this rank's computation, or None.
    """

    result: T | None
    texts: list[str]
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        return not any(self.texts)

    def result_or_raise(self, wrong: Callable[[list[str]], Exception]) -> T:
        """Return this rank's result; if any rank failed, raise `wrong(texts)` on every rank."""
        if self.ok:
            return self.result  # type: ignore[return-value]
        raise wrong(self.texts) from self.error


class CollectiveRun:
    """One call of `run_collectively` on this rank."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.texts = axis, [""] * axis.size
        self.ranks = frozenset(axis.ranks)

    def meet(self, label: str, error: str = "") -> None:
        """Check that all ranks have reached the collective `label`, or the end, without error; raises _Apart if not."""
        if any(self.texts):
            raise _Apart
        axis = self.axis
        if axis.group is None:
            self.texts[axis.rank] = error
            return
        device = "cpu" if axis.tagged else get_accelerator().current_device_name()
        here = torch.tensor([int(bool(error)), zlib.crc32(label.encode())], device=device)
        every = here.new_empty(axis.size * 2)
        all_gather_into_tensor(every, here, group=axis.group, log_name=f"meeting before {label}")
        if bool((every.view(-1, 2) == torch.tensor([0, int(here[1])], device=device)).all()):
            return
        reports = all_gather_objects(axis, (error, label))
        raised = any(text for text, _ in reports)
        self.texts = [text if raised else f"it has come to {place}" for text, place in reports]
        raise _Apart


runs: Replaceable[type[CollectiveRun]] = Replaceable(CollectiveRun)
_underway: list[CollectiveRun] = []


def meet_before(axis: Axis, label: str) -> None:
    """Check in before a collective of `axis`; does nothing outside of a `run_collectively` over its ranks."""
    if _underway and _underway[-1].ranks.issuperset(axis.ranks):
        _underway[-1].meet(label)


def run_collectively(axis: Axis, action: Callable[[], T]) -> Outcome[T]:
    """Call `action` on all ranks of an axis; an error on one rank ends the call on all ranks at the next collective.

    Args:
        action: function whose collectives over `axis`, or over subsets of its ranks, are those of `autograd` and
            gathers of sharded parameters, in the same order on all ranks.

    Returns:
        The outcome, which has the errors of all ranks.

    Raises:
        CommError: the ranks cannot communicate, for example because a process has ended.
    """
    run, result, error = runs.current(axis), None, None
    _underway.append(run)
    try:
        try:
            result = action()
        except (_Apart, CommError):
            raise
        except Exception as why:
            error = why
        run.meet(_END_LABEL, "" if error is None else describe_error(error, _MAX_ERROR_CHARS))
    except _Apart:
        result = None
    finally:
        _underway.pop()
    return Outcome(result, run.texts, error)


comparison: Replaceable[Callable[[Callable[[], str]], str]] = Replaceable(lambda differences: differences())
"""Calls a function that compares values and returns a description of the differences; simulations skip the call."""


def raise_together(axis: Axis, action: Callable[[], T], elsewhere: Callable[[int, str], Exception]) -> T:
    """Call `action` and return its result; if one rank fails, all ranks raise. All ranks must call this.

    A rank that failed raises its own error; the others raise `elsewhere(first failed global rank, error text)`.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except CommError:
        raise
    except Exception as why:
        error = why
    error_text = (
        "" if error is None else (isinstance(error, DeepSpeedError) and str(error)) or describe_error(error, 300)
    )
    texts = all_gather_objects(axis, error_text)
    if error is not None:
        raise error
    other = next((pair for pair in zip(axis.ranks, texts, strict=True) if pair[1]), None)
    if other is not None:
        raise elsewhere(*other)
    return result


@contextlib.contextmanager
def alarmed(label: Callable[[], str], alike: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Report an error in the block to all ranks through the watchdog, for computations without check-ins.

    After such an error, the ranks cannot communicate any more. Inside of `run_collectively` nothing is reported here,
    since `run_collectively` does it.

    Args:
        label: returns the name of the computation for the report.
        alike: types of errors that all ranks raise together, which need no report.
    """
    try:
        yield
    except (CommError, _Apart, *alike):
        raise
    except Exception as error:
        if not _underway:
            watchdog.failed(label(), error)
        raise


_CHANNEL = (1 << 17) - 1  # the last one; `Axis.channel` counts from the first
_BYTES = 512  # of a message: a digest, then as much of the text as fits
_DIGEST = 8


class OrderCheck:
    """Check that the ranks of an axis are about to make the same call, by messages of its host backend (gloo)."""

    def __init__(self, axis: Axis) -> None:
        self.axis = Axis(axis.name, axis.ranks, axis.rank, axis.group, tagged=True)
        self._numbers = itertools.count()
        self.compared = 0  # so far

    @staticmethod
    def possible(axis: Axis) -> bool:
        """Return whether an axis needs the check (several ranks, no tags) and has a host backend for it."""
        return axis.size > 1 and not axis.tagged and axis.has_host_backend

    def compare(self, what: str) -> None:
        """Raise OrderError on all ranks unless `what` (the next call) is equal on all. All ranks must call this."""
        self.compared += 1
        axis, words = self.axis, what.encode()
        own = hashlib.blake2b(words, digest_size=_DIGEST).digest() + words[: _BYTES - _DIGEST]
        tag, label = tag_of(_CHANNEL, SMALL, next(self._numbers)), f"comparison before {what}"
        rows = scalars.current.rows(axis, own.ljust(_BYTES, bytes(1)), tag, label, torch.device("cpu"))
        if len(set(rows)) > 1:
            raise OrderError(self._difference(axis, rows))

    @staticmethod
    def _difference(axis: Axis, rows: list[bytes]) -> str:
        by_words: dict[bytes, list[str]] = {}
        for rank, row in zip(axis.ranks, rows, strict=True):
            by_words.setdefault(row, []).append(str(rank))
        diffs = "; ".join(
            f"rank {', '.join(ranks)}: {row[_DIGEST:].rstrip(bytes(1)).decode(errors='replace')}"
            for row, ranks in by_words.items()
        )
        return (
            "ranks are about to do different things where all must do the same, because the device's messages carry "
            f"no names: {diffs}. Let every rank use the same modules in the same order (a module that a rank does not "
            "need can run on zeros); on stages 0 to 2 ranks may differ"
        )


COMPARED = 10  # micro-batches


class BatchCheck:
    """Comparison of the first `COMPARED` micro-batches of ranks that must receive the same samples.

    Args:
        axis: these ranks.
        share: verb phrase for the error message, with the common property of these ranks.
    """

    def __init__(self, axis: Axis, share: str = "share the model's matrices (tp)") -> None:
        self._axis, self._share, self.left = axis, share, COMPARED if axis.size > 1 else 0

    def compare(self, inputs: Any, in_parts: bool = False) -> None:
        """Compare one micro-batch; raises DataError on all ranks if batches differ. All ranks must call this.

        Args:
            in_parts: compare each entry of the batch by itself; None, for an entry or the whole batch, matches all.
        """
        self.left -= 1
        everyone = all_gather_objects(self._axis, self._digests(inputs) if in_parts else {"": digest(inputs)})
        first: dict[str, tuple[int, int]] = {}  # by entry: the first rank that has it, and its digest
        for rank, digests in zip(self._axis.ranks, everyone, strict=True):
            for entry, digest_of_entry in digests.items():
                other, wanted = first.setdefault(entry, (rank, digest_of_entry))
                if digest_of_entry == wanted:
                    continue
                raise DataError(
                    f"ranks {other} and {rank} {self._share} and were given different batches"
                    f"{f' ({entry})' if entry else ''} in micro-batch {COMPARED - self.left}: a loader deals samples "
                    f"to data-parallel ranks, so give it engine.get_data_parallel_rank() of engine.dp_world_size, or "
                    f"pass training_data to initialize"
                )

    @staticmethod
    def _digests(inputs: Any) -> dict[str, int]:
        """Return a digest for each entry of a batch that is not None."""
        entries = (
            inputs.items()
            if isinstance(inputs, dict)
            else enumerate(inputs)
            if isinstance(inputs, (list, tuple))
            else ()
        )
        digests = {f"entry {name!r}": digest(value) for name, value in entries if value is not None}
        return digests or ({} if inputs is None else {"": digest(inputs)})


def first_difference(axis: Axis, lines: Sequence[Any]) -> tuple[int, Any, Any] | None:
    """Find the first rank of an axis whose lines differ from those of the axis's first rank. All ranks must call this.

    Returns:
        (its position, first rank's line, its line) at the first different line (None: missing); None if all are equal.
    """
    if len(set(all_gather_objects(axis, digest(list(lines))))) == 1:
        return None
    everyone = all_gather_objects(axis, lines)
    index = next(index for index, row in enumerate(everyone) if row != everyone[0])
    return index, *next(pair for pair in itertools.zip_longest(everyone[0], everyone[index]) if pair[0] != pair[1])


def digest(value: Any) -> int:
    """Return a CRC-32 of a value: of the bytes of tensors and arrays, the elements of containers, the `to_dict` or
    dataclass fields of objects, the `repr` of plain values, and of other values only the type's name."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return zlib.crc32(data, zlib.crc32(f"{tuple(value.shape)} {value.dtype}".encode()))
    if isinstance(value, (np.ndarray, np.generic)):
        data = repr(digest(value.tolist())).encode() if value.dtype.hasobject else value.tobytes()
        return zlib.crc32(data, zlib.crc32(f"{value.shape} {value.dtype}".encode()))
    if isinstance(value, Mapping):
        return digest([[str(key), value[key]] for key in sorted(value, key=str)])
    if isinstance(value, (list, tuple)):
        return zlib.crc32(repr([digest(element) for element in value]).encode())
    if isinstance(value, (set, frozenset)):
        return zlib.crc32(repr(sorted(map(digest, value))).encode())
    inside = _describe_contents(value)
    if inside is not None:
        return digest([type(value).__name__, inside])
    plain = isinstance(value, (int, float, str, bytes, bool, type(None), torch.dtype, torch.device))
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode())


def _describe_contents(value: Any) -> dict[str, Any] | None:
    """Return an object's contents (`to_dict` or dataclass fields), or None."""
    if isinstance(value, type):
        return None
    try:
        contents = value.to_dict()
    except Exception:  # no `to_dict`, or one with arguments
        contents = None
    if not isinstance(contents, dict) and dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return contents if isinstance(contents, dict) else None
