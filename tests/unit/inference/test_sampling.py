"""Each option against its definition written out in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from deepspeed.errors import RequestError
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.request import Request
from deepspeed.inference.sampler import Sampler
from deepspeed.inference.sampling_params import SamplingParams


def chances(logits, options: SamplingParams, prompt=(), made=(), ends=()) -> list[float]:
    """Probabilities of the next token, by the definitions, in Python floats."""
    scores = list(logits)
    for token in {*prompt, *made}:
        scores[token] = (
            scores[token] / options.repetition_penalty
            if scores[token] > 0
            else scores[token] * options.repetition_penalty
        )
    for token in set(made):
        scores[token] -= options.presence_penalty + options.frequency_penalty * list(made).count(token)
    for token, bias in options.logit_bias.items():
        scores[token] += bias
    if len(made) < options.min_new_tokens:
        for token in ends:
            scores[token] = -math.inf
    if not options.temperature:
        best = max(range(len(scores)), key=lambda t: scores[t])
        return [float(t == best) for t in range(len(scores))]
    weights = [math.exp((score - max(scores)) / options.temperature) for score in scores]
    order = sorted(range(len(scores)), key=lambda t: -weights[t])
    kept = order[: options.top_k or None]
    total, sums, nucleus = sum(weights[t] for t in kept), 0.0, []
    for token in kept:
        if sums < options.top_p:
            nucleus.append(token)
        sums += weights[token] / total
    nucleus = [token for token in nucleus if weights[token] >= options.min_p * weights[order[0]]]
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(len(scores))]


CASES = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.0, top_p=0.6),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "all three": SamplingParams(temperature=1.3, top_k=6, top_p=0.8, min_p=0.1),
    "repetition": SamplingParams(temperature=1.0, repetition_penalty=2.5),
    "presence": SamplingParams(temperature=1.0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=1.0, frequency_penalty=0.9),
    "bias": SamplingParams(temperature=1.0, logit_bias={3: 2.5, 1: -100.0}),
    "minimum": SamplingParams(temperature=1.0, min_new_tokens=9),
    "greedy, penalised": SamplingParams(repetition_penalty=3.0, frequency_penalty=2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_an_option_is_its_definition(name: str) -> None:
    options, prompt, made, ends = CASES[name], [0, 2, 5], [2, 6, 6, 4], {6}
    logits = [1.2, 0.3, 1.9, -0.7, 0.1, 1.0, 1.5, -2.0]
    wanted = chances(logits, options, prompt, made, ends)
    counts = [0] * len(logits)
    draws = 4000 if options.temperature else 1
    sampler = Sampler(options, prompt, frozenset(ends))
    for token in made:
        sampler.note(token)
    row = torch.tensor(logits)
    adjusted = sampler._adjusted(row)
    for _ in range(draws):
        counts[sampler._drawn(adjusted) if options.temperature else int(adjusted.argmax())] += 1
    for token, (count, chance) in enumerate(zip(counts, wanted, strict=True)):
        assert abs(count / draws - chance) < 0.035, (token, count / draws, chance)
        assert (count > 0) <= (chance > 0), "a token that is barred was drawn"


def test_the_same_seed_draws_the_same_and_another_index_others() -> None:
    rows = torch.randn(40, 50, generator=torch.Generator().manual_seed(1))

    def drawn(**options):
        sampler = Sampler(SamplingParams(temperature=1.5, **options), [])
        return [sampler.next(row)[0] for row in rows]

    assert drawn(seed=7) == drawn(seed=7)
    assert len({tuple(drawn(seed=7, index=i)) for i in range(5)} | {tuple(drawn(seed=8))}) == 6
    assert drawn() != drawn()


def test_logprobs_are_those_of_the_model_whatever_is_drawn_from() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    token, found = Sampler(SamplingParams(logprobs=2, logit_bias={0: 100.0}), []).next(logits)
    right = logits.log_softmax(0)
    assert token == found.token == 0 and found.logprob == pytest.approx(float(right[0]))
    assert [t for t, _ in found.top] == [1, 3] and found.top[0][1] == pytest.approx(float(right[1]))


class Letters:
    """A tokenizer of pieces, one of which is half a character."""

    pieces = ["a", "b", "ab", "END", "E", "N", "D", " ", "Dab"]

    def decode(self, tokens):
        return "".join(self.pieces[token] for token in tokens)


def test_a_stop_string_is_found_across_tokens_as_in_the_whole_text() -> None:
    draw = random.Random(5)
    for _ in range(300):
        tokens = [draw.randrange(len(Letters.pieces)) for _ in range(30)]
        stops = draw.sample(["END", "ab ", "NDa", "bb", "EE E"], 2)
        watch, text = TextStream(Letters(), stops), ""
        for token in tokens:
            text += Letters.pieces[token]
            watch.push([token])
            found = watch.matched
            places = [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]
            assert found == (min(places)[2] if places else None)
            if found:
                break


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0}, {"max_new_tokens": True}, {"max_new_tokens": 1.5}, {"min_new_tokens": 200},
        {"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": "hot"},
        {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2}, {"repetition_penalty": 0},
        {"presence_penalty": None}, {"logit_bias": {"x": 1.0}}, {"logit_bias": {1: float("nan")}}, {"logprobs": -1},
        {"seed": "s"}, {"stop": ("",)}, {"stop": (3,)}, {"stop_token_ids": (-1,)}, {"index": -1},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_outside_its_range_is_refused_by_name(wrong) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_one_stop_string_may_come_as_a_string() -> None:
    assert SamplingParams(stop="END").stop == ("END",) and Request("x", [1]).sampling.temperature == 0
