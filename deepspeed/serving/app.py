"""The endpoints."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from deepspeed.serving.protocol import APIError, ChatCompletionRequest, CompletionRequest, parse
from deepspeed.serving.service import PendingRequest, Service


def make_app(service: Service) -> FastAPI:
    """The web application over a service."""
    app = FastAPI(title="ds_serve", docs_url=None, redoc_url=None, openapi_url=None)

    async def refused(request: Request, error: Exception) -> JSONResponse:
        refusal = error if isinstance(error, APIError) else APIError(500, f"{type(error).__name__}: {error}")
        service.metrics.answers.labels(_endpoint(request), str(refusal.status)).inc()
        headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
        return JSONResponse(refusal.body(), refusal.status, headers)

    async def unknown(request: Request, error: Any) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return await refused(request, APIError(error.status_code, text, code="unknown_url"))

    app.add_exception_handler(APIError, refused)
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)
    _add_reading(app, service)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answered(service, request, CompletionRequest)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answered(service, request, ChatCompletionRequest)

    return app


def _add_reading(app: FastAPI, service: Service) -> None:
    """The endpoints that only tell."""

    def card() -> dict[str, Any]:
        ready = service.engine.ready
        limit = ready.max_length if ready is not None else None
        name = service.options.name
        return {
            "id": name,
            "object": "model",
            "created": service.started,
            "owned_by": "deepspeed",
            "max_model_len": limit,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _check_key(service, request)
        return JSONResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        _check_key(service, request)
        if name != service.options.name:
            raise APIError(404, f"The model {name!r} does not exist", "model", "model_not_found")
        return JSONResponse(card())

    @app.get("/health")
    async def health() -> Response:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        service.metrics.up.set(int(service.engine.alive))
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _endpoint(request: Request) -> str:
    """A label out of a fixed set: paths that clients make up would grow without end."""
    known = ("/v1/completions", "/v1/chat/completions", "/v1/models")
    return request.url.path if request.url.path in known else "other"


def _check_key(service: Service, request: Request) -> None:
    keys = service.options.api_keys
    if not keys:
        return
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    if not any([hmac.compare_digest(given, key.encode()) for key in keys]):
        raise APIError(401, "Incorrect API key provided", code="invalid_api_key", kind="authentication_error")


async def _body(service: Service, request: Request) -> bytes:
    """The body, read no further than its limit.

    Raises:
        Refusal: it is longer.
    """
    most, found = service.options.max_body, bytearray()
    said = request.headers.get("content-length", "")
    too_long = APIError(400, f"The body is longer than {most} bytes", code="request_too_large")
    if said.isdecimal() and int(said) > most:
        raise too_long
    async for part in request.stream():
        found += part
        if len(found) > most:
            raise too_long
    return bytes(found)


async def _answered(
    service: Service, request: Request, kind: type[CompletionRequest] | type[ChatCompletionRequest]
) -> Response:
    _check_key(service, request)
    asked = parse(kind, await _body(service, request))
    call = await service.call(asked)
    counted = service.metrics.answers.labels(_endpoint(request), "200")
    if asked.stream:
        counted.inc()
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _ResponseStream(call, service.stream(call), media_type="text/event-stream", headers=headers)
    try:
        body = await _unless_gone(request, lambda: service.answer(call))
    finally:
        call.close()  # a task that is cancelled before it began closes nothing
    if body is None:
        return Response(status_code=499)  # nobody reads it
    counted.inc()
    return JSONResponse(body)


class _ResponseStream(StreamingResponse):
    """A stream that gives its request up however it ends, begun or not."""

    def __init__(self, call: PendingRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._call = call

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()


async def _unless_gone(request: Request, answer: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any] | None:
    """The answer; None when the client went away, and then its work is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(answer()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return None
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
