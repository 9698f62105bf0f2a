"""Simulation of an engine in one process, with tensors that have no values.

Each function with effects outside of the process is a `Replaceable`, which a simulation replaces: native code computes
nothing, messages have no receiver, and a disk only counts bytes (`comm/fake_world.py`, `planner/fake_world.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Listener = Callable[[str, int, tuple[int, ...]], None]
"""Callback for a message: the collective, bytes of the whole tensor, participating ranks."""

# Whether messages are late, whether tensors stand for a device's, the ranks on each host, 0 where nobody said, and what
# other stages of a pipeline have said.
_running: list[tuple[bool, bool, int, dict[int, Any]]] = []
_computing: list[bool] = []  # one entry for each `with_values` around
_listeners: list[Listener] = []
_followers: list[Callable[[str], None]] = []
STEP = "step"  # the phase of an update


class Replaceable(Generic[T]):
    """Function or class with effects outside of the process, which a simulation replaces; callers use `current`.

    Args:
        real: implementation outside of simulations.
    """

    def __init__(self, real: T) -> None:
        self.current = real

    @contextlib.contextmanager
    def replaced(self, fake: T) -> Generator[None]:
        """Context in which `current` is `fake`."""
        before, self.current = self.current, fake
        try:
            yield
        finally:
            self.current = before


def late() -> bool:
    """Return whether simulated messages complete only when they are waited for, instead of at once."""
    return bool(_running) and _running[-1][0]


def of_device() -> bool:
    """Return whether CPU tensors of the simulation represent device tensors, for the choice of the backend."""
    return bool(_running) and _running[-1][1]


def per_host() -> int:
    """Return the simulated ranks per host; 0 if not specified."""
    return _running[-1][2] if _running else 0


def stage_outputs() -> dict[int, Any]:
    """Return the simulation's outputs of pipeline parts, by part: one stage's simulation adds outputs for the next."""
    return _running[-1][3]


def computing() -> bool:
    """Return whether `with_values` is active, so that operators compute values within a simulation."""
    return bool(_computing)


@contextlib.contextmanager
def with_values() -> Generator[None]:
    """Context that computes with real values even within a simulation, for tests on random data."""
    _computing.append(True)
    try:
        yield
    finally:
        _computing.pop()


def message(name: str, nbytes: int, ranks: tuple[int, ...]) -> None:
    """Report a message to all listeners; see `Listener`."""
    for listener in _listeners:
        listener(name, nbytes, ranks)


@contextlib.contextmanager
def listening(listener: Listener) -> Generator[None]:
    """Context that reports messages to `listener`."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def enter(phase: str) -> None:
    """Report the start of a phase of a pipeline stage to all followers.

    Phases of chunk 0 are forward `F0`, backward `B0` and deferred weight gradients `W0`; the update is `STEP`.
    """
    for follower in _followers:
        follower(phase)


@contextlib.contextmanager
def following(follower: Callable[[str], None]) -> Generator[None]:
    """Context that reports phases to `follower`; see `enter`."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.pop()


@contextlib.contextmanager
def simulation(
    *, late: bool = False, device: bool = False, per_host: int = 0, outputs: dict[int, Any] | None = None
) -> Generator[None]:
    """Context in which the engine is simulated; see the module.

    Args:
        late: whether messages complete only when they are waited for, instead of at once.
        device: whether CPU tensors represent device tensors.
        per_host: ranks per host; 0: `LOCAL_WORLD_SIZE`, or all ranks on one host.
        outputs: outputs of the pipeline parts that were already run, by part; the simulation adds to them. None: none.
    """
    _running.append((late, device, per_host, {} if outputs is None else outputs))
    try:
        yield
    finally:
        _running.pop()
