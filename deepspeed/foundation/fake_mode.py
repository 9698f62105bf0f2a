"""A simulation: an engine whose tensors have no values, in a world of one process.

No other code checks whether it is simulated. Functions with effects outside of the process are a `Replaceable`, and a
simulation replaces them: native code computes nothing, messages have no receiver, a disk only counts
(`comm/fake_world.py`, `planner/fake_world.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, tuple[int, ...]], None]
"""Told of a message: the collective, bytes of the whole tensor, the ranks that take part."""

# Whether messages are late, whether tensors stand for a device's, the ranks on each host, 0 where nobody said, and what
# other stages of a pipeline have said.
_running: list[tuple[bool, bool, int, dict[int, Any]]] = []
_computing: list[bool] = []  # one entry for each `with_values` around
_listeners: list[Listener] = []
_followers: list[Callable[[str], None]] = []
STEP = "step"  # the phase of an update


class Replaceable(Generic[T]):
    """An implementation that acts on the outside; callers use `current`.

    Args:
        real: outside of simulations.
    """

    def __init__(self, real: T) -> None:
        self.current = real

    @contextlib.contextmanager
    def replaced(self, fake: T) -> Generator[None]:
        """Inside, `current` is `fake`."""
        before, self.current = self.current, fake
        try:
            yield
        finally:
            self.current = before


def late() -> bool:
    """Whether the ranks that are not there answer only when they are waited for."""
    return bool(_running) and _running[-1][0]


def of_device() -> bool:
    """Whether the CPU's tensors stand for those of a device: messages go the ways of its backend."""
    return bool(_running) and _running[-1][1]


def per_host() -> int:
    """Ranks on each host of the world that is not there; 0 where nobody said."""
    return _running[-1][2] if _running else 0


def stage_outputs() -> dict[int, Any]:
    """What each part of a pipeline hands on, by part: learned in the run of its stage, read in that of the next."""
    return _running[-1][3]


def computing() -> bool:
    """Whether operators compute here, in the middle of a simulation."""
    return bool(_computing)


@contextlib.contextmanager
def with_values() -> Generator[None]:
    """Inside, operators compute as they do outside of a simulation: for what is learned from values drawn for it."""
    _computing.append(True)
    try:
        yield
    finally:
        _computing.pop()


def message(name: str, nbytes: int, ranks: tuple[int, ...]) -> None:
    """A message that would travel now in the middle of a forward or backward; see `Listener`."""
    for listener in _listeners:
        listener(name, nbytes, ranks)


@contextlib.contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Inside, `listener` is told of messages."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def enter(phase: str) -> None:
    """What follows is, of a stage, a forward (`F0` of chunk 0), a backward (`B0`), what it has put off (`W0`), or the
    update (`STEP`)."""
    for follower in _followers:
        follower(phase)


@contextlib.contextmanager
def following(follower: Callable[[str], None]) -> Generator[None]:
    """Inside, `follower` is told of phases; see `enter`."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.pop()


@contextlib.contextmanager
def simulation(
    *, late: bool = False, device: bool = False, per_host: int = 0, outputs: dict[int, Any] | None = None
) -> Generator[None]:
    """Inside, this process simulates.

    Args:
        late: other ranks answer only when they are waited for; else at once.
        device: the CPU's tensors stand for those of a device.
        per_host: ranks on each host; 0: `LOCAL_WORLD_SIZE` says it, or all are on one.
        outputs: what parts of a pipeline hand on, as far as their stages have been run; is added to.
    """
    _running.append((late, device, per_host, {} if outputs is None else outputs))
    try:
        yield
    finally:
        _running.pop()
