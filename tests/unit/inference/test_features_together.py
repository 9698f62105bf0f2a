"""Answers of one prompt, beams, adapters, scores of prompts and priorities in one generator: each as alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from deepspeed.errors import RequestError
from deepspeed.inference import Generator, Request, SamplingParams
from tests.unit.inference import test_adapters as adapters
from tests.unit.inference.test_generator import run
from tests.unit.inference.toys import llama

SIZES: dict[str, Any] = {"page_size": 4, "max_sequences": 8, "max_batch_tokens": 24}


def numbers(generator: Generator, requests: list[Request]) -> dict[Any, list[Any]]:
    """Tokens, log-probabilities of the prompt and of beams, by request; fails where one gets none for long."""
    for request in requests:
        generator.submit(request)
    outputs: dict[Any, list[Any]] = {request.ident: [] for request in requests}
    for _ in range(600):
        for one in generator.step():
            assert one.error is None, one.error
            outputs[one.ident] += one.tokens
            if one.prompt_logprobs is not None:
                outputs[one.ident].append(
                    [entry and (entry.token, round(entry.logprob, 4)) for entry in one.prompt_logprobs]
                )
            if one.beams is not None:
                outputs[one.ident].append([(beam.tokens, round(beam.score, 4)) for beam in one.beams])
        if generator.idle:
            assert generator.pages.available == generator.pages.count
            return outputs
    raise AssertionError(f"unfinished: {generator.load()}")


def test_beams_beside_an_answer_to_the_same_prompt_never_hold_it_twice() -> None:
    """Both compute the prompt in one pass, so the cached pages are not those of the beams; the cache has no room to
    hold the prompt twice: a beam that took the cached pages preempted itself for ever."""
    model = llama(num_hidden_layers=1, vocab_size=64)
    each = Generator(model, page_size=4, cache_bytes=1 << 20).pages.count
    bytes_of_page = (1 << 20) // each
    for seed in range(12):
        draw = random.Random(seed)
        prompt = [draw.randrange(3, 64) for _ in range(16)]
        generator = Generator(model, page_size=4, cache_bytes=10 * bytes_of_page, max_sequences=8)
        answer = SamplingParams(max_new_tokens=draw.choice([3, 4]), ignore_eos=True)
        beams = SamplingParams(max_new_tokens=12, beams=2, ignore_eos=True)
        both = numbers(generator, [Request("a", prompt, answer), Request("b", prompt, beams)])
        alone = numbers(Generator(model, page_size=4), [Request("b", prompt, beams)])
        assert both["b"] == alone["b"] and len(both["a"]) == answer.max_new_tokens


def test_a_mixture_of_all_kinds_gives_each_what_it_gets_alone(tmp_path: Path) -> None:
    model = adapters.llama()
    names = ["one", "two"]
    for number, name in enumerate(names):
        adapters.adapted(model, tmp_path / name, number + 1, **adapters.KINDS["few"])
    folders = {name: tmp_path / name for name in names}
    prompt = [5, 6, 7, 8, 9] * 3
    requests = []
    for number, adapter in enumerate([None, *names]):
        hot = {"max_new_tokens": 14, "ignore_eos": True, "temperature": 1.0, "seed": 4}
        for index in range(2):
            sampling = SamplingParams(**hot, index=index, prompt_logprobs=1 if adapter == "two" else None)
            requests.append(
                Request((adapter, index), prompt, sampling, group=number, adapter=adapter, priority=-number)
            )
        beams = SamplingParams(max_new_tokens=6, beams=3, ignore_eos=True)
        requests.append(Request((adapter, "beams"), prompt, beams, adapter=adapter, priority=number))
        scored = SamplingParams(max_new_tokens=3, ignore_eos=True, prompt_logprobs=2)
        requests.append(Request((adapter, "scored"), prompt[:9], scored, adapter=adapter))
    alone: dict[Any, Any] = {}
    for request in requests:
        alone |= numbers(Generator(model, adapters=folders, **SIZES), [request])
    page = (1 << 20) // Generator(model, page_size=4, cache_bytes=1 << 20).pages.count
    for pages in (200, 12):  # with room, and with preemptions
        generator = Generator(model, adapters=folders, cache_bytes=pages * page, speculation=3, **SIZES)
        together = numbers(generator, requests)
        assert together == alone
        assert bool(generator.load().preemptions) == (pages == 12)


def test_a_group_has_one_prompt_and_one_adapter(tmp_path: Path) -> None:
    model = adapters.llama()
    adapters.adapted(model, tmp_path, **adapters.KINDS["few"])
    generator = Generator(model, adapters={"one": tmp_path})
    generator.submit(Request("a", [5, 6, 7], group="g"))
    with pytest.raises(RequestError, match="the same prompt and adapter"):
        generator.submit(Request("b", [5, 6, 7], group="g", adapter="one"))
    generator.submit(Request("c", [5, 6, 7], group="g"))


def test_a_draft_model_that_fails_is_given_up_and_the_answers_stay(caplog: pytest.LogCaptureFixture) -> None:
    model, draft = llama(num_hidden_layers=1), llama(num_hidden_layers=1)
    requests = [Request(n, [7, 8, 9, n + 3], SamplingParams(max_new_tokens=12, ignore_eos=True)) for n in range(3)]
    wanted = run(Generator(model), requests)
    generator = Generator(model, draft_model=draft, speculation=3)
    calls = 0

    def refuse(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise RuntimeError("planted")

    executor = generator._draft._executor  # type: ignore[union-attr]
    real = executor.run
    executor.run = lambda batch: (refuse(), real(batch))[1]
    assert run(generator, requests) == wanted and calls == 3
    assert run(generator, [Request("later", [7, 8], SamplingParams(max_new_tokens=3))])
    assert generator.load().free_pages == generator.pages.count
