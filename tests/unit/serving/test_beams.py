"""Beams, answers that share pages, and draft models over HTTP."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed.errors import ArgumentError
from deepspeed.serving.arguments import EngineOptions, parse
from tests.unit.inference.test_beam_search import of_transformers
from tests.unit.serving.inline import InlineServer, inline
from tests.unit.serving.test_answers import events

ASKED = {"prompt": "the cat", "max_tokens": 6, "use_beam_search": True, "n": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def drafting(folder: Path) -> Any:
    own = {"threads": 1, "speculative_model": str(folder), "speculation": 3, "dtype": "fp32"}
    with inline(folder, own, drain=0.5) as server:
        yield server


def texts(body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in body["choices"]]


def test_beams_are_those_of_transformers_and_come_whole(drafting: InlineServer, folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("the cat")["input_ids"]
    wanted = of_transformers(model, prompt, 6, [], num_beams=4, num_return_sequences=3, length_penalty=0.5)
    body = {**ASKED, "best_of": 4, "length_penalty": 0.5, "logprobs": 2}
    whole = drafting.post("completions", body).json()
    assert texts(whole) == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in wanted]
    assert [len(choice["logprobs"]["tokens"]) for choice in whole["choices"]] == [6, 6, 6]
    assert whole["usage"]["completion_tokens"] == 18 and {c["finish_reason"] for c in whole["choices"]} == {"length"}
    streamed = [one for one in events(drafting.post("completions", {**body, "stream": True})) if one != "[DONE]"]
    assert [one["choices"][0]["index"] for one in streamed] == [0, 1, 2], "whole at the end"
    assert [one["choices"][0]["text"] for one in streamed] == texts(whole)
    drafting.until_free()


def test_a_chat_has_beams_too_and_one_beam_is_greedy(drafting: InlineServer) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "ignore_eos": True}
    answers = [
        drafting.post("chat/completions", {**asked, **more}).json()["choices"]
        for more in ({"use_beam_search": True, "n": 2}, {"use_beam_search": True}, {"temperature": 0})
    ]
    assert [len(choices) for choices in answers] == [2, 1, 1]
    assert answers[1][0]["message"] == answers[2][0]["message"]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"temperature": 0.5}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"best_of": 2}, "best_of"),
        ({"n": 9}, "beams"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "best_of": 4}, "best_of"),
        ({"early_stopping": "later"}, "early_stopping"),
    ],
)
def test_what_beams_do_not_have_is_refused_by_name(drafting: InlineServer, more: dict, name: str) -> None:
    for streamed in (False, True):
        answer = drafting.post("completions", {**ASKED, **more, "stream": streamed})
        assert answer.status_code == 400 and name in answer.json()["error"]["message"]
    drafting.until_free()


def test_every_beam_counts_where_the_server_is_full(drafting: InlineServer) -> None:
    """Eight places: six beams, of which two are returned, leave room for two answers."""
    service, answers = drafting.service, []
    body = {**ASKED, "n": 2, "best_of": 6}
    thread = threading.Thread(target=lambda: answers.append(drafting.post("completions", body)))
    with mock.patch.object(service, "options", replace(service.options, max_waiting=0)):
        with drafting.generator._lock:  # nothing ends meanwhile
            thread.start()
            while not service.engine.live:
                thread.join(0.01)
            assert service.engine.answers == 6
            full = drafting.post("completions", {"prompt": "a", "n": 3})
            service.admit(2)
        thread.join()
        assert full.status_code == 429 and full.json()["error"]["message"].startswith("6 answers")
    assert len(answers[0].json()["choices"]) == 2 and service.engine.answers == 0


def test_answers_share_pages_and_a_draft_changes_no_token(drafting: InlineServer, folder: Path) -> None:
    asked = {"prompt": ["the cat sat", "a"], "max_tokens": 8, "n": 3, "seed": 4, "temperature": 1.2, "ignore_eos": True}
    greedy = {"prompt": "the cat sat", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with inline(folder, {"threads": 1, "prefix_cache": False, "dtype": "fp32"}, drain=0.5) as plain:
        wanted = [texts(plain.post("completions", body).json()) for body in (asked, greedy)]
        ones = [texts(plain.post("completions", {**asked, "n": 1}).json()) for _ in range(1)]
    assert [texts(drafting.post("completions", body).json()) for body in (asked, greedy)] == wanted
    assert ones[0] == [wanted[0][0], wanted[0][3]]
    assert drafting.generator.load().accepted > 0
    drafting.until_free()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--speculative-model", "draft", "--num-speculative-tokens", "4"], (4, "draft", "")),
        (["--speculative-config", '{"model": "draft", "num_speculative_tokens": 5}'], (5, "draft", "")),
        (
            ["--speculative-config", '{"model": "d", "num_speculative_tokens": 5, "quantization": "int8"}'],
            (5, "d", "int8"),
        ),
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 6}'], (6, "", "")),
        (["--speculation", "3"], (3, "", "")),
        (["--speculative-model", "draft"], "num_speculative_tokens"),
        (["--num-speculative-tokens", "3"], "needs --speculative-model"),
        (["--speculative-model", "draft", "--speculation", "3"], "n-gram lookup"),
        (["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 6}'], "eagle"),
        (["--speculative-config", '{"draft_tensor_parallel_size": 2}'], "draft_tensor_parallel_size"),
        (["--speculative-config", "{"], "JSON"),
    ],
)
def test_options_of_speculation(folder: Path, arguments: list[str], found: Any) -> None:
    if isinstance(found, str):
        with pytest.raises(ArgumentError, match=found):
            parse([str(folder), *arguments])
        return
    engine: EngineOptions = parse([str(folder), *arguments]).engine
    assert (engine.speculation, engine.speculative_model, engine.speculative_quantize) == found
