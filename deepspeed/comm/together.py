"""A computation of several ranks with collectives inside, in which one rank alone may raise: all end with it, at once.

Without this the others would wait in the next collective until the watch's limit. Inside, each collective of
`deepspeed/comm/differentiable.py` begins with a meeting: every rank says which collective it has come to, or that it
has ended. Where they do not all say the same, none begins. So ranks that take different ways are found too. Gathers of
sharded parameters that all ranks join do the same.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm import watch
from deepspeed.comm.api import all_gather_into_tensor, told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.errors import CommError, DeepSpeedError
from deepspeed.foundation.log import in_words
from deepspeed.foundation.simulation import simulating

T = TypeVar("T")
_END = "the end"
_MOST = 200  # characters of an error


class _Apart(Exception):
    """Another rank is elsewhere; what each said is in the run."""


@dataclass
class Ended(Generic[T]):
    """How a computation ended.

    Args:
        result: of the action; None where it raised, or was left because another rank did.
        texts: by position on the axis, what a rank raised, or where it was while others were elsewhere; empty: nothing.
        error: of this rank, if it raised.
    """

    result: T | None
    texts: list[str]
    error: Exception | None = None

    @property
    def well(self) -> bool:
        """Whether all ranks have a result."""
        return not any(self.texts)

    def given(self, wrong: Callable[[list[str]], Exception]) -> T:
        """This rank's result.

        Args:
            wrong: the error that all ranks raise where one has none; gets `texts`.

        Raises:
            Exception: `wrong`, on every rank, from what this one raised.
        """
        if self.well:
            return self.result  # type: ignore[return-value]
        raise wrong(self.texts) from self.error


class _Run:
    def __init__(self, axis: Axis) -> None:
        self.axis, self.texts = axis, [""] * axis.size
        self.ranks = frozenset(axis.ranks)

    def meet(self, label: str, error: str = "") -> None:
        """Before a collective, and at the end.

        Raises:
            _Apart: not all ranks are here; nothing more may be sent in this run.
        """
        if any(self.texts):
            raise _Apart
        axis = self.axis
        if axis.group is None or simulating():
            self.texts[axis.rank] = error
            return
        device = "cpu" if axis.tagged else get_accelerator().current_device_name()
        here = torch.tensor([int(bool(error)), zlib.crc32(label.encode())], device=device)
        every = here.new_empty(axis.size * 2)
        all_gather_into_tensor(every, here, group=axis.group, log_name=f"meeting before {label}")
        if bool((every.view(-1, 2) == torch.tensor([0, int(here[1])], device=device)).all()):
            return
        said = told_by_all(axis, (error, label))
        raised = any(text for text, _ in said)
        self.texts = [text if raised else f"it has come to {place}" for text, place in said]
        raise _Apart


_underway: list[_Run] = []


def meet_before(axis: Axis, label: str) -> None:
    """A collective of `axis` is about to begin; nothing happens outside of a `run_together` of its ranks, or more."""
    if _underway and _underway[-1].ranks.issuperset(axis.ranks):
        _underway[-1].meet(label)


def run_together(axis: Axis, action: Callable[[], T]) -> Ended[T]:
    """Call `action` on all ranks of an axis; what one rank raises ends it on all, at its next collective there.

    Args:
        axis: its ranks call together.
        action: its collectives over `axis`, or over rows that `axis` consists of, are those of `differentiable` and
            gathers of sharded parameters; in one order on all ranks.

    Raises:
        CommError: a rank is gone.
    """
    run, result, error = _Run(axis), None, None
    _underway.append(run)
    try:
        try:
            result = action()
        except (_Apart, CommError):
            raise
        except Exception as why:
            error = why
        run.meet(_END, "" if error is None else in_words(error, _MOST))
    except _Apart:
        result = None
    finally:
        _underway.pop()
    return Ended(result, run.texts, error)


def sent_among(axis: Axis) -> int:
    """How many collectives this process has begun, of anybody's, in groups with another rank of the axis."""
    if axis.group is None:
        return 0
    count, of_axis = 0, set(axis.ranks)
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        # torch lists groups that this rank is not in too, under a number.
        if isinstance(group, dist.ProcessGroup) and len(of_axis.intersection(ranks)) > 1:
            with contextlib.suppress(RuntimeError):  # a backend that does not count
                count += group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return count


def in_step(axis: Axis, action: Callable[[], T], elsewhere: Callable[[int, str], Exception]) -> T:
    """What an action returns, where it raises on no rank; all ranks of the axis call together.

    Args:
        axis: its ranks do not meet inside, or all raise before they do.
        action: of this rank.
        elsewhere: the error of this rank where another one raised; gets its global rank, and its words.

    Raises:
        Exception: what the action raised here, or `elsewhere`.
        CommError: a rank is gone.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except CommError:
        raise
    except Exception as why:
        error = why
    mine = "" if error is None else (isinstance(error, DeepSpeedError) and str(error)) or in_words(error, 300)
    texts = told_by_all(axis, mine)
    if error is not None:
        raise error
    other = next((pair for pair in zip(axis.ranks, texts, strict=True) if pair[1]), None)
    if other is not None:
        raise elsewhere(*other)
    return result


@contextlib.contextmanager
def alarmed(label: Callable[[], str], alike: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """What a rank raises inside ends the others too, wherever they wait: for computations whose ranks do not meet.

    Nothing can be sent between the ranks afterwards.

    Args:
        label: what was being done, in the others' reports.
        alike: errors that all ranks raise, of which none has to be told.
    """
    try:
        yield
    except (CommError, *alike):
        raise
    except Exception as error:
        watch.failed(label(), error)
        raise
