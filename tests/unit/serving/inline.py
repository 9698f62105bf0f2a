"""`ds_serve` in threads of this process, so that tests can plant errors in any stage of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from transformers import AutoTokenizer

from deepspeed.serving import worker
from deepspeed.serving.app import Endpoints
from deepspeed.serving.arguments import EngineOptions, ServeOptions
from deepspeed.serving.cli import _bound
from deepspeed.serving.engine import EngineProcess
from deepspeed.serving.ipc import Ready
from deepspeed.serving.metrics import Metrics
from deepspeed.serving.service import Service
from tests.harness.pool import PATIENCE


class EngineThread(EngineProcess):
    """The engine in a thread in place of a process; messages go through the same pipe."""

    engine: worker._Engine

    async def start(self) -> Ready:
        self._loop = asyncio.get_running_loop()
        self._pipe, child_end = multiprocessing.Pipe()
        self._started = asyncio.Event()

        def work() -> None:
            with contextlib.closing(child_end):
                self.engine = engine = worker._Engine(self._options, child_end)
                child_end.send(engine.ready())
                engine.run()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._process: Any = SimpleNamespace(  # type: ignore[assignment]
            join=thread.join, exitcode=0, kill=lambda: None, close=lambda: None, pid=0
        )
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._read, self._write)]
        for one in self._threads:
            one.start()
        await self._started.wait()
        assert self.ready is not None
        return self.ready


class InlineServer:
    """A running server: `url`, `service`, and `generator`."""

    def __init__(self, folder: Path, engine: dict[str, Any], options: dict[str, Any]) -> None:
        self.listening = _bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        self.options = ServeOptions(EngineOptions(str(folder), max_sequences=8, **engine), "tiny", **options)
        self.up, self.error = threading.Event(), None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.thread.start()
        assert self.up.wait(60 * PATIENCE)
        while self.thread.is_alive() and not self.server.started:  # it does not listen before
            time.sleep(0.01)

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        metrics = Metrics()
        engine = EngineThread(self.options.engine, metrics.step, lambda reason: None)
        try:
            await engine.start()
            self.generator = engine.engine.generator
            tokenizer = AutoTokenizer.from_pretrained(self.options.engine.model)
            self.service = Service(self.options, engine, tokenizer, metrics)
            config = uvicorn.Config(Endpoints(self.service).app(), log_level="critical", lifespan="off")
            self.server = uvicorn.Server(config)
            self.up.set()
            await self.server.serve(sockets=[self.listening])
        finally:
            self.up.set()
            await engine.stop()
            self.listening.close()

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json={"model": "tiny", **body}, timeout=60 * PATIENCE, **options)

    def until_free(self) -> None:
        """Wait until nothing runs and every page is free."""
        until = time.monotonic() + 20 * PATIENCE
        while time.monotonic() < until:
            load = self.generator.load()
            held = self.service.engine.live or self.service.pending
            if load.running == load.waiting == 0 and load.free_pages == load.pages and not held:
                return
            time.sleep(0.02)
        raise AssertionError(f"not free: {load}, {self.service.engine.live}, {self.service.pending}")


@contextlib.contextmanager
def inline(folder: Path, engine: dict[str, Any] | None = None, **options: Any) -> Iterator[InlineServer]:
    """A server that is gone afterwards."""
    server = InlineServer(folder, engine or {}, options)
    try:
        yield server
    finally:
        server.server.should_exit = server.server.force_exit = True
        server.thread.join(30 * PATIENCE)
