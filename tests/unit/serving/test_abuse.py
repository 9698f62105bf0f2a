"""What a server meets: clients that leave, too many of them, wrong requests, slow readers, a dead engine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.harness.pool import PATIENCE
from tests.unit.serving.server import Server, serving

pytestmark = pytest.mark.slow  # small samples of these are in test_server.py
ENDLESS = {"model": "tiny", "temperature": 0, "max_tokens": 80, "ignore_eos": True}


async def _post(client: httpx.AsyncClient, body: dict[str, Any], path: str = "completions") -> httpx.Response:
    return await client.post(f"/v1/{path}", content=json.dumps(body))


def _together(server: Server, work: Any) -> Any:
    async def run() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=120 * PATIENCE, limits=limits) as client:
            return await work(client)

    return asyncio.run(run())


async def _leave(client: httpx.AsyncClient, rng: random.Random, number: int) -> None:
    """Ask, and go at a random moment: before the answer, in the middle of a stream, or just when it ends."""
    body = {**ENDLESS, "prompt": f"{number} leaves", "stream": rng.random() < 0.7}
    asking = asyncio.ensure_future(_post(client, body))
    await asyncio.sleep(rng.random() ** 2 * 1.5)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def cancels(server: Server, count: int) -> None:
    stays = [{**ENDLESS, "prompt": f"{number} stays", "max_tokens": 60} for number in range(3)]

    async def alone(client: httpx.AsyncClient) -> list[Any]:
        return [(await _post(client, body)).json()["choices"] for body in stays]

    async def beside(client: httpx.AsyncClient) -> list[Any]:
        rng = random.Random(5)
        leaving = [_leave(client, rng, number) for number in range(count)]
        staying: list[Any] = []

        async def stay() -> None:
            for body in stays * max(count // 40, 1):
                answer = await _post(client, body)
                while answer.status_code == 429:
                    await asyncio.sleep(0.1)
                    answer = await _post(client, body)
                staying.append(answer.json()["choices"])

        async def go() -> None:
            for at in range(0, count, 10):
                await asyncio.gather(*leaving[at : at + 10])

        await asyncio.gather(stay(), go())
        return staying

    want = _together(server, alone)
    found = _together(server, beside)
    assert found == want * (len(found) // 3) and len(found) >= 3
    server.until_free(4.0)


def test_two_hundred_leave(server: Server) -> None:
    cancels(server, 200)


def overloaded(server: Server, times: int) -> None:
    """Room is for 8 + 24; that many times over come at once: each gets its answer or a 429, none is lost."""

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        body = {**ENDLESS, "max_tokens": 60, "n": 4}
        asked = [_post(client, {**body, "prompt": f"number {number}"}) for number in range(8 * times)]
        return await asyncio.gather(*asked)

    answers = _together(server, work)
    served = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(served) >= 8 and len(refused) > 0 and len(served) + len(refused) == len(answers)
    assert all(answer.json()["usage"]["completion_tokens"] == 4 * 60 for answer in served)
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all(answer.json()["error"]["type"] == "rate_limit_error" for answer in refused)
    assert server.health().json()["status"] == "ok"
    server.until_free(4.0)


def test_ten_times_too_many(server: Server) -> None:
    overloaded(server, 10)
    overloaded(server, 40)


# -- wrong requests ----------------------------------------------------------------------------------------------------

_SOUND: list[tuple[str, dict[str, Any]]] = [
    (
        "completions",
        {**ENDLESS, "prompt": "abc", "max_tokens": 2, "n": 1, "stop": ["x"], "logit_bias": {"5": 1}, "seed": 1},
    ),
    (
        "chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_p": 0.9},
    ),
]
_ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**70,
    1e308,
    -1e308,
    0.5,
    "",
    "x",
    "\x00",
    "\ud800",
    "🙂" * 50,
    [],
    [[]],
    {},
    {"a": 1},
    ["a", 1],
    [None],
    [-1],
    [2**40],
    [[1, "x"]],
    {"role": "user"},
    [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
]
_FIELDS = [
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "max_tokens",
    "top_k",
    "stream_options",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "echo",
    "messages",
    "prompt",
    "model",
    "tools",
    "tool_choice",
    "response_format",
    "structured_outputs",
    "guided_json",
    "user",
    "x",
    "max_completion_tokens",
    "ignore_eos",
    "best_of",
]


def _mutated(rng: random.Random) -> tuple[str, bytes]:
    path, sound = rng.choice(_SOUND)
    body: dict[str, Any] = json.loads(json.dumps(sound))
    for _ in range(rng.randint(1, 3)):
        kind = rng.randrange(4)
        if kind == 0 and len(body) > 1:
            body.pop(rng.choice(list(body)))
        elif kind == 1:
            body[rng.choice(_FIELDS)] = rng.choice(_ODD)
        elif kind == 2:
            body[rng.choice(list(body))] = rng.choice(_ODD)
        else:
            body[rng.choice(_FIELDS)] = rng.choice([rng.uniform(-3, 3), rng.randint(-5, 30)])
    raw = json.dumps(body).encode()
    if rng.random() < 0.2 and raw:
        at = rng.randrange(len(raw))
        raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + rng.randrange(3) :]
    return path, raw


def mutations(server: Server, count: int) -> None:
    rng = random.Random(17)
    before = server.health().json()["last_step"]

    async def work(client: httpx.AsyncClient) -> list[tuple[bytes, httpx.Response]]:
        gate = asyncio.Semaphore(16)

        async def one(path: str, raw: bytes) -> tuple[bytes, httpx.Response]:
            async with gate:
                return raw, await client.post(f"/v1/{path}", content=raw)

        return await asyncio.gather(*(one(*_mutated(rng)) for _ in range(count)))

    answers = _together(server, work)
    statuses = {answer.status_code for _, answer in answers}
    strange = [(raw, answer.text[:300]) for raw, answer in answers if answer.status_code not in (200, 400, 404, 429)]
    assert strange == [] and {200, 400} <= statuses
    for raw, answer in answers:
        if answer.status_code != 200:
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, raw
    assert server.health().json()["status"] == "ok" and server.until_free()["last_step"] > before


def test_two_thousand_mutated_requests(server: Server) -> None:
    mutations(server, 2000)


# -- slow readers ------------------------------------------------------------------------------------------------------


def test_a_slow_reader_holds_up_nobody(server: Server) -> None:
    address = httpx.URL(server.url)
    body = json.dumps({**ENDLESS, "prompt": "slow", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    slow = []
    for _ in range(6):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        one.connect((address.host, address.port))
        one.sendall(head + body)
        slow.append(one)
    try:
        answer = server.client().completions.create(prompt="quick", max_tokens=10, model="tiny", temperature=0)
        assert answer.usage and answer.usage.completion_tokens == 10
        server.until_free(5.0)  # their tokens are made, and wait for them outside of the engine
        for one in slow:
            received = b""
            one.settimeout(10 * PATIENCE)
            while b"data: [DONE]" not in received:
                received += one.recv(512) or pytest.fail("the connection ended")
    finally:
        for one in slow:
            one.close()


def test_half_a_request_and_silence(server: Server) -> None:
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port)) as silent:
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
        assert server.client().completions.create(prompt="quick", max_tokens=2, model="tiny").usage
    assert server.health().status_code == 200


# -- ends --------------------------------------------------------------------------------------------------------------


def dead_engine(server: Server) -> None:
    """Kill the engine under a stream; needs a server with some seconds of --grace."""
    stream = server.client().completions.create(prompt="a", stream=True, **_for_client(ENDLESS))
    next(iter(stream))
    os.kill(server.engine_pid(), signal.SIGKILL)
    killed = time.monotonic()
    while server.health().status_code != 503:
        time.sleep(0.02)
    assert time.monotonic() - killed < 2 * PATIENCE
    body = server.health().json()
    assert body["status"] == "engine ended" and "code -9" in body["reason"]
    refused = httpx.post(f"{server.url}/v1/completions", content=json.dumps({"model": "tiny", "prompt": "a"}))
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_ended"
    with pytest.raises(openai.APIError):  # unless it was over before
        list(stream)
    assert server.process.wait(timeout=60 * PATIENCE) == 1
    assert "ended with code -9" in server.log.read_text()


def test_a_dead_engine(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log", "--served-model-name", "tiny", "--grace", "10") as server:
        dead_engine(server)


def _for_client(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "ignore_eos"} | {"extra_body": {"ignore_eos": True}}


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not start"), serving(tmp_path, tmp_path / "log"):
        pass
    assert "Traceback" not in (tmp_path / "log").read_text().split("ds_serve:")[-1]


def test_a_deadline(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "log", "--served-model-name", "tiny", "--timeout", "0.02") as server:
        late = httpx.post(f"{server.url}/v1/completions", content=json.dumps({**ENDLESS, "prompt": "a"}), timeout=60)
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_exceeded"
        server.until_free()
        assert server.end() == 0
