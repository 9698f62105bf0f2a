"""Every endpoint through the unmodified `openai` client, against the model's own `generate`."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.unit.serving.server import LENGTH, Server, serving
from tests.unit.serving.test_abuse import cancels, dead_engine, mutations, overloaded

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
PROMPTS = ["def f(", "The quick", "x", "Grüße, 世界"]


@functools.cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def _wanted(folder: Path, prompt: str, count: int, **kwargs: Any) -> tuple[list[int], str]:
    """Tokens and text by the model's own generate, without us."""
    model, words = _loaded(folder)
    ids = words(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=count, do_sample=False, **kwargs)[
        0, ids["input_ids"].shape[1] :
    ].tolist()
    return out, words.decode([token for token in out if token != 2])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_are_those_of_the_model(server: Server, folder: Path, prompt: str) -> None:
    tokens, text = _wanted(folder, prompt, 24)
    assert len(set(tokens)) > 12
    answer = server.client().completions.create(prompt=prompt, max_tokens=24, **GREEDY)
    assert answer.choices[0].text == text and answer.object == "text_completion" and answer.model == "tiny"
    assert answer.choices[0].finish_reason == ("stop" if tokens[-1] == 2 else "length")
    read = len(_loaded(folder)[1](prompt)["input_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (read, len(tokens))


def test_an_answer_behind_another_on_its_connection_does_not_wait(server: Server) -> None:
    """Head and body are two writes: with Nagle's delays the second waits 40 ms for the client to acknowledge."""
    with httpx.Client(base_url=server.url) as kept:
        times = []
        for _ in range(30):
            begun = time.perf_counter()
            assert kept.get("/v1/models").status_code == 200
            times.append(time.perf_counter() - begun)
    assert min(times[1:]) < 0.03


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_is_the_same_text(server: Server, folder: Path, prompt: str) -> None:
    wanted, text = _wanted(folder, prompt, 24)
    for _ in range(20):  # tokens that are there at once go out together, so one busy moment is no stream that is cut up
        chunks = list(
            server.client().completions.create(
                prompt=prompt, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY
            )
        )
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(wanted)
        assert len({chunk.id for chunk in chunks}) == 1
        if len(chunks) > 5:
            return
    pytest.fail("twenty streams came in few pieces")


def test_chat_whole_and_streamed(server: Server, folder: Path) -> None:
    messages: Any = [
        {"role": "developer", "content": "Hi"},
        {"role": "user", "content": [{"type": "text", "text": "Yo"}]},
    ]
    want = _wanted(folder, "<system>Hi\n<user>Yo\n<assistant>", 20)[1]
    client = server.client()
    answer = client.chat.completions.create(messages=messages, max_completion_tokens=20, **GREEDY)
    assert answer.choices[0].message.content == want and answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(messages=messages, max_tokens=20, stream=True, **GREEDY))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == want


def test_a_chat_without_a_limit_goes_to_the_end_of_the_context(server: Server) -> None:
    answer = server.client().chat.completions.create(
        messages=[{"role": "user", "content": "a"}], extra_body={"ignore_eos": True}, **GREEDY
    )
    assert answer.usage.total_tokens == LENGTH and answer.choices[0].finish_reason == "length"


def test_several_prompts_and_answers(server: Server, folder: Path) -> None:
    _, words = _loaded(folder)
    client = server.client()
    answer = client.completions.create(prompt=PROMPTS, n=2, max_tokens=8, **GREEDY)
    want = [_wanted(folder, prompt, 8)[1] for prompt in PROMPTS for _ in range(2)]
    assert [c.text for c in answer.choices] == want and [c.index for c in answer.choices] == list(range(8))
    assert answer.usage.prompt_tokens == sum(len(words(prompt)["input_ids"]) for prompt in PROMPTS)
    ids = [words(prompt)["input_ids"] for prompt in PROMPTS]
    assert [c.text for c in client.completions.create(prompt=ids, max_tokens=8, **GREEDY).choices] == want[::2]
    assert (
        client.completions.create(prompt=ids[0], max_tokens=8, echo=True, **GREEDY).choices[0].text
        == PROMPTS[0] + want[0]
    )


def test_seeds(server: Server) -> None:
    def drawn(seed: int | None) -> list[str]:
        answer = server.client().completions.create(
            model="tiny",
            prompt="a",
            n=3,
            max_tokens=10,
            seed=seed,
            temperature=1.5,
            extra_body={"top_k": 50, "min_p": 0.0},
        )
        return [choice.text for choice in answer.choices]

    assert drawn(5) == drawn(5) != drawn(6)
    assert len(set(drawn(5))) == 3


def test_stop_strings_across_tokens_and_chunks(server: Server, folder: Path) -> None:
    text = _wanted(folder, "def f(", 24)[1]
    stop = next(text[at : at + 2] for at in range(3, 20) if "\ufffd" not in text[at : at + 2])
    assert len(stop) == 2
    cut = text[: text.index(stop)]
    for stream in (False, True):
        answer: Any = server.client().completions.create(
            prompt="def f(", max_tokens=24, stop=["nowhere", stop], stream=stream, **GREEDY
        )
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == cut
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(server: Server, folder: Path) -> None:
    model, words = _loaded(folder)
    ids = words("def f(", return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    logprobs = torch.stack(out.logits)[:, 0].float().log_softmax(-1)
    want = logprobs.max(-1).values
    client = server.client()
    found = client.completions.create(prompt="def f(", max_tokens=6, logprobs=3, **GREEDY).choices[0].logprobs
    torch.testing.assert_close(torch.tensor(found.token_logprobs), want, atol=1e-4, rtol=1e-4)
    assert all(len(top) == 3 for top in found.top_logprobs) and found.text_offset[0] == 0
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": "a"}], max_tokens=4, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4 and all(len(one.top_logprobs) == 2 for one in content)
    assert all(one.logprob == one.top_logprobs[0].logprob for one in content)


def test_bias_penalties_and_least_lengths_reach_the_engine(server: Server) -> None:
    client = server.client()
    biased = client.completions.create(prompt="a", max_tokens=5, logit_bias={"36": 100}, **GREEDY)
    assert len(set(biased.choices[0].text)) == 1
    varied = client.completions.create(
        prompt="a", max_tokens=5, logit_bias={"36": 40}, frequency_penalty=2, presence_penalty=2,
        extra_body={"repetition_penalty": 9.0}, **GREEDY,
    )  # fmt: skip
    assert varied.choices[0].text != biased.choices[0].text
    ended = client.completions.create(prompt="a", max_tokens=9, logit_bias={"2": 100}, **GREEDY)
    assert ended.choices[0].finish_reason == "stop" and ended.choices[0].text == ""
    longer = client.completions.create(
        prompt="a", max_tokens=9, logit_bias={"2": 100}, extra_body={"min_tokens": 4}, **GREEDY
    )
    assert longer.usage.completion_tokens == 5 and longer.choices[0].finish_reason == "stop"


def test_models(server: Server) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == LENGTH  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"


def test_health_and_metrics(server: Server) -> None:
    server.client().completions.create(prompt="a", max_tokens=3, **GREEDY)
    body = server.until_free()
    assert body["status"] == "ok" and body["last_step"] > 2 and body["seconds_since_last_step"] < 5
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and line[0] != "#")
    assert float(values["ds_serve_generated_tokens_total"]) >= 3 and float(values["ds_serve_engine_up"]) == 1
    assert float(values['ds_serve_answers_total{endpoint="/v1/completions",status="200"}']) >= 1
    assert float(values["ds_serve_steps_total"]) >= body["last_step"] - 1
    assert float(values["ds_serve_cancelled_total"]) == 0


def test_a_client_that_leaves_is_counted_once(server: Server) -> None:
    stream = server.client().completions.create(
        prompt="a", max_tokens=80, stream=True, extra_body={"ignore_eos": True}, **GREEDY
    )
    next(iter(stream))
    stream.close()
    server.until_free()
    text = httpx.get(f"{server.url}/metrics").text
    assert "ds_serve_cancelled_total 1.0" in text or "ds_serve_cancelled_total 0.0" in text  # it may have been done


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("response_format", {"type": "xml"}),
        ("suffix", "end"),
        ("best_of", 3),
        ("no_such_field", 1),
        ("temperature", 3),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("n", 0),
        ("n", 65),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 101}),
        ("logprobs", 6),
        ("stream_options", {"include_usage": True}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", [5, 100_000]),
        ("prompt", "\ud800"),
        ("top_p", 0),
        ("min_tokens", 99),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(server: Server, field: str, value: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "a", field: value})
    answer = httpx.post(f"{server.url}/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error" and error["code"]
    assert field in error["message"] and error["param"] == field


@pytest.mark.parametrize("count", [LENGTH, LENGTH + 1])
def test_the_limit_of_the_context(server: Server, count: int) -> None:
    client = server.client()
    asked: dict[str, Any] = {"prompt": [5] * (count - 4), "max_tokens": 4, "extra_body": {"ignore_eos": True}, **GREEDY}
    if count <= LENGTH:
        assert client.completions.create(**asked).usage.total_tokens == LENGTH
        return
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked)
    assert caught.value.code == "context_length_exceeded"
    assert f"{LENGTH} tokens" in caught.value.message and f"{LENGTH + 1}" in caught.value.message


def test_other_addresses_have_openais_form(server: Server) -> None:
    for answer, status in (
        (httpx.get(f"{server.url}/v2/nothing"), 404),
        (httpx.get(f"{server.url}/v1/completions"), 405),
        (httpx.post(f"{server.url}/v1/completions", content="{"), 400),
        (httpx.post(f"{server.url}/v1/completions", content="[" * 100_000), 400),
        (httpx.post(f"{server.url}/v1/completions", content=b"x" * (5 << 20)), 400),
        (httpx.post(f"{server.url}/v1/completions", content=iter([b"x" * (1 << 20)] * 5)), 400),
    ):
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}


# -- samples of test_abuse.py ------------------------------------------------------------------------------------------


def test_who_leaves_is_forgotten_and_the_others_see_nothing(server: Server) -> None:
    cancels(server, 12)


def test_too_many(server: Server) -> None:
    overloaded(server, 6)


def test_mutated_requests(server: Server) -> None:
    mutations(server, 80)


def test_without_the_option_no_page_may(server: Server) -> None:
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://page.example"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_a_dead_engine_is_seen_and_ends_the_server(server: Server) -> None:
    """The last test of this server."""
    dead_engine(server)


@pytest.mark.slow
def test_keys_drain_and_templates(folder: Path, tmp_path: Path) -> None:
    """Another server: with keys, without a name, ended by SIGTERM while it answers."""
    with serving(folder, tmp_path / "log", "--api-key", "one", "--api-key", "two", "--quantize", "int8") as server:
        for key in ("", "none", "onetwo"):
            with pytest.raises(openai.AuthenticationError):
                server.client(api_key=key or "x").models.list()
        client = server.client(api_key="two")
        name = next(iter(client.models.list())).id
        assert name == folder.name and server.health().status_code == 200
        stream = client.completions.create(
            model=name, prompt="a", max_tokens=80, stream=True, temperature=0, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        server.process.terminate()
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert server.end() == 0, server.log.read_text()
