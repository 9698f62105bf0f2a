"""Beam search against Transformers' own: tokens, scores, ends."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from deepspeed.errors import LengthError, RequestError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.executors.paged import PagedExecutor
from tests.unit.inference.test_generator import Numbers, run
from tests.unit.inference.toys import gpt_neo, llama, mamba, prompts

TIGHT = {"page_size": 3, "max_batch_tokens": 11, "max_sequences": 6, "prefix_cache": False}


@torch.no_grad()
def of_transformers(model: Any, prompt: list[int], new: int, ends: list[int], **options: Any) -> list[tuple]:
    """(tokens, score) of each answer."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=ends or None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    answers = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        first = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append((row[:first], score))
    return answers


def check(found: Any, wanted: list[tuple], why: Any) -> None:
    assert [beam.tokens for beam in found] == [tokens for tokens, _ in wanted], why
    for beam, (_, score) in zip(found, wanted, strict=True):
        assert beam.score == pytest.approx(score, rel=1e-4, abs=1e-4), why


def submitted(generator: Generator, requests: list[Request]) -> dict:
    """Last output of each request."""
    for request in requests:
        generator.submit(request)
    last = {}
    while not generator.idle:
        for output in generator.step():
            last[output.ident] = output
    assert generator.load().free_pages == generator.load().pages
    return last


def compared(model: Any, generator: Generator, trials: Any, lengths: tuple[int, ...] = (1, 7, 17)) -> set:
    """Random options; all requests of `trials` together in one batch. Returns the reasons why answers ended."""
    given, requests, wanted = prompts(lengths), [], {}
    ends = [3, 40, 77, 121, 199, 250, 30, 31, 32, 33, 34, 35]
    model.generation_config.eos_token_id = ends
    generator._ends = frozenset(ends)
    for trial in trials:
        rng = random.Random(trial)
        penalty, early = rng.choice([1.0, 0.0, -1.0, 2.0, 0.5]), rng.choice([True, False, "never"])
        options = {"length_penalty": penalty, "early_stopping": early}
        prompt, beams, new = rng.choice(given), rng.choice([2, 3, 4]), rng.choice([1, 3, 8, 12])
        least = min(rng.choice([0, 0, 3]), new)
        own = rng.choice([[], ends])
        sampling = SamplingParams(
            max_new_tokens=new, min_new_tokens=least, beams=beams, ignore_eos=not own, logprobs=2, **options
        )
        wanted[trial] = of_transformers(
            model,
            prompt,
            new,
            own,
            num_beams=beams,
            num_return_sequences=beams,
            min_new_tokens=least or None,
            **options,
        )
        requests.append(Request(trial, prompt, sampling))
    reasons = set()
    for trial, output in submitted(generator, requests).items():
        assert output.beams is not None and output.tokens == output.beams[0].tokens
        check(output.beams, wanted[trial], (trial, requests))
        for beam in output.beams:
            total = sum(each.logprob for each in beam.logprobs)
            power = next(request.sampling.length_penalty for request in requests if request.ident == trial)
            assert total / len(beam.tokens) ** power == pytest.approx(beam.score, rel=1e-3, abs=1e-3)
            assert [each.token for each in beam.logprobs] == beam.tokens
        reasons |= {beam.finish_reason for beam in output.beams}
    return reasons


def test_beams_are_those_of_transformers_alone_and_among_others() -> None:
    model = llama(num_hidden_layers=1)
    native = Generator(model, **TIGHT)
    assert native.kind == "packed" and not isinstance(native._executor, PagedExecutor)
    assert compared(model, native, range(8)) == {"stop", "length"}


def test_beams_through_the_modules() -> None:
    for make, trials in ((llama, range(20, 24)), (gpt_neo, range(30, 32))):
        model = make(num_hidden_layers=1) if make is llama else make()
        generator = Generator(model, **TIGHT)
        if make is llama:
            generator._executor = generator._executor.plain
            assert isinstance(generator._executor, PagedExecutor)
            generator._executor.store = generator._executor.store.resized(generator.pages.count, 3)
        compared(model, generator, trials)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, TIGHT])
def test_every_option_of_beams(options: dict) -> None:
    model = llama(num_hidden_layers=1)
    for first in range(100, 200, 20):
        assert compared(model, Generator(model, **options), range(first, first + 20), (1, 5, 16, 33)) >= {"length"}


def test_beams_beside_requests_that_draw_and_few_pages_that_preempt_them() -> None:
    model, given = llama(num_hidden_layers=1), prompts((9, 14, 20))
    hot = SamplingParams(max_new_tokens=20, temperature=1.1, seed=4, ignore_eos=True)
    searched = SamplingParams(max_new_tokens=10, beams=3, ignore_eos=True)
    drawn = run(Generator(model), [Request(0, given[0], hot)])[0][0]
    wanted = [of_transformers(model, prompt, 10, [], num_beams=3, num_return_sequences=3) for prompt in given[1:]]
    page = 1 * 2 * 2 * 16 * 4 * 4  # bytes of 4 tokens
    generator = Generator(model, page_size=4, cache_bytes=18 * page, prefix_cache=False)
    found = run_all(generator, [Request("hot", given[0], hot), *(Request(i, given[1 + i], searched) for i in range(2))])
    assert found["hot"][0] == drawn
    for i in range(2):
        check(found[i][1], wanted[i], i)
    assert generator.load().preemptions > 0 and generator.load().free_pages == 18


def run_all(generator: Generator, requests: list[Request]) -> dict:
    """(tokens, beams) by request."""
    for request in requests:
        generator.submit(request)
    found: dict = {request.ident: ([], None) for request in requests}
    while not generator.idle:
        for output in generator.step():
            found[output.ident] = (found[output.ident][0] + output.tokens, output.beams)
    return found


def test_stop_strings_end_beams_as_end_tokens_do() -> None:
    """A token of three digits as a stop string, and as an end token: the same answers."""
    model, prompt = llama(num_hidden_layers=1), prompts((9,))[0]
    options = {"max_new_tokens": 12, "beams": 3, "ignore_eos": True, "length_penalty": -2.0}
    generator = Generator(model, tokenizer=Numbers())
    plain = submitted(generator, [Request(0, prompt, SamplingParams(**options))])[0].beams
    token = next(token for token in plain[0].tokens[2:] if token >= 100)
    ways = {"token": {"stop_token_ids": (token,)}, "text": {"stop": (f" {token}", "never")}}
    for least in (0, 6):
        both = {
            name: Request(name, prompt, SamplingParams(**options, **way, min_new_tokens=least))
            for name, way in ways.items()
        }
        found = submitted(generator, list(both.values()))
        if not least:
            by_token, by_text = (found[name].beams for name in ways)
            assert [beam.tokens for beam in by_token] == [beam.tokens for beam in by_text] != [b.tokens for b in plain]
            assert [beam.score for beam in by_token] == [beam.score for beam in by_text]
            assert {beam.matched for beam in by_token} >= {token} and {b.matched for b in by_text} >= {f" {token}"}
        else:
            assert all(len(beam.tokens) > least for output in found.values() for beam in output.beams)


def test_a_cancel_frees_all_beams() -> None:
    model, given = llama(num_hidden_layers=1), prompts((9, 14))
    generator = Generator(model, page_size=4)
    searched = SamplingParams(max_new_tokens=10, beams=4, ignore_eos=True)
    wanted = submitted(generator, [Request(0, given[1], searched)])[0].beams
    for ident, prompt in enumerate(given):
        generator.submit(Request(ident, prompt, searched))
    for _ in range(4):
        assert not generator.step()
    assert generator.load().running == 8
    assert generator.cancel(0) and generator.load().running == 4
    outputs = []
    while not generator.idle:
        outputs += generator.step()
    assert [(o.ident, o.finish_reason, o.beams is None) for o in outputs] == [
        (0, "cancelled", True),
        (1, "length", False),
    ]
    assert outputs[1].beams == wanted and generator.load().free_pages == generator.load().pages


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.7}, "temperature is not available with beams"),
        ({"logit_bias": {3: 1.0}}, "logit_bias is not available with beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty is not"),
        ({"early_stopping": "later"}, "early_stopping has to be"),
        ({"length_penalty": float("inf")}, "length_penalty has to be"),
        ({"beams": 0}, "beams has to be"),
        ({"beams": 1, "length_penalty": 2.0}, "length_penalty needs beams"),
    ],
)
def test_options_that_beams_do_not_have_are_refused(options: dict, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        SamplingParams(**{"beams": 2, **options})


def test_beams_that_cannot_run_are_refused_before_any_work() -> None:
    searched = SamplingParams(max_new_tokens=30, beams=5)
    model = llama(num_hidden_layers=1)
    with pytest.raises(RequestError, match="5 beams are more than the 4 sequences"):
        Generator(model, max_sequences=4).submit(Request(0, [5], searched))
    small = Generator(model, cache_bytes=20 * 1 * 2 * 2 * 16 * 4 * 4, page_size=4)
    with pytest.raises(LengthError, match="in 5 beams"):
        small.submit(Request(0, [5] * 20, searched))
    with pytest.raises(RequestError, match="own generate"):
        Generator(mamba()).submit(Request(0, [5], searched))
    assert small.idle
