"""The zero-bubble schedule has the bits of 1F1B, and puts weights off wherever somebody waits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.parallel.zero_bubble_runs import beside, held, overwritten, refused

FAST = ("GPTNeo", 2, 1, 1, 4, "fp32")
# family (GPTNeo's embedding is tied over stages), pp, dp, ZeRO stage, accumulation, precision
TABLE = [
    (family, pp, dp, stage, accumulation, precision)
    for family, (pp, dp), stage, accumulation, precision in itertools.product(
        ("GPTNeo", "Llama"), ((2, 1), (2, 2), (4, 1)), (0, 1), (4, 5), ("fp32", "bf16", "fp16")
    )
] + [("GPTNeo", 2, 2, 2, 5, precision) for precision in ("fp32", "bf16", "fp16")]  # under stages ZeRO 2 reduces as 1
SOME = [FAST, *(pytest.param(*one, marks=pytest.mark.slow) for one in TABLE if one != FAST)]


def expect(found: list[tuple[int, int]], pp: int, put_off: bool = True) -> None:
    """Ranks of the first stage put nothing off; all others do."""
    for rank, (kept, compared) in enumerate(found):
        assert compared > 5
        assert bool(kept) == (put_off and rank >= len(found) // pp), found


@pytest.mark.parametrize(("family", "pp", "dp", "stage", "accumulation", "precision"), SOME)
def test_the_bits_are_those_of_1f1b(
    workers: Any, family: str, pp: int, dp: int, stage: int, accumulation: int, precision: str
) -> None:
    expect(workers(pp * dp).run(beside, family, pp, stage, accumulation, precision, timeout=100), pp)


TP = {"tensor_parallel": {"autotp_size": 2}}
CELLS = [
    # ranks, accumulation, precision, settings, how, whether something is put off
    (2, 4, "autocast", {}, "", True),
    (2, 4, "fp32", {}, "adapters", True),
    (2, 4, "fp32", {}, "frozen", True),
    (2, 4, "fp32", {}, "lengths", True),
    (2, 5, "fp32", {}, "fickle", True),
    (2, 4, "fp32", {}, "items", True),
    (2, 4, "bf16", {}, "hooks", True),
    (2, 1, "bf16", {}, "", True),
    (2, 1, "fp16", {}, "", True),
    (2, 4, "fp32", {"zero": {"offload_optimizer": {"device": "cpu"}}}, "", True),
    (2, 4, "fp32", {"activation_checkpointing": {"enabled": True}}, "", True),  # the head's alone
    (2, 4, "fp32", {}, "checkpointed", True),
    (2, 4, "fp32", {}, "checkpointed older", False),
    (4, 4, "fp32", TP, "", True),
    (4, 4, "bf16", TP, "hooks", True),
]
BESIDES = [
    (stage, *one)
    for stage, one in itertools.product((0, 1), CELLS)
    if stage or "zero" not in one[3]  # at stage 0 nothing is split that could be offloaded
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "ranks", "accumulation", "precision", "settings", "how", "put_off"), BESIDES, ids=str
)
def test_the_bits_are_those_of_1f1b_with_one_thing_besides(
    workers: Any, stage: int, ranks: int, accumulation: int, precision: str, settings: Any, how: str, put_off: bool
) -> None:
    expect(
        workers(ranks).run(beside, "Llama", 2, stage, accumulation, precision, settings, how, timeout=60), 2, put_off
    )


@pytest.mark.slow
def test_an_input_that_is_overwritten_too_early_is_named_on_all_ranks(workers: Any) -> None:
    assert workers(2).run(overwritten, "1f1b", timeout=30) == [("", "")] * 2
    (first, told), (kind, text) = workers(2).run(overwritten, "zero_bubble", timeout=30)
    assert kind == "PipelineError" and "micro-batch 0, backward of weights" in text and "in place" in text, text
    assert first == "CommError" and "stage 1" in told and "backward of weights" in told, told


def test_what_it_cannot_do_is_refused_by_name(workers: Any) -> None:
    workers(2).run(refused, timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize(("pp", "micros"), [(2, 5), (4, 8)])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_hold_what_the_schedule_says(workers: Any, schedule: str, pp: int, micros: int) -> None:
    for (peak, put_off), seen, left, stage in workers(pp).run(held, schedule, pp, micros, timeout=60):
        base = seen[0][1]
        assert abs(left - base) <= 0.05 * seen[1][1], "something is left after the window"
        activation = seen[1][1] - base  # after one forward
        first = next(at for at, (op, _) in enumerate(seen) if op == "B")  # the next begins after its backward
        later = seen[first + 1][1] - base - (first - 1) * activation if schedule == "zero_bubble" and stage else 0
        assert 0 <= later < activation and bool(later) == bool(schedule == "zero_bubble" and stage), seen
        wanted = (peak - put_off) * activation + put_off * later
        most = max(now for _, now in seen) - base
        assert abs(most - wanted) <= 0.05 * wanted, (seen, wanted, peak, put_off)
