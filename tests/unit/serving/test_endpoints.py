"""Scores of prompts, embeddings, tokens, names, priorities, ids of requests and metrics of a running server."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed.errors import ArgumentError
from deepspeed.serving.arguments import parse
from tests.harness.pool import PATIENCE
from tests.unit.serving.inline import InlineServer, inline
from tests.unit.serving.test_answers import events

GREEDY = {"temperature": 0, "ignore_eos": True, "repetition_penalty": 1}
TEXT = "def é🙂(x): 'ä'"


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[InlineServer]:
    engine = {"threads": 1, "max_batch_tokens": 24}
    with inline(folder, engine, aliases=("second", "third"), api_keys=("key",)) as server:
        yield server


def post(server: InlineServer, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    url = f"{server.url}{path}"
    return httpx.post(url, json=body, headers={"Authorization": "Bearer key", **headers}, timeout=300)


def complete(server: InlineServer, **body: Any) -> dict[str, Any]:
    answer = post(server, "/v1/completions", {"model": "tiny", **GREEDY, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@torch.no_grad()
def own(folder: Path, tokens: list[int]) -> tuple[list[float], torch.Tensor]:
    """(log-probabilities of the tokens after the first, last hidden states), by Transformers."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([tokens])
    output = model(ids, output_hidden_states=True)
    chances = output.logits[0].log_softmax(-1)
    return [float(row[token]) for row, token in zip(chances, tokens[1:], strict=False)], output.hidden_states[-1][0]


# -- scores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("new", [0, 3])
@pytest.mark.parametrize("tokens", [False, True])
def test_echo_scores_the_prompt(tiny: InlineServer, folder: Path, tokens: bool, new: int, streamed: bool) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    prompt = [1, *ids] if tokens else TEXT
    ids = [1, *ids] if tokens else ids
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": new, **GREEDY}
    body["stream"] = streamed
    answer = post(tiny, "/v1/completions", body)
    bodies = [one for one in events(answer) if one != "[DONE]"] if streamed else [answer.json()]
    choices = [one["choices"][0] for one in bodies if one["choices"]]
    text = "".join(choice["text"] for choice in choices)
    shown = f"<s>{TEXT}" if tokens else TEXT
    assert text.startswith(shown) and choices[-1]["finish_reason"] == "length"
    assert new or text == shown
    parts = {key: sum((choice["logprobs"][key] for choice in choices if choice["logprobs"]), [])
             for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}  # fmt: skip
    assert {len(part) for part in parts.values()} == {len(ids) + new}
    assert parts["token_logprobs"][0] is parts["top_logprobs"][0] is None
    values = own(folder, ids)[0]
    assert parts["token_logprobs"][1 : len(ids)] == pytest.approx(values, abs=1e-4)
    for token, value, top, offset in list(zip(*parts.values(), strict=True))[1:]:
        assert top[token] == value and len(top) in (2, 3)
        if not token.startswith(("bytes:", "<", "token_id:")):
            assert text[offset:].startswith(token), (token, offset)
    assert parts["text_offset"] == sorted(parts["text_offset"]) and parts["text_offset"][0] == 0


def test_prompt_logprobs_in_vllms_form(tiny: InlineServer, folder: Path) -> None:
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    values = own(folder, ids)[0]
    whole = complete(tiny, prompt=[TEXT, "ab"], prompt_logprobs=1, max_tokens=2, n=2)
    assert len(whole["choices"]) == 4
    for choice in whole["choices"][:2]:
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(values) and choice["logprobs"] is None
        for token, value, entry in zip(ids[1:], values, rest, strict=True):
            stated = entry[str(token)]
            assert stated["logprob"] == pytest.approx(value, abs=1e-4) and stated["rank"] >= 1
            assert next(iter(entry)) == str(token) and len(entry) == (1 if stated["rank"] == 1 else 2)
            assert {one["rank"] for one in entry.values()} == {1, stated["rank"]}
    assert rest[0][str(ids[1])]["decoded_token"] == TEXT[1]
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi", "type": "text"}], "max_tokens": 1}
    answer = post(tiny, "/v1/chat/completions", {**chat, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] and answer["prompt_logprobs"][0] is None
    alone = complete(tiny, prompt="x", prompt_logprobs=1, max_tokens=0)["choices"][0]
    assert alone["prompt_logprobs"] == [None] and alone["text"] == ""


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"priority": "first"}, "priority"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(tiny: InlineServer, fields: dict[str, Any], param: str) -> None:
    answer = post(tiny, "/v1/completions", {"model": "tiny", "prompt": "ab", **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


# -- embeddings and tokens ---------------------------------------------------------------------------------------------

INPUTS = ["a", "def f(x):\n    return x * x", TEXT, "b" * 60]


def test_embeddings_equal_hidden_states_and_disturb_no_answer(tiny: InlineServer, folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    alone = complete(tiny, prompt="def ", max_tokens=40)["choices"][0]["text"]
    found: list[str] = []
    beside = threading.Thread(
        target=lambda: found.append(complete(tiny, prompt="def ", max_tokens=40)["choices"][0]["text"])
    )
    beside.start()
    client = OpenAI(base_url=f"{tiny.url}/v1", api_key="key", max_retries=0)
    for given in (INPUTS, words(INPUTS)["input_ids"]):
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = client.embeddings.create(model="tiny", input=given, **encoding)
            assert [one.index for one in answer.data] == list(range(len(INPUTS)))
            for text, one in zip(INPUTS, answer.data, strict=True):
                mean = own(folder, words(text)["input_ids"])[1].mean(0)
                vector: Any = one.embedding
                if isinstance(vector, str):
                    import base64

                    vector = torch.frombuffer(bytearray(base64.b64decode(vector)), dtype=torch.float32).tolist()
                assert torch.allclose(torch.tensor(vector), mean / mean.norm(), atol=1e-5)
                assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, words(INPUTS)["input_ids"]))
    one = client.embeddings.create(model="second", input=words(TEXT)["input_ids"])
    assert len(one.data) == 1 and one.model == "tiny"
    beside.join()
    assert found == [alone]
    tiny.until_free()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a", "dimensions": 8}, "dimensions"), ({"input": ""}, "input"), ({"input": []}, "input"),
        ({"input": [[]]}, "input"), ({"input": [10**6]}, "input"), ({"input": "a" * 97}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"), ({"input": "a", "odd": 1}, "odd"),
        ({"input": ["a"] * 65}, "input"),
    ],
)  # fmt: skip
def test_embeddings_refuse_by_name(tiny: InlineServer, body: dict[str, Any], param: str) -> None:
    answer = post(tiny, "/v1/embeddings", {"model": "tiny", **body})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_tokens_and_text(tiny: InlineServer, folder: Path) -> None:
    words = AutoTokenizer.from_pretrained(folder)
    plain = post(tiny, "/tokenize", {"model": "third", "prompt": TEXT, "return_token_strs": True}).json()
    assert plain["tokens"] == words(TEXT)["input_ids"] and plain["count"] == len(plain["tokens"])
    assert plain["max_model_len"] == 96 and plain["token_strs"] == words.convert_ids_to_tokens(plain["tokens"])
    assert post(tiny, "/detokenize", {"tokens": [1, *plain["tokens"]]}).json() == {"prompt": f"<s>{TEXT}"}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for options, ending in (({}, "<assistant>"), ({"add_generation_prompt": False}, "")):
        tokens = post(tiny, "/tokenize", {**chat, **options}).json()["tokens"]
        assert ending in words.decode(tokens) or not ending
    assert post(tiny, "/tokenize", {"prompt": ""}).json()["tokens"] == []
    for path, body in (("/tokenize", {}), ("/tokenize", {**chat, "prompt": "a"}), ("/detokenize", {"tokens": [-1]})):
        assert post(tiny, path, body).status_code == 400
    assert httpx.post(f"{tiny.url}/tokenize", json={"prompt": "a"}).status_code == 401


def test_the_official_client_reads_every_endpoint(tiny: InlineServer) -> None:
    client: Any = OpenAI(base_url=f"{tiny.url}/v1", api_key="key", max_retries=0)
    options = {"model": "tiny", "temperature": 0, "max_tokens": 3, "logprobs": True}
    scored = {**options, "prompt": "ab", "echo": True, "logprobs": 1, "extra_body": {"priority": 1}}
    chat = {**options, "messages": [{"role": "user", "content": "hi"}], "top_logprobs": 1}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole, answer = client.completions.create(**scored), client.chat.completions.create(**chat)
    parts = list(client.completions.create(**scored, **usage))
    deltas = list(client.chat.completions.create(**chat, **usage))
    assert whole.usage.total_tokens == parts[-1].usage.total_tokens == 5
    assert "".join(part.choices[0].text for part in parts[:-1]) == whole.choices[0].text
    logprobs = [part.choices[0].logprobs.token_logprobs for part in parts[:-1] if part.choices[0].logprobs]
    assert sum(logprobs, []) == whole.choices[0].logprobs.token_logprobs and logprobs[0][0] is None
    text = "".join(part.choices[0].delta.content or "" for part in deltas[:-1])
    assert text == answer.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens <= deltas[-1].usage.prompt_tokens_details.cached_tokens
    assert client.models.retrieve("tiny").max_model_len == 96
    assert client.embeddings.create(model="tiny", input="ab").usage.prompt_tokens == 2


# -- operation ---------------------------------------------------------------------------------------------------------


def test_several_names(tiny: InlineServer) -> None:
    client = OpenAI(base_url=f"{tiny.url}/v1", api_key="key", max_retries=0)
    assert [card.id for card in client.models.list()] == ["tiny", "second", "third"]
    assert client.models.retrieve("third").id == "third"
    for name in ("tiny", "second", "third"):
        assert complete(tiny, model=name, prompt="a", max_tokens=1)["model"] == "tiny"
    refused = post(tiny, "/v1/completions", {"model": "fourth", "prompt": "a"})
    assert refused.status_code == 404 and "'second'" in refused.json()["error"]["message"]
    assert parse([".", "--served-model-name", "a", "b", "--max-model-len", "50"]).names == ("a", "b")
    assert parse(["--served-model-name", "a", "b", "."]).names == ("a", "b")
    assert parse([".", "--max-model-len", "50"]).engine.max_length == 50
    with pytest.raises(ArgumentError, match="served-model-name"):
        parse([".", "--served-model-name", ""])


def test_usage_has_the_tokens_from_the_prefix_cache(tiny: InlineServer) -> None:
    prompt = "class Cached: pass  # " + "z" * 30
    used = [complete(tiny, prompt=prompt, max_tokens=1)["usage"] for _ in range(2)]
    whole = len(prompt) // 16 * 16  # full pages
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in used] == [0, whole]
    scored = complete(tiny, prompt=prompt, max_tokens=1, prompt_logprobs=0)["usage"]
    assert scored["prompt_tokens_details"]["cached_tokens"] == 0
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True,
            "stream_options": {"include_usage": True}, **GREEDY}  # fmt: skip
    last = events(post(tiny, "/v1/completions", body))[-2]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": whole}


def test_ids_of_requests_are_sent_back_and_logged(tiny: InlineServer, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("DeepSpeed")
    log.addHandler(caplog.handler)
    try:
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 2, **GREEDY}
        answer = post(tiny, "/v1/completions", body, **{"X-Request-Id": "mine-1.a"})
        assert answer.headers["x-request-id"] == "mine-1.a" and answer.json()["id"] == "cmpl-mine-1.a"
        for odd in ("a b", "x" * 129, "é".encode().decode("latin-1"), ""):
            made = httpx.post(f"{tiny.url}/v1/completions", json=body, headers=[
                (b"Authorization", b"Bearer key"), (b"X-Request-Id", odd.encode("latin-1"))
            ])  # fmt: skip
            assert len(made.headers["x-request-id"]) == 32 and made.headers["x-request-id"] != odd
        refused = post(tiny, "/v1/completions", {**body, "n": 0}, **{"X-Request-Id": "mine-2"})
        assert refused.status_code == 400 and refused.headers["x-request-id"] == "mine-2"
        streamed = post(tiny, "/v1/completions", {**body, "stream": True}, **{"X-Request-Id": "mine-3"})
        assert streamed.headers["x-request-id"] == "mine-3" and events(streamed)[0]["id"] == "cmpl-mine-3"
        assert httpx.get(f"{tiny.url}/health").headers["x-request-id"]
        assert httpx.post(f"{tiny.url}/x%0aINFO forged %1b[31m").status_code == 404
        tiny.until_free()
        until = time.monotonic() + 10 * PATIENCE
        while not any("forged" in record.getMessage() for record in caplog.records) and time.monotonic() < until:
            time.sleep(0.02)  # a line is logged after its answer was sent
    finally:
        log.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records]
    assert any("forged" in line for line in lines) and not any("\n" in line or "\x1b" in line for line in lines)
    said = {name: [line for line in lines if f"{name}:" in line] for name in ("mine-1.a", "mine-2", "mine-3")}
    assert all(len(found) == 1 for found in said.values()) and not any("/health" in line for line in lines)
    assert "/v1/completions 200" in said["mine-1.a"][0] and "2 prompt tokens" in said["mine-1.a"][0]
    assert "2 new, length" in said["mine-3"][0] and "/v1/completions 400" in said["mine-2"][0]


def test_metrics_by_vllms_names(tiny: InlineServer) -> None:
    def read() -> dict[tuple[str, str], float]:
        text = httpx.get(f"{tiny.url}/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {
            (one.name, one.labels.get("finished_reason", "")): one.value
            for one in samples
            if one.name.startswith("vllm:") and {"model_name", "engine"} <= set(one.labels)
        }

    before = read()
    for _ in range(2):
        complete(tiny, prompt="metrics of a prompt", max_tokens=5)
    tiny.until_free()
    after = read()
    grown = {key: after[key] - before[key] for key in after if "_bucket" not in key[0]}
    length = len("metrics of a prompt")
    assert grown["vllm:prompt_tokens_total", ""] == grown["vllm:prefix_cache_queries_total", ""] == 2 * length
    assert (
        grown["vllm:prefix_cache_hits_total", ""] == length // 16 * 16
        and grown["vllm:generation_tokens_total", ""] == 10
    )
    assert grown["vllm:request_success_total", "length"] == 2 and ("vllm:request_success_total", "abort") in after
    for name, count in (("time_to_first_token", 2), ("e2e_request_latency", 2), ("inter_token_latency", 8),
                        ("time_per_output_token", 8), ("request_time_per_output_token", 2)):  # fmt: skip
        assert grown[f"vllm:{name}_seconds_count", ""] == count, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"):
        assert after[f"vllm:{name}", ""] == 0, name
    version = httpx.get(f"{tiny.url}/version").json()["version"]
    assert version and httpx.get(f"{tiny.url}/ping").status_code == httpx.post(f"{tiny.url}/ping").status_code == 200


def test_priorities_under_load(folder: Path) -> None:
    """One place in the engine: who waits comes by priority, then by arrival; a lower number goes first."""
    order: list[str] = []
    with inline(folder, {"threads": 1}, api_keys=("key",)) as server:
        server.generator._scheduler.max_sequences = 1
        alone = complete(server, prompt="a", max_tokens=60)["choices"][0]["text"]
        texts: dict[str, str] = {}

        def ask(name: str, priority: int) -> None:
            texts[name] = complete(server, prompt="a", max_tokens=60, priority=priority)["choices"][0]["text"]
            order.append(name)

        threads = []
        with server.generator._lock:  # all arrive before the next pass
            for name, priority in (("low", 5), ("a", 0), ("b", 0), ("high", -1)):
                threads.append(threading.Thread(target=ask, args=(name, priority)))
                threads[-1].start()
                while len(server.service.engine.live) < len(threads):
                    threads[-1].join(0.01)
        for thread in threads:
            thread.join()
        assert order == ["high", "a", "b", "low"] and set(texts.values()) == {alone}
        server.until_free()
