"""Client of the engine in the web process: starts the engine process and delivers its results to requests."""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed.errors import UsageError
from deepspeed.foundation.log import logger
from deepspeed.serving import worker
from deepspeed.serving.arguments import EngineOptions
from deepspeed.serving.ipc import Accepted, Cancel, Failed, Ready, Refused, Step, Stop, Submit, TokenChunk

Put = Callable[[Accepted | TokenChunk | Refused | None], None]


class EngineGone(UsageError):
    """Error: the engine process has ended, so no request can be answered."""


class EngineProcess:
    """Client of the engine process: starts it and exchanges messages with it; results arrive on the event loop.

    Args:
        options: options of the engine.
        on_step: called on the event loop with every `Step`.
        on_end: called on the event loop, with the reason, if the process ends by itself after the model is loaded.
    """

    def __init__(self, options: EngineOptions, on_step: Callable[[Step], None], on_end: Callable[[str], None]) -> None:
        self._options, self._on_step, self._on_end = options, on_step, on_end
        self.ready: Ready | None = None
        self.failure = ""
        self.last_step = time.monotonic()
        self.last = Step(0, idle=True)
        self.live: dict[int, tuple[Put, int]] = {}  # receiver of results, and number of answers, by request
        self._next = 0
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        self._stopping = False

    async def start(self) -> Ready:
        """Start the process, and wait until the model is loaded.

        Raises:
            EngineGone: the model could not be loaded; the message has the reason.
        """
        context = multiprocessing.get_context("spawn")
        self._loop = asyncio.get_running_loop()
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(
            target=worker.main, args=(self._options, child_end), name="ds_serve engine", daemon=True
        )
        self._process.start()
        child_end.close()
        self._started = asyncio.Event()
        self._threads = [
            threading.Thread(target=self._read, name="ds_serve read", daemon=True),
            threading.Thread(target=self._write, name="ds_serve write", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        await self._started.wait()
        if self.ready is None:
            raise EngineGone(self.failure or "the engine ended while it was loading")
        return self.ready

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def alive(self) -> bool:
        """Return whether the process runs and has not reported a failure."""
        return not self._ended.is_set() and not self.failure

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> int:
        """Return the number of answers in progress; a beam search has as many as beams."""
        return sum(answers for _, answers in self.live.values())

    def submit(self, tokens: list[int], sampling: dict[str, Any], put: Put, answers: int = 1, **fields: Any) -> int:
        """Submit a request to the engine.

        Args:
            tokens: token ids of the prompt.
            sampling: keyword arguments of `SamplingParams`.
            put: called on the event loop with each result: acceptance or refusal, then chunks of tokens; None if the
                engine has ended.
            answers: number of answers that the request counts as.
            fields: further fields of `Submit`.

        Returns:
            Number of the request.

        Raises:
            EngineGone: the engine has ended.
        """
        return self.ask(lambda ident: Submit(ident, tokens, sampling, **fields), put, answers)

    def ask(self, message: Callable[[int], Any], put: Put, answers: int = 0) -> int:
        """Send the message `message(number)` to the engine, whose answers go to `put`; the rest as in `submit`."""
        if not self.alive:
            raise EngineGone(self.failure or "the engine's process has ended")
        self._next += 1
        self.live[self._next] = put, answers
        self._outbox.put(message(self._next))
        return self._next

    def cancel(self, ident: int) -> bool:
        """Cancel the request with the number `ident`; return False if it has finished or was refused."""
        live = self.live.pop(ident, None) is not None
        if live and self.alive:
            self._outbox.put(Cancel(ident))
        return live

    async def stop(self, patience: float = 10.0) -> None:
        """Cancel all requests and end the process; it is killed if it has not ended after `patience` seconds."""
        self._stopping = True
        for ident in list(self.live):
            self.cancel(ident)
        self._outbox.put(Stop())
        try:
            await asyncio.wait_for(self._ended.wait(), patience)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._ended.wait()
        self._outbox.put(None)
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        self._process.join()
        for thread in self._threads:
            thread.join()
        self._pipe.close()
        self._process.close()

    # -- threads --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Forward messages to the event loop until the pipe closes; then report the end of the process there."""
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                break
            self._loop.call_soon_threadsafe(self._arrived, message)
        self._process.join()
        self._loop.call_soon_threadsafe(self._over)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._pipe.send(message)
            except (BrokenPipeError, OSError):
                return

    # -- on the event loop ----------------------------------------------------------------------------------------

    def _arrived(self, message: Any) -> None:
        if isinstance(message, Step):
            self.last, self.last_step = message, time.monotonic()
            for part in message.parts:
                self._deliver(part, part.finish_reason is not None)
            self._on_step(message)
        elif isinstance(message, Accepted | Refused):
            self._deliver(message, isinstance(message, Refused))
        elif isinstance(message, Ready):
            self.ready = message
            self._started.set()
        elif isinstance(message, Failed):
            self.failure = message.reason

    def _deliver(self, message: Accepted | TokenChunk | Refused, last: bool) -> None:
        entry = self.live.pop(message.ident, None) if last else self.live.get(message.ident)
        if entry is not None:
            entry[0](message)

    def _over(self) -> None:
        """Notify all waiting requests that the process has ended."""
        code = self._process.exitcode
        self.failure = self.failure or ("" if self._stopping else f"the engine's process ended with code {code}")
        for put, _ in self.live.values():
            put(None)
        self.live.clear()
        self._ended.set()
        self._started.set()
        if self.failure:
            logger.error("ds_serve: %s", self.failure)
        if self.ready is not None and not self._stopping:
            self._on_end(self.failure)
