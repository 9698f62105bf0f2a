"""HTTP endpoints of the server: completions, chat, embeddings, tokens, models, health and metrics."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Coroutine
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import ClientDisconnect

from deepspeed.foundation.log import logger
from deepspeed.serving.embeddings import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from deepspeed.serving.protocol import APIError, BaseRequest, ChatCompletionRequest, CompletionRequest, answer_error
from deepspeed.serving.request_ids import HEADER, RequestIds
from deepspeed.serving.service import PendingRequest, Service
from deepspeed.version import __version__

# Unknown paths would create unlimited metrics.
_COUNTED = (
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/embeddings", "/tokenize", "/detokenize",
)  # fmt: skip


class Endpoints:
    """Handlers of the HTTP paths, which share the state in `service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def app(self) -> FastAPI:
        """Create the web application."""
        app = FastAPI(title="ds_serve", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(APIError, self._refuse)
        app.add_exception_handler(404, self._refuse_path)
        app.add_exception_handler(405, self._refuse_path)
        app.add_exception_handler(Exception, self._refuse)
        options = self._service.options
        if options.allowed_origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=options.allowed_origins, allow_methods=options.allowed_methods,
                allow_headers=options.allowed_headers, allow_credentials=options.allow_credentials,
                expose_headers=("Retry-After", HEADER),
            )  # fmt: skip
        app.add_middleware(RequestIds)
        app.get("/v1/models")(self._models)
        app.get("/v1/models/{name:path}")(self._model)
        app.get("/health")(self._health)
        app.get("/metrics")(self._metrics)
        if options.allow_runtime_lora_updating:
            app.post("/v1/load_lora_adapter")(self._load_adapter)
            app.post("/v1/unload_lora_adapter")(self._unload_adapter)
        if options.engine.weight_updates:
            app.post("/update_weights")(self._update_weights)
        app.get("/ping")(self._health)
        app.post("/ping")(self._health)
        app.get("/version")(self._version)
        app.post("/v1/embeddings")(self._embeddings)
        app.post("/tokenize")(self._tokenize)
        app.post("/detokenize")(self._detokenize)
        app.post("/v1/completions")(self._completions)
        app.post("/v1/chat/completions")(self._chat)
        return app

    # -- errors ---------------------------------------------------------------------------------------------------

    def _counter(self, request: Request, status: int) -> Any:
        path = request.url.path if request.url.path in _COUNTED else "other"
        return self._service.metrics.answers.labels(path, str(status))

    async def _refuse(self, request: Request, error: Exception) -> JSONResponse:
        refusal = answer_error(error)
        self._counter(request, refusal.status).inc()
        headers = {} if refusal.retry_after is None else {"Retry-After": str(refusal.retry_after)}
        return JSONResponse(refusal.body(), refusal.status, headers)

    async def _refuse_path(self, request: Request, error: Any) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return await self._refuse(request, APIError(error.status_code, text, code="unknown_url"))

    # -- models and state -----------------------------------------------------------------------------------------

    def _card(self, name: str) -> dict[str, Any]:
        ready = self._service.engine.ready
        return {
            "id": name,
            "object": "model",
            "created": self._service.started,
            "owned_by": "deepspeed",
            "root": self._service.options.engine.model,
            "max_model_len": ready.max_length if ready is not None else None,
        }

    def _cards(self) -> list[dict[str, Any]]:
        cards = [self._card(name) for name in self._service.options.names]
        return [*cards, *self._service.adapters.cards(cards[0])]

    async def _load_adapter(self, request: Request) -> Response:
        self._check_key(request)
        return Response(await self._service.adapters.load(await self._body(request)), media_type="text/plain")

    async def _unload_adapter(self, request: Request) -> Response:
        self._check_key(request)
        return Response(await self._service.adapters.unload(await self._body(request)), media_type="text/plain")

    async def _update_weights(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse(await self._service.weights.update(await self._body(request)))

    async def _models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": self._cards()})

    async def _model(self, request: Request, name: str) -> Response:
        self._check_key(request)
        card = next((card for card in self._cards() if card["id"] == name), None)
        if card is None:
            raise APIError(404, f"The model {name!r} does not exist", "model", "model_not_found")
        return JSONResponse(card)

    async def _version(self) -> Response:
        return JSONResponse({"version": __version__})

    async def _health(self) -> Response:
        status, body = self._service.health()
        return JSONResponse(body, status)

    async def _metrics(self) -> Response:
        metrics = self._service.metrics
        metrics.up.set(int(self._service.engine.alive))
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # -- answers --------------------------------------------------------------------------------------------------

    async def _completions(self, request: Request) -> Response:
        return await self._answer_or_refuse(request, CompletionRequest)

    async def _chat(self, request: Request) -> Response:
        return await self._answer_or_refuse(request, ChatCompletionRequest)

    async def _embeddings(self, request: Request) -> Response:
        return await self._answer_or_refuse(request, EmbeddingRequest)

    async def _tokenize(self, request: Request) -> Response:
        self._check_key(request)
        return await self._known(
            request, await self._service.tokenize(TokenizeRequest.parse(await self._body(request)))
        )

    async def _detokenize(self, request: Request) -> Response:
        self._check_key(request)
        parsed = DetokenizeRequest.parse(await self._body(request))
        return await self._known(request, await self._service.detokenize(parsed))

    async def _known(self, request: Request, body: dict[str, Any]) -> Response:
        self._counter(request, 200).inc()
        return JSONResponse(body)

    async def _answer_or_refuse(self, request: Request, kind: type[BaseRequest] | type[EmbeddingRequest]) -> Response:
        """Answer a request; any error becomes a response in OpenAI's format."""
        try:
            return await self._answer(request, kind)
        except APIError:
            raise
        except ClientDisconnect:  # while its body was read
            return Response(status_code=499)
        except Exception as error:
            logger.exception("ds_serve: an answer could not be formed")
            raise answer_error(error) from error

    async def _answer(self, request: Request, kind: type[BaseRequest] | type[EmbeddingRequest]) -> Response:
        self._check_key(request)
        parsed: Any = kind.parse(await self._body(request))
        embeds, ident = isinstance(parsed, EmbeddingRequest), request.state.ident
        pending = request.state.call = await (self._service.embed if embeds else self._service.call)(parsed, ident)
        stream = None
        streamed = not embeds and parsed.stream
        try:
            work = pending.accepted() if streamed else self._service.answer(pending)
            result: Any = await self._unless_gone(request, work)
            if result is None:
                return Response(status_code=499)  # the client has disconnected
            if streamed:  # only now: a status cannot be taken back
                headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
                events = self._service.stream(pending)
                stream = _ResponseStream(pending, events, media_type="text/event-stream", headers=headers)
            response = stream or JSONResponse(result)
            self._counter(request, 200).inc()
            return response
        finally:
            if stream is None:
                pending.close()

    def _check_key(self, request: Request) -> None:
        keys = self._service.options.api_keys
        token = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if keys and not any([hmac.compare_digest(token, key.encode()) for key in keys]):
            raise APIError(401, "Incorrect API key provided", code="invalid_api_key", kind="authentication_error")

    async def _body(self, request: Request) -> bytes:
        """Read the body; raises `APIError` (400) if the body is longer than `max_body`."""
        most, body = self._service.options.max_body, bytearray()
        length = request.headers.get("content-length", "")
        too_long = APIError(400, f"The body is longer than {most} bytes", code="request_too_large")
        if length.isdecimal() and int(length) > most:
            raise too_long
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise too_long
        return bytes(body)

    async def _unless_gone(self, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of `work`, or raise its error; if the client disconnects, cancel it and return None."""

        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


class _ResponseStream(StreamingResponse):
    """Streaming response that cancels an unfinished request at the end, even if the stream never began."""

    def __init__(self, pending: PendingRequest, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending = pending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._pending.close()
