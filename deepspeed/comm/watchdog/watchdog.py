"""Watchdog: ends a failed or hanging collective on every rank, with a report of each rank's last collective."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from deepspeed.comm.shutdown import Phase, released_in
from deepspeed.comm.watchdog.desync import trail
from deepspeed.comm.watchdog.last_collective import (
    INSIDE,
    LEFT,
    OUTSIDE,
    LastCollectivePage,
    backend_settings,
    boot,
    describe,
    place,
    runs,
    underway,
    whereabouts,
)
from deepspeed.errors import CommError, CommTimeoutError
from deepspeed.foundation.spans import recorder

# [Note: agreeing on a step]
# The main thread counts steps and does not communicate. After a stop request, the watchdog's thread of each rank
# publishes the number of the current step (its promise): the main thread will not go beyond the end of that step before
# the decision is known. The decision is the largest of these numbers. No rank can be beyond it, since each waits at its
# own promise until all promises are published, which needs only the watchdog's threads and no main thread.


_WAIT_S = 0.002


class Stopping:
    """Request that all ranks stop after the same step, used by the main thread and the watchdog's thread.

    Attributes:
        possible: a watchdog was started or a stop was requested, so the main thread must count its steps.
        request: number of the signal that requested the stop; 0: none.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._promise: int | None = None
        self._decision: int | None = None
        self._told = False
        self.possible = False
        self.request = 0

    @property
    def pending(self) -> bool:
        """Return whether a stop was requested and the ranks have not agreed on the last step yet."""
        return self.request != 0 and self._decision is None

    def ask(self, number: int) -> None:
        """Request that all ranks stop; called by the handler of signal `number`."""
        self.request = self.request or number
        self.possible = True

    def alone(self) -> None:
        if self.request and self._decision is None:
            self._decision = self._promise = self._steps

    def step(self, check: Callable[[], None], wake: Callable[[], None]) -> int:
        """Record the end of a step, in the main thread; wait at the promised step (see [Note: agreeing on a step]).

        Args:
            check: called while waiting; raises if a rank has failed, since the ranks then cannot agree.
            wake: called while waiting; makes the watchdog poll at once.

        Returns:
            0, or the number of the signal if all ranks stop here.
        """
        with self._lock:
            self._steps += 1
            if self._promise is None or self._steps < self._promise:
                return 0
        while self._decision is None:
            check()
            wake()
            time.sleep(_WAIT_S)
        return self.request if self._steps >= self._decision else 0

    def look(self, store: Store, rank: int, world: int) -> None:
        """Publish and read stop requests in the store, and agree on the last step; runs in the watchdog's thread."""
        if self._decision is not None:
            return
        if self.request and not self._told:
            self._told = True
            store.compare_set("stop", "", str(self.request))
        if not store.check(["stop"]):
            return
        if self._promise is None:
            self.request = int(store.get("stop").decode())
            with self._lock:
                self._promise = self._steps + 1
            store.set(f"stop/{rank}", str(self._promise))
        promises = [f"stop/{other}" for other in range(world)]
        if store.check(promises):
            self._decision = max(int(store.get(name).decode()) for name in promises)


stopping = Stopping()
"""Stop request of this process."""


_ADVICE = (
    "The ranks took different paths, or one is slow or gone: compare the labels. "
    "init_distributed(timeout=...) or DEEPSPEED_TIMEOUT (minutes) sets the limit."
)


def full_report(what: str, report: str) -> str:
    """Format an error message: the failure `what`, the lines `report` of the ranks, advice, backend settings."""
    settings = backend_settings()
    return f"{what}\nThe last collective of each rank:\n{report}\n{_ADVICE}" + (
        f"\nSet: {settings}" if settings else ""
    )


def line_of(rank: int, page: bytes | mmap | None, answered: bool) -> str:
    """Format a rank's line; `page`: its newest page or None, `answered`: whether the rank has answered the alarm."""
    if page is None:
        return f"  rank {rank}: no answer (process gone or not started)"
    where, state = describe(page)
    if state == LEFT:
        return f"  rank {rank}: has ended, after {where}"
    if not answered:
        return f"  rank {rank}: no answer (process gone or stuck); last {'in' if state == INSIDE else 'after'} {where}"
    return f"  rank {rank}: in {where}" if state == INSIDE else f"  rank {rank}: in no collective, after {where}"


# [Note: the watch]
# Each rank writes its last collective to a page of memory and runs one daemon thread with its own connection to the
# group's store. Twice a second the thread publishes the page (`seen/<rank>`, if it changed) and checks the key `alarm`.
# A rank whose collective fails or exceeds the timeout sets `alarm`; every watcher answers (`answer/<rank>`), reads the
# answers of the others and composes the same report. If a rank does not end by itself after the alarm, its watcher ends
# the process: the backend's connections are unusable by then, and the rank would wait for ever. Ranks on one machine
# map each other's pages, so the last collective of a crashed rank (gloo aborts the process when sizes differ) is known
# exactly. The store is a server in rank 0's process: before rank 0 ends, it sets `alarm` to "ending", and the others
# copy what they need and continue without a store. At exit, a process waits until the threads of the backend are idle
# (`_at_exit`). The thread can be stopped from outside (`WatchThread.stop`), as test suites that check for leaked
# threads do: the rank's next collective starts a new thread, which then handles what happened in between.

Answer = TypeVar("Answer", str, bytes)
Store: TypeAlias = Any  # a store of torch.distributed, whose type stubs lack `clone`, `append` and values in bytes

POLL_S = 0.5
ANSWER_S = 2.5  # how long a report waits for ranks that do not answer
GRACE_S = 1.0  # how long a rank may take to end by its own exception after the alarm
LET_GO_S = 1.0  # how long the exit of a process waits for the backend's threads
FAREWELL_S = 1.5  # how long rank 0 waits until the others no longer need the store
STUCK_S = 1.0  # how long a rank that has ended waits for one that is inside of a collective
PULLS = ("gather of ", "read of ")  # prefixes of the labels of one-sided gathers
DEFAULT_TIMEOUT = timedelta(minutes=10)
_OF_LIMIT = 0.9  # part of the timeout for a device's messages: at the timeout NCCL ends the process without a report


_ENDING = "ending"


class WatchdogState:
    """State of this process's watchdog, used by its thread and by threads that communicate."""

    def __init__(self) -> None:
        self.page = LastCollectivePage()
        self.verdict: str | None = None  # another rank's alarm, raised by the next `CollectiveEvent.begin`
        self.raised = False  # this process is already ending with a CommError
        self.timeout = DEFAULT_TIMEOUT
        self.watcher: _Watcher | None = None
        self.resting = False  # the watcher's thread was stopped, and the next collective starts a new one
        self.watches = 0

    def raise_if_alarmed(self, label: str = "") -> None:
        """Raise CommError if the watchdog knows of a failure; `label`: collective that then does not start, or ""."""
        if self.verdict is not None:
            self.raised = True
            raise CommError(f"'{label}' was not started: {self.verdict}" if label else self.verdict)

    def allow(self, timeout: timedelta) -> None:
        """Raise the timeout to `timeout` if it is longer than the current one."""
        self.timeout = max(self.timeout, timeout)

    def leave_collective(self) -> None:
        """Record on the page, and in the span, that the host has left the collective."""
        self.page.turn(OUTSIDE)
        if recorder.on:
            recorder.leave()

    def wait_for_peers(self) -> None:
        """Wait at most half a second for one poll of the watchdog, so that this rank has published its page."""
        if self.watcher is not None:
            self.watcher.wait_for_peers()

    def seconds_to_end(self) -> float:
        """Return the maximum time in seconds until this process ends because of a failure; 0 without failure."""
        return ANSWER_S + 2.0 if self.raised else 0.0

    def end_of_step(self) -> int:
        """Record the end of a step; returns 0, or the signal's number if all ranks agreed to stop after this step.

        Raises:
            CommError: another rank has failed while this rank waited for the agreement.
        """
        if self.watcher is None:
            stopping.alone()
        return stopping.step(
            self.raise_if_alarmed, self.watcher.look_now if self.watcher is not None else stopping.alone
        )


here = WatchdogState()
"""Watchdog state of this process."""


def failed(label: str, error: BaseException, ranks: Sequence[int] | None = None) -> CommError:
    """Report a failure to all ranks, collect their answers and return the error that the caller must raise.

    Args:
        label: name of the collective or computation that failed.
        error: exception of the failure.
        ranks: global ranks that the report lists; None: all ranks.

    Returns:
        CommTimeoutError if `error` is a timeout, else CommError; within `ANSWER_S` + 2 seconds.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    cause = re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", lines[0])  # the backend's source line and its guess
    timed_out = isinstance(error, TimeoutError) or "timed out" in cause.lower()
    what = f"'{label}' {'timed out' if timed_out else 'failed'}: {cause}"
    here.raised = True
    report = here.watcher.ask(what, ranks) if here.watcher else line_of(0, here.page.snapshot(), True)
    here.leave_collective()
    return (CommTimeoutError if timed_out else CommError)(full_report(what, report))


def start(store: Store, rank: int, world: int, timeout: timedelta) -> None:
    """Start the watchdog, which runs until `stop`; does nothing if it is running. One rank needs no thread.

    Args:
        store: torch.distributed store of the process group.
        rank: rank of this process.
        world: number of ranks.
        timeout: maximum time of one collective.
    """
    if here.watcher is not None:
        return
    here.timeout = timeout
    here.verdict, here.raised = None, False
    here.page.turn(OUTSIDE)
    trail.forget()
    if world > 1:
        here.watches += 1
        own = dist.PrefixStore(f"deepspeed.watch.{here.watches}", store.clone())
        here.watcher = _Watcher(own, rank, world)
        stopping.possible = True
        here.watcher.go_on()
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


@released_in(Phase.WATCH)
def stop() -> None:
    """Stop the watchdog; rank 0 first waits, at most `FAREWELL_S`, until the others no longer need its store."""
    watcher, here.watcher = here.watcher, None
    if watcher is not None and watcher.stop():
        here.page.keep_to_itself()


def _at_exit() -> None:
    """Stop the watchdog, and wait up to `LET_GO_S` until gloo's threads have released their tensors.

    A release needs the interpreter. A thread that requests the interpreter during its shutdown is killed
    inside C++ code, and the process aborts (torch 2.13). Two sleeps of this thread give all of them time to finish.
    """
    stop()
    end, rests = time.monotonic() + LET_GO_S, 0
    while rests < 2 and time.monotonic() < end:
        time.sleep(0.002)
        rests += 1
        for thread in Path("/proc/self/task").glob("*"):  # on Linux alone
            with suppress(OSError):  # it has ended
                name, _, rest = (thread / "stat").read_text().partition("(")[2].rpartition(") ")
                if "gloo" in name and not rest.startswith("S"):
                    rests = 0  # it is running or runnable


def timeout() -> timedelta:
    return here.timeout


def _published(rank: int, store: Store) -> bytes | None:
    """Return the last page of a rank in the store: its answer to an alarm, else its regular publication, else None."""
    for key in (f"answer/{rank}", f"seen/{rank}"):
        if store.check([key]):
            return store.get(key)
    return None


def wait_while_others_pull(idle_s: float) -> None:
    """Wait, marked as ended, while other ranks may still read slices that this rank serves.

    Returns after a failure, once all other ranks have ended, or once no rank has begun or ended a collective for
    `idle_s` seconds. If a rank is inside of a collective other than a one-sided gather, at most `STUCK_S` seconds are
    needed: this rank will never join that collective, which fails only when this process ends.
    """
    watcher = here.watcher
    if watcher is None or here.raised:
        return
    here.page.turn(LEFT)
    before, since = watcher.others(), time.monotonic()
    while before and here.verdict is None and not here.raised:
        time.sleep(0.02)
        now = watcher.others()
        if now != before:
            before, since = now, time.monotonic()
        stuck = any(state == INSIDE and not label.startswith(PULLS) for _, state, label in now.values())
        if time.monotonic() - since > (min(STUCK_S, idle_s) if stuck else idle_s):
            return


class WatchThread(threading.Thread):
    def __init__(self, watcher: _Watcher) -> None:
        super().__init__(name="deepspeed-watch", daemon=True)
        self._watcher = watcher

    def run(self) -> None:
        self._watcher.look_around()

    def stop(self) -> None:
        """End the thread and wait for its end; the next collective of this process starts a new thread."""
        self._watcher.rest()


class _Watcher:
    """Watchdog of one rank; see [Note: the watch]."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        self._thread: WatchThread | None = None
        self._threads = threading.Lock()
        self._store: Store | None = store
        self._rank, self._world = rank, world
        self._ranks: Sequence[int] = range(world)  # those a report lists
        self._wake, self._looked = threading.Event(), threading.Event()
        self._leaving = False
        self._question: str | None = None
        self._report = ""
        self._reported = threading.Event()
        self._published = b""
        self._collective = (0, 0.0)  # number of the current collective, and the time of its first poll
        self._neighbours: dict[int, mmap] = {}
        self._processes: dict[int, int] = {}  # those of the neighbours
        self._heard: dict[int, bytes] = {}  # other ranks' places, from the store
        self._answered: set[int] = set()
        self._marks = b""  # of this rank's trail, as published
        self._trails: dict[int, bytes] = {}  # trails that ranks published with their answers
        self._where: dict[int, str] = {}  # host, file and line that ranks published with their answers
        self._with_store(self._introduce)

    def ask(self, what: str, ranks: Sequence[int] | None) -> str:
        """Set the alarm `what` and return the report on `ranks` (None: all); without a store, of local facts only."""
        self._ranks = sorted(ranks) if ranks else self._ranks
        self._question = what
        self.look_now()
        self._reported.wait(ANSWER_S + 2.0)
        return self._report or self._compose()

    def wait_for_peers(self) -> None:
        self._looked.clear()
        self.look_now()
        self._looked.wait(POLL_S)

    def look_now(self) -> None:
        if here.resting:
            self.go_on()
        self._wake.set()

    def go_on(self) -> None:
        """Start the thread if it is not running, also after `rest`."""
        with self._threads:
            if self._thread is None or here.resting:
                here.resting = False
                self._thread = WatchThread(self)
                self._thread.start()

    def others(self) -> dict[int, tuple[int, int, str]]:
        """Return (number, state, label) of the last collective of each other rank that is known and has not ended."""
        places: dict[int, tuple[int, int, str]] = {}
        for rank in range(self._world):
            page: bytes | mmap | None = self._neighbours.get(rank)
            if page is None and rank != self._rank:
                page = self._with_store(partial(_published, rank))
            if page is not None and (rank not in self._processes or runs(self._processes[rank])):
                places[rank] = place(page)
        return {rank: known for rank, known in places.items() if known[1] != LEFT}

    def rest(self) -> None:
        """End the thread until this process enters the next collective."""
        with self._threads:
            if self._thread is not None and self._thread.is_alive():
                here.resting = True
                self._wake.set()
                self._thread.join()

    def stop(self) -> bool:
        """Publish that this rank ends, and stop the thread; returns whether the thread has ended."""
        self._leaving = True
        with self._threads:
            thread, rested = self._thread, here.resting
            here.resting = False
            if rested:
                self._round()
            self._wake.set()
            if thread is not None and thread is not threading.current_thread():
                thread.join(FAREWELL_S + 4.0)  # a thread inside of the store would abort the process at exit
            ended = thread is None or not thread.is_alive()
        if ended:
            self._store = None
            self._neighbours.clear()
        return ended

    def look_around(self) -> None:
        """Poll until the watchdog ends or pauses."""
        while not here.resting and not self._round():
            self._looked.set()
            self._wake.wait(POLL_S)
            self._wake.clear()

    def _with_store(self, action: Callable[[Store], Answer | None]) -> Answer | None:
        """Return the result of an action on the store; None if the store is gone, which ends with rank 0's process."""
        if self._store is None:
            return None
        try:
            return action(self._store)
        except RuntimeError:
            self._store = None
            return None

    def _round(self) -> bool:
        if self._question is not None:
            self._sound(self._question)
            return True
        if self._leaving:
            here.page.turn(LEFT)
            self._with_store(self._say_goodbye)
            return True
        what = self._trouble()
        if what is not None:
            self._sound(what)
            self._end_process(what)
            return True
        alarm = self._with_store(self._listen)
        if alarm is None:
            self._with_store(lambda store: stopping.look(store, self._rank, self._world))
            return self._has_parted()
        if alarm == _ENDING:
            self._with_store(self._copy)
            self._store = None
            return False
        self._collect()
        here.verdict = full_report(alarm, self._report)
        self._end_process(f"rank {self._rank} was told: {alarm}")
        return True

    def _has_parted(self) -> bool:
        """If this rank's trail differs from another's, set the alarm, end the process and return True; else False."""
        what = self._with_store(self._compare_trails) if trail.interval else None
        if not what:
            return False
        self._sound(what)
        here.verdict = full_report(what, self._report)
        self._end_process(what)
        return True

    def _compare_trails(self, store: Store) -> str | None:
        """Publish this rank's marks and compare them with each set's lowest rank; returns the difference or None."""
        marks = trail.marks()
        if marks != self._marks:
            store.set(f"marks/{self._rank}", marks)
            self._marks = marks
        for leader, names in trail.leaders(self._rank).items():
            if store.check([f"marks/{leader}"]) and (what := trail.differs(store.get(f"marks/{leader}"), names)):
                return what
        return None

    def _trouble(self) -> str | None:
        """Describe a collective that exceeds the timeout, or a device message that exceeds 0.9 of it; else None."""
        number, now, limit = here.page.number, time.monotonic(), here.timeout.total_seconds()
        if number != self._collective[0] or not here.page.inside:
            self._collective = (number, now)
        if now - self._collective[1] > limit:
            return f"rank {self._rank} still waits in {describe(here.page.snapshot())[0]}; the limit is {limit:g} s"
        late = underway.oldest()
        if late is not None and late[1] > _OF_LIMIT * limit:
            return (
                f"the device of rank {self._rank} still waits for '{late[0]}', {late[1]:.1f} s ago; the limit is "
                f"{_OF_LIMIT * limit:g} s, before the backend of the device ends the process"
            )
        return None

    def _introduce(self, store: Store) -> None:
        """Publish the address of this rank's page for other ranks on the machine."""
        address = here.page.share()
        if address and store.has_extended_api():
            store.append(f"pages/{boot()}", f"{self._rank} {address}\n")

    def _listen(self, store: Store) -> str | None:
        """Publish this rank's page, map the pages of new ranks on this machine, and return the alarm or None."""
        place = here.page.snapshot()
        if place != self._published:
            store.set(f"seen/{self._rank}", place)
            self._published = place
        if len(self._neighbours) < self._world - 1 and store.check([f"pages/{boot()}"]):
            for entry in store.get(f"pages/{boot()}").decode().splitlines():
                rank, address = entry.split(" ", 1)
                page = None if int(rank) in {self._rank, *self._neighbours} else LastCollectivePage.map(address)
                if page is not None:
                    self._neighbours[int(rank)] = page
                    self._processes[int(rank)] = int(address.split(" ")[0])
        return store.get("alarm").decode() if store.check(["alarm"]) else None

    def _sound(self, what: str) -> None:
        """Set the alarm, unless another rank has set it, and compose the report."""
        self._with_store(lambda store: store.compare_set("alarm", "", what).decode())
        self._collect()

    def _collect(self) -> None:
        self._with_store(self._hear)
        self._report = self._compose()
        self._reported.set()

    def _compose(self) -> str:
        lines = []
        for rank in self._ranks:
            answered = rank == self._rank or rank in self._answered
            heard = here.page.snapshot() if rank == self._rank else self._heard.get(rank)
            line = line_of(rank, heard if answered else self._neighbours.get(rank, heard), answered)
            where = whereabouts() if rank == self._rank else self._where.get(rank)
            lines.append(f"{line} ({where})" if where else line)
        if trail.interval:
            part = trail.parting({**self._trails, self._rank: trail.recent()})
            lines += [part] if part else trail.latest()
        return "\n".join(lines)

    def _hear(self, store: Store) -> None:
        """Publish this rank's answer and wait up to `ANSWER_S` seconds for the answers of the listed ranks."""
        store.set(f"where/{self._rank}", whereabouts())
        if trail.interval:
            store.set(f"trail/{self._rank}", trail.recent())
        store.set(f"answer/{self._rank}", here.page.snapshot())
        end = time.monotonic() + ANSWER_S
        answers = [f"answer/{rank}" for rank in self._ranks]
        while not store.check(answers) and time.monotonic() < end:
            time.sleep(0.05)
        self._copy(store)

    def _copy(self, store: Store) -> None:
        """Read every rank's answer or last published page, and signal to rank 0 that the store may end."""
        for rank in range(self._world):
            for key in (f"seen/{rank}", f"answer/{rank}"):
                if store.check([key]):
                    self._heard[rank] = store.get(key)
                    if key.startswith("answer"):
                        self._answered.add(rank)
            if store.check([f"where/{rank}"]):
                self._where[rank] = store.get(f"where/{rank}").decode()
            if trail.interval and store.check([f"trail/{rank}"]):
                self._trails[rank] = store.get(f"trail/{rank}")
        store.set(f"free/{self._rank}", "")

    def _say_goodbye(self, store: Store) -> None:
        """Publish this rank's last page; rank 0 waits, at most `FAREWELL_S`, until the others have copied all pages."""
        if trail.interval:
            store.set(f"trail/{self._rank}", trail.recent())
        store.set(f"answer/{self._rank}", here.page.snapshot())
        store.set(f"free/{self._rank}", "")
        if self._rank == 0 and store.compare_set("alarm", "", _ENDING) == _ENDING.encode():
            everyone = [f"free/{rank}" for rank in range(self._world)]
            end = time.monotonic() + FAREWELL_S
            while not store.check(everyone) and time.monotonic() < end:
                time.sleep(0.02)

    def _end_process(self, why: str) -> None:
        """End this process with code 1, unless within `GRACE_S` seconds it begins to end by itself."""
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end:
            if here.raised or self._question is not None or self._leaving:
                return
            time.sleep(0.05)
        with suppress(OSError, ValueError):  # stdout and stderr may be closed
            sys.stdout.flush()
            sys.stderr.write(f"[deepspeed] {full_report(why, self._report)}\nThis process ends.\n")
            sys.stderr.flush()
        os._exit(1)
