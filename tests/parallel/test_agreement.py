"""What ranks decide alone: equal to the reference, or one typed error on all of them; no hang, no silence."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed.comm
from deepspeed.errors import DeepSpeedError, UsageError
from tests.harness import WorkerError, WorkerTimeout
from tests.parallel.agreement import LR, Call, Thrown, expected, losses, program, throwing
from tests.parallel.tiny import STAGES, adamw, expect_close, loss_of, masters, raises, rows, said, sgd, start, tiny

PROGRAMS, FEW = 300, 16
DISAGREE = "UsageError: ranks disagree"
TIMEOUT, MARGIN = 3.0, 5.0  # seconds: of one collective; after it, within which every rank knows


def forward_backward(engine: Any, number: int, how: str) -> None:
    handle = throwing(engine.module, how == "throw early") if how.startswith("throw") else None
    x = rows(number, dist.get_rank())
    try:
        for index, loss in enumerate(found := losses(engine, x, how)):
            if how == "bare" or index == 1:
                loss.backward()
            else:
                settings = {"items": {"num_items": len(x)}, "sum": {"scale_wrt_gas": False}}.get(how, {})
                engine.backward(loss, retain_graph=index + 1 < len(found), **settings)
    except Thrown:
        pass
    finally:
        if handle is not None:
            handle.remove()


def make(engine: Any, call: Call) -> None:
    """One call of a program."""
    what = call[0]
    if what == "backward":
        forward_backward(engine, call[1], call[2])
    elif what in ("held", "inside"):
        with engine.no_sync():
            forward_backward(engine, call[1], "mean")
            if what == "inside":
                engine.step()
    elif what == "read":
        _ = engine.module.layers[0][0].bias.grad
    elif what == "batch":
        engine.set_train_batch_size(call[1] * engine.train_micro_batch_size_per_gpu() * engine.world_size)
    elif what == "boundary":
        engine.set_gradient_accumulation_boundary(call[1])
    elif what == "lr":
        for group in engine.optimizer.param_groups:
            group["lr"] = call[1]
    else:
        {"step": engine.step, "flush": engine.flush, "zero": engine.zero_grad, "reduce": engine.allreduce_gradients}[
            what
        ]()


def run_program(stage: int, calls: list[Call], wanted: dict[str, torch.Tensor] | None) -> str:
    """How it ended on this rank: "equal", "other", or a typed error's words."""
    engine = start(stage, tiny(), lambda p: sgd(p, lr=LR))
    try:
        for call in calls:
            make(engine, call)
        values = masters(engine)
        deepspeed.comm.barrier()
    except DeepSpeedError as error:
        engine.destroy()  # waits for nobody, as an error is under way
        return f"{type(error).__name__}: {error}"
    engine.destroy()
    if wanted is None:
        return "no error"
    gap = max((values[name] - wanted[name]).abs().max().item() for name in wanted)
    return "equal" if gap <= 1e-6 else f"other values, by {gap:.3g}"


def outcome(file: str, stage: int, programs: list[list[Call]], wanted: dict[str, torch.Tensor] | None) -> None:
    """Run a program; every rank writes how and when it ended, since one that is told too late is ended."""
    from deepspeed.comm.watchdog import watchdog

    rank, usual = dist.get_rank(), watchdog.here.timeout
    watchdog.here.timeout = timedelta(seconds=TIMEOUT)
    try:
        ended = run_program(stage, programs[rank], wanted)
    finally:
        watchdog.here.timeout = usual
    Path(f"{file}-{rank}").write_text(json.dumps({"ended": ended, "at": time.monotonic()}))
    if "Error" in ended and not ended.startswith(DISAGREE):
        raise RuntimeError("the ranks are apart; the next program needs new processes")


def check(workers: Any, folder: Path, ranks: int, seeds: Iterable[int]) -> dict[str, int]:
    """Run and judge the programs of all seeds; how many ended which way."""
    counts = {"equal": 0, "refused": 0, "apart": 0}
    for seed in seeds:
        stage, programs = seed % len(STAGES), program(random.Random(seed), ranks)
        wanted = expected(stage, programs)
        kind, file, trouble = wanted if isinstance(wanted, str) else "equal", folder / str(seed), ""
        try:
            workers(ranks).run(dist.barrier, timeout=120)  # new processes take their time
            values = None if isinstance(wanted, str) else wanted
            workers(ranks).run(outcome, str(file), stage, programs, values, timeout=60)
        except (WorkerError, WorkerTimeout) as error:
            trouble = str(error)
        judge(kind, [Path(f"{file}-{rank}") for rank in range(ranks)], programs, trouble)
        counts[kind] += 1
    return counts


def judge(kind: str, files: list[Path], calls: list[list[Call]], trouble: str) -> None:
    told = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    ended = [one.get("ended", "process ended") for one in told]
    programs = "\n".join(f"  rank {rank}: {one}" for rank, one in enumerate(calls))
    where = f"{files[0].name}, expected {kind}: {ended}\n{programs}\n{trouble}"
    if kind == "equal":
        assert ended == ["equal"] * len(files), where
    elif kind == "refused":
        assert len(set(ended)) == 1 and ended[0].startswith(DISAGREE), where
    else:
        assert all("Error" in one.partition(":")[0] or one == "process ended" for one in ended), where
        times = [one["at"] for one in told if one]
        assert times and max(times) - min(times) < TIMEOUT + MARGIN, where


def alone(seed: int, ranks: int) -> bool:
    """Whether a rank is left alone: such a program costs its processes."""
    return expected(seed % len(STAGES), program(random.Random(seed), ranks)) == "apart"


def test_ranks_agree_or_all_refuse(workers: Any, tmp_path: Path) -> None:
    seeds = [seed for seed in range(2 * FEW) if not alone(seed, 2)][:FEW]
    counts = check(workers, tmp_path, 2, seeds)
    assert min(counts["equal"], counts["refused"]) >= FEW // 4, counts


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_agree_or_all_refuse_in_all_programs(workers: Any, tmp_path: Path, ranks: int) -> None:
    counts = check(workers, tmp_path, ranks, range(PROGRAMS // 2 * (ranks - 2), PROGRAMS // 2 * (ranks - 1)))
    print(counts)
    assert min(counts.values()) >= PROGRAMS // 20, counts


# -- one rank alone ---------------------------------------------------------------------------------------------------


def items_on_one_rank(stage: int) -> None:
    with start(stage) as engine:
        loss = loss_of(engine, rows(0, dist.get_rank()))
        engine.backward(loss, num_items=2 if dist.get_rank() == 0 else None)
        with raises(UsageError, "ranks disagree", "num_items", "rank 1: plain backward"):
            engine.step()


def rate_on_one_rank(stage: int) -> None:
    with start(stage) as engine:
        engine.backward(loss_of(engine, rows(0, dist.get_rank())))
        if dist.get_rank() == 1:
            engine.optimizer.param_groups[0]["lr"] = 0.5
        with raises(UsageError, "ranks disagree", "learning rates"):
            engine.step()


def sums_on_one_rank_in_low_precision(stage: int) -> None:
    """Its rounds would be multiplied by another factor than those they are summed with."""
    with start(stage, precision="bf16", accumulation=2) as engine:
        for step in range(2):
            engine.backward(loss_of(engine, rows(step, dist.get_rank())), scale_wrt_gas=dist.get_rank() == 0)
            if step == 0 or stage < 2:  # summed in full precision before they travel
                engine.step()
                continue
            with raises(UsageError, "ranks disagree", "low precision"):
                engine.step()


def unfrozen_on_one_rank(stage: int) -> None:
    model = tiny()
    model.layers[1].requires_grad_(False)
    with start(stage, model) as engine:
        model.layers[1].requires_grad_(dist.get_rank() == 0)
        engine.backward(loss_of(engine, rows(0, dist.get_rank())))
        with raises(UsageError, "frozen on rank 1"):
            engine.step()
        model.layers[1].requires_grad_(True)  # the ranks are level again
        engine.backward(loss_of(engine, rows(0, dist.get_rank())))
        engine.step()
        assert engine.was_step_applied()


@pytest.mark.parametrize(
    "alone_in", [items_on_one_rank, rate_on_one_rank, sums_on_one_rank_in_low_precision, unfrozen_on_one_rank]
)
def test_what_one_rank_does_alone_is_refused_on_all(workers: Any, alone_in: Any) -> None:
    for stage in STAGES:
        workers(2).run(alone_in, stage)


def second_losses(scaled: bool) -> None:
    """The second backward of a micro-batch is bare: the factor of the first one is not its own."""
    for stage in STAGES:
        values = []
        for twice in (False, True):
            fp16 = {"enabled": True, "loss_scale": 1024}
            with said() as lines, start(stage, optimizer=adamw, precision="fp32", fp16=fp16) as engine:
                made = engine(rows(0, dist.get_rank()))
                first, second = made.float().square().mean(), made.float().abs().mean()
                if twice:
                    engine.scale(first).backward(retain_graph=True) if scaled else engine.backward(first, True)
                    second.backward()
                else:
                    engine.backward(first + second)
                engine.step()
                values.append(masters(engine))
            if dist.get_rank() == 0:
                assert any("unscaled" in line for line in lines) == twice, lines
        expect_close(values[1], values[0], 2e-3, at=stage)


@pytest.mark.parametrize("scaled", [False, True], ids=["backward", "scale"])
def test_a_factor_ends_with_its_backward(workers: Any, scaled: bool) -> None:
    workers(2).run(second_losses, scaled)
