"""Hybrid sharding: state split inside a shard group of two ranks, replicated across groups."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed import utils, zero
from deepspeed.errors import DeepSpeedError
from tests.parallel.tiny import adamw, expect_close, masters, micro_step, raises, reference, start

RANKS = 4
MICS = {"mics_shard_size": 2}


def trained(zero: dict[str, Any], precision: str, accumulation: int, clip: float) -> tuple[Any, ...]:
    settings = {"precision": precision, "accumulation": accumulation, "clip": clip, "zero": zero}
    with start(3, optimizer=adamw, **settings) as engine:
        for step in range(3 * accumulation):
            micro_step(engine, step)
        moments = {n: utils.safe_get_full_optimizer_state(p, "exp_avg") for n, p in engine.module.named_parameters()}
        assert engine.world_size == RANKS
        ranks = engine.module.out.weight._ds_member.group.axis.ranks
        held: list[Any] = [None] * RANKS
        dist.all_gather_object(held, engine.state_bytes())
        total = {kind: sum(each[kind] for each in held) for kind in held[0]}
        return masters(engine), moments, engine.get_global_grad_norm(), total, ranks


def hybrid() -> tuple[int, ...]:
    for precision, accumulation, clip in (("fp32", 1, 0.0), ("fp32", 2, 0.05), ("bf16", 2, 0.0)):
        ours, moments, norm, held, ranks = trained(MICS, precision, accumulation, clip)
        plain, plain_moments, plain_norm, plain_held, _ = trained({}, precision, accumulation, clip)
        windows = [list(range(i, i + accumulation)) for i in range(0, 3 * accumulation, accumulation)]
        twin = reference(windows, RANKS, optimizer=adamw, precision=precision, clip=clip)
        bar = 1e-6 if precision == "fp32" else 1e-3
        expect_close(ours, twin.parameters(), bar, at=("plain torch", precision, accumulation))
        expect_close(ours, plain, bar, at=("stage 3", precision, accumulation))
        expect_close(moments, plain_moments, bar)
        assert abs(norm - plain_norm) <= 1e-4 * plain_norm and abs(norm - twin.norm) <= 1e-2 * norm
        for kind, count in held.items():  # two copies instead of one, but for padding
            assert 1.4 * plain_held[kind] <= count <= 2.1 * plain_held[kind] or count == plain_held[kind] == 0, kind
        copies: list[Any] = [None] * RANKS
        dist.all_gather_object(copies, ours["out.weight"])
        assert all(torch.equal(copy, ours["out.weight"]) for copy in copies)
    with raises(DeepSpeedError, "mics_shard_size", "3"):
        start(3, zero={"mics_shard_size": 3})
    return ranks


def test_hybrid_sharding_equals_stage_3_and_plain_torch(workers: Any) -> None:
    assert workers(RANKS).run(hybrid, timeout=60) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def trained_with_delays(seed: int) -> None:
    """Two rounds of each bucket in flight, taken up at different times by the ranks of a group."""
    from deepspeed.comm.collectives import collectives

    draws = random.Random(1000 * seed + dist.get_rank())

    def delay(_: str) -> None:
        if draws.random() < 0.1:
            time.sleep(0.05 * draws.random() ** 3)

    collectives.PLANTED_DELAY = delay
    try:
        for _ in range(5):
            with start(3, optimizer=adamw, accumulation=2, zero=MICS) as engine:
                for step in range(6):
                    micro_step(engine, step)
    finally:
        collectives.PLANTED_DELAY = None


@pytest.mark.slow  # fewer delays under hybrid sharding: test_races.py
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ranks_that_wait_inside_and_across_groups_do_not_block_each_other(workers: Any, seed: int) -> None:
    workers(RANKS).run(trained_with_delays, seed)


def overflow_and_edits() -> None:
    """Decisions are the world's: an overflow in one shard group skips the step in all; edits reach every copy."""
    with start(3, precision="bf16", optimizer=adamw, zero=MICS) as engine:
        before = masters(engine)
        if dist.get_rank() == 3:
            engine.module.layers[0][0].register_forward_hook(lambda _m, _i, out: out * float("nan"))
        micro_step(engine, 0)
        assert engine.skipped_steps == 1
        expect_close(masters(engine), before, 0.0)
        weight = engine.module.out.weight
        utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, 0.5))
        assert utils.safe_get_full_fp32_param(weight).eq(0.5).all()
        with zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
            weight.fill_(float(dist.get_rank()))
        assert utils.safe_get_full_fp32_param(weight).eq(1.0).all()


def test_overflow_and_edits(workers: Any) -> None:
    workers(RANKS).run(overflow_and_edits)
