"""Ids of requests: taken from the client or made, sent back in a header, and named in one log line per request."""

from __future__ import annotations

import re
import time
import uuid
from typing import Any

from deepspeed.foundation.log import logger

HEADER = "X-Request-Id"
_SANE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_QUIET = {"GET", "HEAD", "OPTIONS"}  # such as checks of the health


class RequestIds:
    """ASGI middleware that gives each request an id, in `request.state.ident`.

    A client's own id counts if it has up to 128 letters, digits and characters of `._:/+=@-`. When the answer is sent,
    one line is logged: id, path, status, seconds, and what the attribute `state.call` says of the answer. Requests that
    only read the server's state are not logged.

    Args:
        app: the application.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        wanted = dict(scope["headers"]).get(HEADER.lower().encode(), b"").decode("latin-1")
        ident = wanted if _SANE.fullmatch(wanted) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["ident"], begun, status = ident, time.monotonic(), 0

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (HEADER.lower().encode(), ident.encode())]}
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            if scope["method"] not in _QUIET:
                call, seconds = state.get("call"), time.monotonic() - begun
                detail = f", {call.summary()}" if call is not None else ""
                path = scope["path"] if _SANE.fullmatch(scope["path"]) else ascii(scope["path"])[:160]
                logger.info("ds_serve: %s: %s %s, %.3f s%s", ident, path, status or "gone", seconds, detail)
