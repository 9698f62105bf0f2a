"""Cases of sampling on the device: the tokens of the CPU's sampler with the same random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from deepspeed.inference.logprobs import kept_probs
from deepspeed.inference.sampler import Sampler
from deepspeed.inference.sampler import draw as draw_on_host
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.ops.triton import sampling as host
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import sampling_variants
from deepspeed.ops.triton.sampling import draw, options_of, sample, uniform
from tests.kernels.pairs import pairwise

Check = Callable[[Kernels], None]
ROWS = 2
OPTIONS = {
    "temperature": (0.0, 1.0, 0.3, 2.5, 1e-8), "top_k": (0, 1, 7, 5000), "top_p": (1.0, 0.05, 0.7, 0.99),
    "min_p": (0.0, 0.03, 1.0), "penalties": ((1.0, 0.0, 0.0), (1.4, 0.0, 0.0), (0.7, 0.5, -0.3), (1.0, 0.0, 0.6)),
    "vocabulary": (50, 200, 1300), "ties": (False, True), "dtype": (torch.float32, torch.bfloat16),
}  # fmt: skip


_PLAIN = {
    "temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalties": (1.0, 0.0, 0.0), "vocabulary": 200,
    "ties": True, "dtype": torch.float32,
}  # fmt: skip
# Each way by itself: nothing is cut, and one cut at a time.
SINGLE = [_PLAIN | changes for changes in ({}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.0})]
# With small sizes: several tiles, chunks and blocks, the last ones not full.
SMALL = {"PART": 128, "TILE": 4, "CHUNK": 512, "BLOCK": 128}
LONG = [
    _PLAIN | {"vocabulary": 1300} | changes
    for changes in (
        {}, {"top_k": 300}, {"top_p": 0.9, "ties": False}, {"temperature": 0.0}, {"temperature": 9.0, "top_p": 0.99},
        {"top_k": 900, "top_p": 0.8, "min_p": 1e-4}, {"temperature": 0.02, "top_k": 40}, {"min_p": 1e-9},
    )
]  # fmt: skip


class Numbered(Sampler):
    """The CPU's sampler with random numbers that are given."""

    numbers: list[float]

    def random(self) -> torch.Tensor:
        return torch.tensor(self.numbers.pop(0), dtype=torch.float64)


def _with_small_sizes(check: Check) -> Check:
    """The check with small sizes of the kernels."""

    def run(kernels: Kernels) -> None:
        with mock.patch.object(host, "sampling_variants", lambda dtype: sampling_variants(dtype, SMALL)):
            check(kernels)

    return run


def _case(case: dict[str, Any]) -> Check:
    repetition, presence, frequency = case["penalties"]
    sampling = SamplingParams(
        temperature=case["temperature"], top_k=case["top_k"], top_p=case["top_p"], min_p=case["min_p"],
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, seed=1,
    )  # fmt: skip
    vocabulary, penalised = case["vocabulary"], case["penalties"] != (1.0, 0.0, 0.0)

    def check(kernels: Kernels) -> None:
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(vocabulary, (9,), generator=generator).tolist() for _ in range(ROWS)]
        table = torch.zeros(ROWS, vocabulary, dtype=torch.int32)
        for row, prompt in enumerate(prompts):
            table[row, prompt] = 1
        samplers = [Numbered(sampling, prompt) for prompt in prompts]
        for step in range(2):
            # Around zero, as penalties look at the sign; large ones overflow unless the largest is taken off.
            logits = torch.randn(ROWS, vocabulary, generator=generator) * (60.0 if step else 2.0)
            if case["ties"]:
                logits = logits.round()
            logits[:, 5] = -math.inf
            logits = logits.to(case["dtype"])
            numbers = torch.rand(ROWS, dtype=torch.float64, generator=generator)
            numbers[0] = [0.0, 1 - 2.0**-20][step]
            options, counted = options_of([sampling] * ROWS), table if penalised else None
            tokens = sample(kernels, logits, options, numbers, counted).tolist()
            if not penalised and not step:
                alone = sample(kernels, logits[1:2], options[1:2], numbers[1:2])
                assert alone.tolist() == tokens[1:2], "a row depends on its neighbours"
            for row, sampler in enumerate(samplers):
                sampler.numbers = [float(numbers[row])]
                token, _ = sampler.next(logits[row])
                assert tokens[row] == token, f"step {step}, row {row}: {tokens[row]} instead of {token}"
                if penalised:
                    assert int(table[row, token]) >= 3, "the table does not count a token"

    return check


def _counts(kernels: Kernels) -> None:
    """The table after some draws is that of the tokens."""
    sampling = SamplingParams(temperature=2.0, presence_penalty=0.1)
    table, wanted = torch.zeros(2, 40, dtype=torch.int32), torch.zeros(2, 40, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        numbers = torch.rand(2, dtype=torch.float64, generator=generator)
        tokens = sample(kernels, torch.zeros(2, 40), options_of([sampling] * 2), numbers, table)
        for row, token in enumerate(tokens.tolist()):
            wanted[row, token] = (int(wanted[row, token]) | 1) + 2
        assert torch.equal(table, wanted)
    assert int((table > 3).sum()) > 0


def _not_finite(kernels: Kernels) -> None:
    logits = torch.randn(5, 60)
    logits[0, 3], logits[1, 4], logits[2], logits[3, 59] = math.nan, math.inf, -math.inf, math.nan
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)):
        table = torch.zeros(5, 60, dtype=torch.int32)
        tokens = sample(kernels, logits, options_of([sampling] * 5), torch.full((5,), 0.5).double(), table).tolist()
        assert tokens[:4] == [-1] * 4 and tokens[4] >= 0
        assert table[:4].abs().sum() == 0


def _far_apart(kernels: Kernels) -> None:
    """The first of equal largest scores, a NaN and an infinity count in any part, also in the last one of one token."""
    logits = torch.randn(6, 1281, generator=torch.Generator().manual_seed(5))
    logits[0, [300, 700, 1280]], logits[1, [1280, 640]], logits[2, 1280] = 9.0, 9.0, 9.0
    logits[3, 1280], logits[4, 600], logits[5, 1000] = math.nan, math.inf, -math.nan
    for options in ({}, {"temperature": 0.01}, {"temperature": 0.01, "top_k": 2}):
        rows, numbers = options_of([SamplingParams(**options)] * 6), torch.zeros(6).double()
        assert sample(kernels, logits, rows, numbers).tolist() == [300, 640, 1280, -1, -1, -1], options
    assert sample(kernels, logits, options_of([SamplingParams()] * 6), None).tolist() == [300, 640, 1280, -1, -1, -1]


def _mixed(kernels: Kernels) -> None:
    """Rows with options of their own choose what they choose alone, and what the host chooses."""
    generator = torch.Generator().manual_seed(7)
    samplings = [
        SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=0.7, top_k=50),
        SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0, min_p=0.02),
        SamplingParams(temperature=1.2, top_k=400, top_p=0.95, min_p=0.001),
    ]  # fmt: skip
    logits = torch.randn(6, 1280, generator=generator) * 3
    numbers = torch.rand(6, dtype=torch.float64, generator=generator)
    tokens = sample(kernels, logits, options_of(samplings), numbers).tolist()
    for row, sampling in enumerate(samplings):
        line, number = logits[row : row + 1], numbers[row : row + 1]
        wanted = draw_on_host(line, sampling, number) if sampling.temperature else line.argmax(-1)
        alone = sample(kernels, line, options_of([sampling]), number)
        assert tokens[row] == int(wanted[0]) == int(alone[0]), sampling


def _numbers(kernels: Kernels) -> None:
    seeds = torch.tensor([0, 1, -3, 2**62 + 12345, 7] * 40)
    counts = torch.arange(200, dtype=torch.int32) // 5
    numbers = draw(kernels, seeds, counts)
    assert numbers.tolist() == [
        uniform(seed, count) for seed, count in zip(seeds.tolist(), counts.tolist(), strict=True)
    ]
    assert len(set(numbers.tolist())) == 200 and 0.4 < float(numbers.mean()) < 0.6
    # Known answers of Philox 4x32-10 (counter and key of zeros): 6627e8d5 e169c58d …
    assert uniform(0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def _shares(kernels: Kernels) -> None:
    """Tokens come as often as their probabilities say."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(20, 4).contiguous()
    numbers = (torch.arange(20).double() + 0.5) / 20
    for sampling, shares in (
        (SamplingParams(temperature=1.0), [10, 6, 3, 1]),
        (SamplingParams(temperature=1.0, top_p=0.79), [13, 7, 0, 0]),
    ):
        tokens = sample(kernels, logits, options_of([sampling] * 20), numbers).long()
        assert (tokens.bincount(minlength=4) - torch.tensor(shares)).abs().max() <= 1


def _exact(kernels: Kernels) -> None:
    """A number that is a sum of probabilities falls on the token after it."""
    logits, numbers = torch.zeros(5, 4), torch.tensor([0.0, 0.25, 0.5, 0.75, 0.7]).double()
    for options in ({}, {"top_k": 4}, {"min_p": 0.5}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}):
        sampling = SamplingParams(temperature=1.0, **options)
        tokens = sample(kernels, logits, options_of([sampling] * 5), numbers)
        assert tokens.tolist() == draw_on_host(logits, sampling, numbers).tolist(), options
    # As many tokens up to a limit of distances as top-k keeps.
    logits, numbers = torch.tensor([[0.0, -5, 0, 0, -5, 0]]).expand(2, -1).contiguous(), torch.tensor([0.2, 0.9999])
    tokens = sample(kernels, logits, options_of([SamplingParams(temperature=1.0, top_k=4)] * 2), numbers.double())
    assert tokens.tolist() == [0, 5]


def _penalties(kernels: Kernels) -> None:
    """Rows with options of their own, over a table in which tokens stand up to five times."""
    generator, rows, vocabulary = torch.Generator().manual_seed(6), 16, 40
    logits = torch.randn(rows, vocabulary, generator=generator) * 0.3
    counts = torch.randint(0, 6, (rows, vocabulary), generator=generator)
    prompt = torch.rand(rows, vocabulary, generator=generator) < 0.3
    table = (2 * counts + (prompt | (counts > 0))).to(torch.int32)
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    drawn = torch.rand(rows, 3, generator=generator) * torch.tensor([1.0, 0.8, 0.3]) + torch.tensor([0.6, -0.4, -0.15])
    samplings = [SamplingParams(**dict(zip(names, row, strict=True))) for row in drawn.tolist()]
    repetition, presence, frequency = (column[:, None] for column in options_of(samplings)[:, 4:7].unbind(1))
    seen = table % 2 == 1
    wanted = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    wanted = torch.where(counts > 0, wanted - presence - frequency * counts, wanted)
    tokens = sample(kernels, logits, options_of(samplings), torch.zeros(rows).double(), table)
    assert tokens.tolist() == wanted.argmax(-1).tolist()
    hot = [replace(sampling, temperature=0.4) for sampling in samplings]
    numbers = torch.rand(rows, generator=generator, dtype=torch.float64)
    table = (2 * counts + seen).to(torch.int32)
    tokens = sample(kernels, logits, options_of(hot), numbers, table)
    assert tokens.tolist() == draw_on_host(wanted, hot[0], numbers).tolist()


def _many(kernels: Kernels) -> None:
    """More tokens than a chunk or a block has: what lies in those before counts."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 9000, generator=generator)
    numbers = torch.tensor([0.3, 0.7, 0.97]).double()
    for options in ({}, {"top_k": 8500}):
        sampling = SamplingParams(temperature=1.0, **options)
        tokens = sample(kernels, logits, options_of([sampling] * 3), numbers)
        assert tokens.tolist() == draw_on_host(logits, sampling, numbers).tolist(), options
    assert sample(kernels, logits, options_of([SamplingParams()] * 3), numbers).tolist() == logits.argmax(-1).tolist()


def _adjacent(kernels: Kernels) -> None:
    """Scores that are neighbours among fp32 numbers are told apart, and equal ones go by their number."""
    distances = 1 + torch.arange(24, dtype=torch.float32) * 2.0**-23
    row = -torch.cat([torch.zeros(1), distances, distances.flip(0)])
    for options in ({"top_p": 0.9}, {"top_k": 17}, {"min_p": 0.3}, {"top_k": 30, "top_p": 0.97}, {}):
        sampling = SamplingParams(temperature=1.0, **options)
        numbers = (torch.arange(5).double() + 0.5) / 5
        logits = row.expand(5, -1).contiguous()
        tokens = sample(kernels, logits, options_of([sampling] * 5), numbers)
        assert tokens.tolist() == draw_on_host(logits, sampling, numbers).tolist(), options


def _last(kernels: Kernels) -> None:
    """The largest random number falls on a token that has a chance."""
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(2)).mul(40).round()
    logits[:, ::3] = -math.inf
    numbers = torch.full((2,), 1 - 2.0**-53, dtype=torch.float64)
    for options in ({}, {"top_k": 5000}, {"top_p": 0.999}, {"min_p": 1e-6}, {"min_p": 1.0}, {"top_k": 3}):
        sampling = SamplingParams(temperature=1.5, **options)
        tokens = sample(kernels, logits, options_of([sampling] * 2), numbers).long()
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        chances = kept_probs(ordered, sampling)
        for row, token in enumerate(tokens.tolist()):
            place = int((order[row] == token).nonzero())
            assert place < chances.shape[1] and chances[row, place] > 0, f"{options}: token {token}"


def checks() -> dict[str, Check]:
    """All checks by name."""
    drawn = {
        "-".join(f"{value}" for value in case.values()): _case(case)
        for case in [*SINGLE, *pairwise(OPTIONS, 0), *pairwise(OPTIONS, 1)]
    }
    small = {f"small {number}": _with_small_sizes(_case(case)) for number, case in enumerate(LONG)}
    return {
        "numbers": _numbers,
        "exact": _exact,
        "mixed": _with_small_sizes(_mixed),
        "far apart": _with_small_sizes(_far_apart),
        "adjacent": _adjacent,
        "not finite": _not_finite,
        "last": _last,
        "counts": _counts,
        "many": _many,
        "penalties": _penalties,
        **small,
        **drawn,
        "shares": _shares,
    }
