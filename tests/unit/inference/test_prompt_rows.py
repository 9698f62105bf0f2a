"""Log-probabilities of prompts and embeddings against the model's own forward, and order by priority."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from deepspeed.errors import RequestError
from deepspeed.inference import Generator, Request, SamplingParams
from tests.unit.inference.test_scheduler import Machine
from tests.unit.inference.toys import alone, gpt_neo, llama, mamba, prompts

NEW, MOST = 6, 3
SCORED = SamplingParams(max_new_tokens=NEW, ignore_eos=True, prompt_logprobs=MOST)
ONLY = SamplingParams(max_new_tokens=0, prompt_logprobs=MOST)
PLAIN = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
PAGE = 2 * 2 * 2 * 16 * 4 * 8  # bytes of 8 tokens: keys and values, layers, heads, head size, fp32
SHARED = prompts((40,))[0]
TEXTS = [SHARED + prompt for prompt in prompts((1, 5, 17, 33))] + prompts((1, 2, 60))


def through_modules(generator: Generator) -> Generator:
    """The same generator without its native passes."""
    generator._executor.plain.store = generator._executor.store
    generator._executor = generator._executor.plain
    return generator


@torch.no_grad()
def own(model: Any, prompt: list[int]) -> tuple[list[float], list[int], list[list[int]], torch.Tensor]:
    """(log-probability of each token after the first, its rank, the most probable tokens, last hidden states)."""
    ids = torch.tensor([prompt])
    chances = model(ids).logits[0].float().log_softmax(-1)
    values = [float(row[token]) for row, token in zip(chances, prompt[1:], strict=False)]
    ranks = [int((row >= row[token]).sum()) for row, token in zip(chances, prompt[1:], strict=False)]
    return values, ranks, chances[:-1].topk(MOST).indices.tolist(), model.base_model(ids)[0][0]


def run(generator: Generator, requests: list[Request]) -> dict[Any, list[Any]]:
    """All outputs, by ident. Requests with a priority arrive one by one."""
    found: dict[Any, list[Any]] = {request.ident: [] for request in requests}
    left = list(requests)
    while left or not generator.idle:
        while left:
            generator.submit(left.pop(0))
            if left and left[0].priority:
                break
        for output in generator.step():
            found[output.ident].append(output)
    return found


WAYS = {
    "whole": (llama, {}),
    "chunks": (llama, {"page_size": 3, "max_batch_tokens": 16, "max_sequences": 4, "prompt_chunk": 5}),
    "preempted": (llama, {"cache_bytes": 11 * PAGE, "page_size": 8, "max_batch_tokens": 24, "speculation": 3}),
    "modules": (llama, {"max_batch_tokens": 24}),
    "gathered": (gpt_neo, {"max_batch_tokens": 24, "page_size": 5}),
    "generate": (mamba, {"max_sequences": 2}),
}


FAST = ("chunks", "preempted")


@pytest.mark.parametrize("way", [way if way in FAST else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_prompts_are_scored_as_by_the_model_itself(way: str) -> None:
    make, options = WAYS[way]
    model = make()
    generator = Generator(model, **options)
    generator = through_modules(generator) if way == "modules" else generator
    wanted = [own(model, prompt) for prompt in TEXTS]
    said = [alone(model, prompt, NEW) for prompt in TEXTS]
    for _ in range(2):  # the second time with the prefixes of the first
        kinds = itertools.cycle((SCORED, ONLY, PLAIN))
        requests = [
            Request((number, text), prompt, next(kinds), priority=-text if way == "preempted" else 0)
            for number in range(2)
            for text, prompt in enumerate(TEXTS)
        ]
        found = run(generator, requests)
        for request in requests:
            outputs, (values, ranks, tops, _) = found[request.ident], wanted[request.ident[1]]
            tokens = [token for output in outputs for token in output.tokens]
            assert tokens == said[request.ident[1]][: request.sampling.max_new_tokens]
            assert outputs[-1].finish_reason == "length"
            scored = [output.prompt_logprobs for output in outputs]
            assert scored[1:] == [None] * (len(outputs) - 1)
            if request.sampling.prompt_logprobs is None:
                assert scored[0] is None
                continue
            assert scored[0][0] is None and len(scored[0]) == len(request.tokens)
            entries = scored[0][1:]
            assert [entry.token for entry in entries] == list(request.tokens[1:])
            assert [entry.logprob for entry in entries] == pytest.approx(values, abs=2e-4, rel=1e-5)
            assert [entry.rank for entry in entries] == ranks
            assert [[token for token, _ in entry.top] for entry in entries] == tops
    load = generator.load()
    assert load.free_pages == load.pages
    if way == "preempted":
        assert load.preemptions > 0
    if way != "generate":
        assert 0 < load.reused < load.looked_up
        assert found[1, 0][0].cached_tokens == (len(TEXTS[0]) - 1 if found[1, 0][0].prompt_logprobs is None else 0)


EMBEDDED = [("chunks", "mean"), ("preempted", "last")]


@pytest.mark.parametrize(
    ("way", "pooling"),
    EMBEDDED + [pytest.param(*one, marks=pytest.mark.slow)
                for one in itertools.product(WAYS, ("mean", "last", "cls")) if one not in EMBEDDED],
)  # fmt: skip
def test_embeddings_are_pooled_hidden_states(way: str, pooling: str) -> None:
    make, options = WAYS[way]
    model = make()
    generator = Generator(model, **options)
    generator = through_modules(generator) if way == "modules" else generator
    said = [alone(model, prompt, NEW) for prompt in TEXTS]
    for _ in range(2):
        requests = [Request(("text", text), prompt, PLAIN) for text, prompt in enumerate(TEXTS)]
        before = -1 if way == "preempted" else 0
        requests += [
            Request(("state", text), prompt, pooling=pooling, priority=before * text)
            for text, prompt in enumerate(TEXTS)
        ]
        found = run(generator, requests)
        for text, prompt in enumerate(TEXTS):
            assert [token for output in found["text", text] for token in output.tokens] == said[text]
            (output,) = found["state", text]
            states = own(model, prompt)[3]
            right = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
            assert output.tokens == [] and output.finish_reason == "stop"
            assert torch.allclose(torch.tensor(output.embedding), right, atol=1e-5, rtol=1e-5)
    assert generator.load().free_pages == generator.pages.count


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="max_new_tokens"):
        SamplingParams(max_new_tokens=0)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=-1)
    for fields in ({"pooling": "max"}, {"priority": 1.5}):
        with pytest.raises(RequestError, match=next(iter(fields))):
            Request("a", [5], **fields)


def test_a_prompt_without_finite_logits_is_an_error_of_its_own() -> None:
    model = llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    generator = Generator(model, max_batch_tokens=8)
    prompt = prompts((20,))[0]
    ill = [*prompt[:9], 7, *prompt[9:]]
    kinds = {"scored": ONLY, "state": SamplingParams(), "well": ONLY}
    requests = [Request(name, ill if name != "well" else prompt, kind, pooling="mean" if name == "state" else None)
                for name, kind in kinds.items()]  # fmt: skip
    found = {name: outputs[-1] for name, outputs in run(generator, requests).items()}
    assert found["scored"].finish_reason == found["state"].finish_reason == "error"
    assert found["well"].finish_reason == "length" and len(found["well"].prompt_logprobs) == len(prompt)
    assert generator.load().free_pages == generator.pages.count


# -- priorities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [llama, pytest.param(mamba, marks=pytest.mark.slow)])
def test_lower_numbers_come_first_and_equal_ones_in_order(make: Any) -> None:
    model, given = make(), prompts((9, 12, 30, 21, 5, 17))
    said = [alone(model, prompt, NEW) for prompt in given]
    priorities = (5, 0, 0, -3, 5, 7)
    generator = Generator(model, max_sequences=1)
    requests = [Request(i, prompt, PLAIN, priority=priorities[i]) for i, prompt in enumerate(given)]
    order = []
    for request in requests[:-1]:
        generator.submit(request)
    tokens: dict[Any, list[int]] = {i: [] for i in range(len(given))}
    late = [requests[-1], Request("first", given[0], PLAIN, priority=-9)]
    while not generator.idle:
        for output in generator.step():
            tokens.setdefault(output.ident, []).extend(output.tokens)
            order += [output.ident] if output.finish_reason else []
        if len(tokens[3]) == 2:  # the first one is under way
            for request in late:
                generator.submit(request)
            late = []
    assert order == ["first", 3, 1, 2, 0, 4, 5]
    assert [tokens[i] for i in range(len(given))] == said and tokens["first"] == said[0]


def test_pages_go_to_the_first_by_priority() -> None:
    model, given = llama(), prompts((60, 61, 62, 63, 64))
    said = [alone(model, prompt, NEW) for prompt in given]
    generator = Generator(model, cache_bytes=18 * PAGE, page_size=8)
    for i in range(3):
        generator.submit(Request(i, given[i], PLAIN, priority=1))
    found: dict[Any, list[int]] = {i: [] for i in range(5)}
    order = []
    for step in itertools.count():
        if step == 2:
            assert generator.load().waiting == 1
            for i in (3, 4):
                generator.submit(Request(i, given[i], PLAIN, priority=0))
        for output in generator.step():
            found[output.ident] += output.tokens
            order += [output.ident] if output.finish_reason else []
        if generator.idle:
            break
    assert order[:2] == [3, 4] and sorted(order[2:]) == order[2:] and generator.load().preemptions >= 1
    assert [found[i] for i in range(5)] == said


@pytest.mark.parametrize("reuse", [True, False])
def test_every_order_of_priorities_progresses_and_keeps_the_pages(reuse: bool) -> None:
    for priorities in itertools.product((0, 1, 2), repeat=4):
        machine = Machine(7, 2, 5, 2, 2, reuse)
        for number, priority in enumerate(priorities):
            tokens = [1, 2, 3, 4, 1, 2 + number % 2][: 6 - number % 3]
            machine.submit(str(number), tokens, 3, priority)
            machine.step()
        for _ in range(60):
            if machine.scheduler.idle:
                break
            machine.step()
        assert machine.scheduler.idle and machine.pages.available == machine.pages.count
