"""`POST /update_weights`: new weights for a running server, by messages that name tensors in shared memory."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal

from deepspeed.inference.shared_tensors import DTYPES, SharedTensor
from deepspeed.serving.ipc import ChangeWeights
from deepspeed.serving.protocol import APIError, JsonBody, carry_out


class TensorBody(JsonBody):
    """Tensor in a body of `POST /update_weights`; see `SharedTensor`."""

    name: str
    dtype: str
    shape: list[int]
    offset: int = 0


class UpdateBody(JsonBody):
    """Body of `POST /update_weights`.

    Args:
        action: "begin", then "tensors" as often as needed, then "end".
        mode: of "begin": requests under way finish with the old weights ("wait") or end with an error ("abort").
        shared_memory: of "tensors": name of a file in `/dev/shm`, which may be changed or removed after the answer.
        tensors: of "tensors": what lies in the file.
    """

    action: Literal["begin", "tensors", "end"]
    mode: Literal["wait", "abort"] = "wait"
    shared_memory: str = ""
    tensors: list[TensorBody] = []


class WeightUpdateEndpoint:
    """Endpoint for updates of the engine's weights.

    Args:
        engine: the `EngineProcess`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def update(self, body: bytes) -> dict[str, Any]:
        """Carry out one message of an update, by the body of a request; returns the body of the answer.

        Raises:
            APIError: status 400: the body is invalid, or the engine refuses it; 503: the engine has ended.
        """
        wanted = UpdateBody.parse(body)
        tensors = tuple(SharedTensor(each.name, each.dtype, tuple(each.shape), each.offset) for each in wanted.tensors)
        if any(size < 0 for each in tensors for size in each.shape) or {each.dtype for each in tensors} - set(DTYPES):
            raise APIError(400, f"tensors: sizes from 0, dtypes {', '.join(DTYPES)}", "tensors", "invalid_value")
        # A client that leaves does not interrupt it: the engine carries it out in any case.
        message = partial(
            ChangeWeights,
            action=wanted.action,
            mode=wanted.mode,
            shared_memory=wanted.shared_memory,
            tensors=tensors,
        )
        answer = await asyncio.shield(asyncio.ensure_future(carry_out(self._engine, message)))
        return {"object": "weights", "action": wanted.action, "weights_version": answer.version}
