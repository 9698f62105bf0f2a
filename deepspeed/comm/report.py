"""The words of a report: what hangs or has failed, and a line for each rank."""

from __future__ import annotations

from mmap import mmap

from deepspeed.comm.status_page import INSIDE, LEFT, describe
from deepspeed.comm.underway import underway
from deepspeed.comm.whereabouts import backend_settings, whereabouts

_ADVICE = (
    "The ranks took different paths, or one is slow or gone: compare the labels. "
    "init_distributed(timeout=...) or DEEPSPEED_TIMEOUT (minutes) sets the limit."
)


def full_report(what: str, report: str) -> str:
    """What happened, the lines of the ranks, what to do, and what is set for the backend."""
    settings = backend_settings()
    return f"{what}\nThe last collective of each rank:\n{report}\n{_ADVICE}" + (
        f"\nSet: {settings}" if settings else ""
    )


def line_of(rank: int, page: bytes | mmap | None, answered: bool) -> str:
    """The report's line for one rank, from its answer or else its last sign of life."""
    if page is None:
        return f"  rank {rank}: no answer (process gone or not started)"
    where, state = describe(page)
    if state == LEFT:
        return f"  rank {rank}: has ended, after {where}"
    if not answered:
        return f"  rank {rank}: no answer (process gone or stuck); last {'in' if state == INSIDE else 'after'} {where}"
    return f"  rank {rank}: in {where}" if state == INSIDE else f"  rank {rank}: in no collective, after {where}"


def where_now() -> str:
    """Where the main thread is, and what the device has not finished."""
    late = underway.oldest()
    return whereabouts() + (f", the device waits for '{late[0]}'" if late is not None else "")
