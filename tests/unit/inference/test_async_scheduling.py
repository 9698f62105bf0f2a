"""Passes that are launched before the tokens in front of them are read: the same answers as without."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.inference import Generator, Request, SamplingParams, async_scheduling
from deepspeed.inference.async_scheduling import PassAhead
from deepspeed.inference.executors.packed_decoder import PackedDecoder
from tests.unit.inference.reference_kernels import ReferenceKernels, only_way
from tests.unit.inference.toys import alone, llama, prompts

MORE = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "seed": 3},
    "cut": {"temperature": 1.2, "top_p": 0.8, "seed": 4},
    "later": {"temperature": 0.8, "seed": 5, "min_new_tokens": 2},
    "penalties": {"repetition_penalty": 1.3},
    "scores": {"logprobs": 1},
}


def generator_of(model: Any, **options: Any) -> Generator:
    with only_way(ReferenceKernels()):
        generator = Generator(model, page_size=4, **{"cache_bytes": 1 << 20, "max_batch_tokens": 24, **options})
    assert type(generator._executor) is PackedDecoder
    return generator


def launched(run: Any) -> tuple[Any, int]:
    """The result of a function, and how many passes it launched ahead."""
    count, plain = 0, async_scheduling.launch_pass

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return plain(*arguments)

    with mock.patch.object(async_scheduling, "launch_pass", counted):
        return run(), count


def schedule(generator: Generator, seed: int, ends: tuple[int, ...], kinds: tuple[str, ...]) -> dict[int, Any]:
    """Answers of requests that join at drawn steps, end by tokens or by length, or are cancelled at a drawn length."""
    draws = random.Random(seed)
    waiting = [(draws.randrange(12), number) for number in range(8)]
    texts = prompts(tuple(draws.randrange(2, 12) for _ in waiting))
    cancelled = {number: draws.randrange(1, 6) for _, number in waiting if draws.random() < 0.25}
    answers: dict[int, Any] = {number: ([], None) for _, number in waiting}
    for step in range(200):
        for when, number in waiting:
            if when == step:
                sampling = SamplingParams(
                    max_new_tokens=draws.randrange(2, 12), stop_token_ids=ends, **MORE[kinds[number % len(kinds)]]
                )
                generator.submit(Request(number, texts[number], sampling))
        for output in generator.step():
            tokens, reason = answers[output.ident]
            assert reason is None and output.error is None
            answers[output.ident] = tokens + output.tokens, output.finish_reason
            if len(tokens) + len(output.tokens) >= cancelled.get(output.ident, 99) and output.finish_reason is None:
                generator.cancel(output.ident)
    assert generator.idle and generator.pages.available == generator.pages.count
    return answers


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.parametrize("kinds", [("greedy",), ("drawn", "cut"), tuple(MORE)], ids=["greedy", "drawn", "all"])
@pytest.mark.parametrize("room", [1 << 20, 12 * 4 * 2048], ids=["room", "preempted"])
def test_answers_are_those_without_passes_ahead(seed: int, kinds: tuple[str, ...], room: int) -> None:
    model = llama()
    each = generator_of(model)._executor.store.bytes_per_page()  # type: ignore[union-attr]
    options = {"cache_bytes": room if room == 1 << 20 else 12 * each, "prefix_cache": False}
    with mock.patch.object(PassAhead, "launch", lambda *_: None):
        usual = schedule(generator_of(model, **options), seed, (), kinds)
    ends = tuple({tokens[2] for tokens, _ in usual.values() if len(tokens) > 3})  # which end an answer in its middle
    with mock.patch.object(PassAhead, "launch", lambda *_: None):
        wanted = schedule(generator_of(model, **options), seed, ends, kinds)
    answers, count = launched(lambda: schedule(generator_of(model, **options), seed, ends, kinds))
    assert answers == wanted
    assert count > 0 or len(kinds) > 2
    assert {reason for _, reason in answers.values()} >= {"stop", "length"}


def test_a_pass_ahead_is_dropped_when_weights_change_between_steps() -> None:
    model = llama()
    generator, (prompt,) = generator_of(model), prompts((5,))
    request = Request("a", prompt, SamplingParams(max_new_tokens=9, ignore_eos=True))
    generator.submit(request)
    _, count = launched(lambda: [generator.step() for _ in range(3)])
    assert count == 3
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    with pytest.raises(UsageError, match="weights"):
        generator.step()
    assert generator.cancel("a") and [output.finish_reason for output in generator.step()] == ["cancelled"]
    assert generator.generate([prompt], SamplingParams(max_new_tokens=6, ignore_eos=True)) == [alone(model, prompt, 6)]


def test_values_that_are_not_finite_end_the_request_behind_which_a_pass_is_launched() -> None:
    model = llama()
    generator, texts = generator_of(model), prompts((4, 6))
    plain, calls = PackedDecoder.compute, 0

    def poisoned(self: Any, inputs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = plain(self, inputs)
        if calls == 4:
            logits[0] = torch.nan
        return logits

    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    for number, prompt in enumerate(texts):
        generator.submit(Request(number, prompt, sampling))
    outputs: dict[int, list[Any]] = {0: [], 1: []}
    with mock.patch.object(PackedDecoder, "compute", poisoned):
        while not generator.idle:
            for output in generator.step():
                outputs[output.ident].append(output)
    assert outputs[0][-1].finish_reason == "error" and len([t for each in outputs[0] for t in each.tokens]) == 3
    assert [token for each in outputs[1] for token in each.tokens] == alone(model, texts[1], 8)


def test_a_pass_ahead_that_fails_costs_no_token() -> None:
    model = llama()
    texts, sampling = prompts((4, 6)), SamplingParams(max_new_tokens=8, ignore_eos=True)
    generator = generator_of(model)
    with mock.patch.object(
        async_scheduling, "launch_pass", side_effect=RuntimeError("no memory for two passes")
    ) as calls:
        assert generator.generate(texts, sampling) == [alone(model, text, 8) for text in texts]
    assert calls.call_count > 3 and generator.pages.available == generator.pages.count


def test_an_end_that_is_interrupted_leaves_no_sequence_behind() -> None:
    generator, (prompt,) = generator_of(llama(), max_sequences=1), prompts((5,))
    generator.submit(Request("a", prompt, SamplingParams(max_new_tokens=9, ignore_eos=True)))
    generator.step()
    with mock.patch.object(PassAhead, "drop", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        generator.cancel("a")
    assert generator.pages.available == generator.pages.count
    assert [output.finish_reason for output in generator.step()] == ["cancelled"]
    assert len(generator.generate([prompt], SamplingParams(max_new_tokens=3, ignore_eos=True))[0]) == 3
