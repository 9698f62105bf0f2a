"""Agrees on the step after which all ranks stop, if only one of them received the request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

# [Note: agreeing on a step]
# The main thread counts steps and asks nothing of anybody. Once somebody wants to stop, the watch's thread of each rank
# promises that its main thread will not pass the end of the step it is in without the decision, and says which step
# that is; the decision is the latest of those. No rank can be beyond it: each stands still at its own promise until all
# have been made, which needs no main thread but only the threads of the watch.

Store: TypeAlias = Any  # a store of torch.distributed, whose type stubs lack `clone`, `append` and values in bytes

_WAIT_S = 0.002


class Stopping:
    """What the main thread and the watch's thread of this process share about stopping.

    Attributes:
        possible: a watch has been started, or somebody has asked: the main thread has to count its steps.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._promise: int | None = None
        self._decision: int | None = None
        self._told = False
        self.possible = False
        self.request = 0  # number of the signal, once one came

    @property
    def pending(self) -> bool:
        """Whether the watch should look often."""
        return self.request != 0 and self._decision is None

    def ask(self, number: int) -> None:
        """This rank wants all to stop; called from a signal handler."""
        self.request = self.request or number
        self.possible = True

    def alone(self) -> None:
        """Nobody else has to agree."""
        if self.request and self._decision is None:
            self._decision = self._promise = self._steps

    def step(self, check: Callable[[], None], wake: Callable[[], None]) -> int:
        """The main thread has ended a step.

        Args:
            check: raises when a rank has failed, so that nothing will be decided.
            wake: has the watch look at once.

        Returns:
            0, or the number of the signal when all ranks stop here.
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
        """The watch's thread: tell the others, promise, and decide once all have promised."""
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
"""This process's."""
