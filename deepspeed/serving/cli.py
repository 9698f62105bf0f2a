"""Command `ds_serve MODEL`: the engine runs in a child process, HTTP in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.foundation.log import logger
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.serving.arguments import ServeOptions, parse
from deepspeed.serving.engine import EngineProcess

_LAST_EVENTS = 3  # seconds to send the errors of requests that are unfinished after draining


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server with the command line `arguments` (None: that of the process).

    Returns:
        0 after a shutdown by a signal; 1 if the engine could not start or has ended; 2 for wrong arguments or a missing
        package; 130 for Ctrl-C while the model is being loaded.
    """
    try:
        options = parse(arguments)
    except DeepSpeedError as error:
        print(f"ds_serve: {error}", file=sys.stderr)
        return 2
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        print(f"ds_serve needs {error.name}: pip install 'deepspeed[serve]'", file=sys.stderr)
        return 2
    try:
        return asyncio.run(serve(options))
    except KeyboardInterrupt:  # later signals end the answers first
        print("ds_serve: stopped while the model was being loaded", file=sys.stderr)
        return 130
    except (DeepSpeedError, OSError, ValueError) as error:  # errors of Transformers for missing models
        print(f"ds_serve: {error}", file=sys.stderr)
        return 1


def _load_tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    from deepspeed.inference.gguf_files import is_gguf, load_gguf_tokenizer

    if is_gguf(model):
        return load_gguf_tokenizer(model)
    return AutoTokenizer.from_pretrained(model, trust_remote_code=False)


async def serve(options: ServeOptions) -> int:
    """Start the engine and answer requests until a signal or the engine's end.

    Returns:
        0 after a signal, 1 if the engine has ended.

    Raises:
        EngineGone: the model could not be loaded.
        OSError: the address cannot be bound, or there is no tokenizer.
    """
    import uvicorn

    from deepspeed.serving.app import Endpoints
    from deepspeed.serving.metrics import Metrics
    from deepspeed.serving.service import Service

    say_untested()
    listening = _bound(options.host, options.port)  # report invalid options before the model is loaded
    logger.info("ds_serve: loading %s", options.engine.model)
    metrics, ended = Metrics(options.name), asyncio.Event()
    engine = EngineProcess(options.engine, metrics.step, lambda reason: ended.set())
    loading = asyncio.ensure_future(engine.start())
    try:
        tokenizer = await asyncio.to_thread(_load_tokenizer, options.engine.model)
        ready = await loading
    except BaseException:
        await engine.stop(patience=0.0)
        await asyncio.gather(loading, return_exceptions=True)
        listening.close()
        raise
    level, reason = (logging.WARNING, f" ({ready.why})") if ready.why else (logging.INFO, "")
    logger.log(level, "ds_serve: %s generates by %s%s", options.name, ready.kind, reason)
    try:  # always end the engine process: it ignores signals
        for line in ready.defaults.lines(tokenizer):
            logger.info("ds_serve: %s", line)
        service = Service(options, engine, tokenizer, metrics)
        config = uvicorn.Config(
            Endpoints(service).app(), options.host, options.port, log_level="warning", access_log=False, lifespan="off",
            timeout_graceful_shutdown=int(options.drain) + _LAST_EVENTS, timeout_keep_alive=30,
        )  # fmt: skip
        logger.info("ds_serve: listening at http://%s:%d", *listening.getsockname()[:2])

        class Server(uvicorn.Server):
            """Uvicorn server without its signal handlers, which end the process by the signal even after draining."""

            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

        server = Server(config)
        signals = _on_signal(service, server)
        exiting = asyncio.ensure_future(_exit_after(ended, server, options.grace))
        await server.serve(sockets=[listening])
        exiting.cancel()
    finally:
        await engine.stop()
        listening.close()
    return 0 if signals and not ended.is_set() else 1


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address, not listening yet; OSError if this fails."""
    # Explicit protocol: asyncio checks it before it disables Nagle's algorithm, which would delay further answers on a
    # connection by 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen at {host}:{port}: {error.strerror}; choose --host or --port") from None
    return bound


def _on_signal(service: Any, server: Any) -> list[str]:
    """Handle signals: the first drains, later ones end the server at once; returns the list of received signals."""
    signals: list[str] = []

    def take(name: str) -> None:
        signals.append(name)
        service.draining = True
        if len(signals) == 1:
            logger.info("ds_serve: %s: finishing %d answers first", name, service.engine.answers)
            loop.call_later(service.options.drain, service.end_all)
            server.should_exit = True
        else:
            server.force_exit = True

    loop = asyncio.get_running_loop()
    for name in ("SIGTERM", "SIGINT"):
        loop.add_signal_handler(getattr(signal, name), take, name)
    return signals


async def _exit_after(ended: asyncio.Event, server: Any, grace: float) -> None:
    """Stop the server `grace` seconds after the engine's end; until then, /health reports it."""
    await ended.wait()
    await asyncio.sleep(grace)
    server.should_exit = server.force_exit = True


if __name__ == "__main__":
    sys.exit(main())
