"""Monitors, gradient norms and operation counts on two ranks: the same at every stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import UsageError
from deepspeed.monitor.top import read_pages
from deepspeed.profiling.flops_profiler import FlopsProfiler
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_grad, safe_set_full_grad
from deepspeed.zero.gradients import grad_norm
from deepspeed.zero.optimizer import optimizer as zero_optimizer
from tests.harness.pool import WorkerPool
from tests.parallel.tiny import STAGES, Tiny, loss_of, masters, micro_step, raises, reference, rows, start, tiny
from tests.unit.profiling.architectures import CASES, CELLS

Workers = Callable[[int], WorkerPool]
RANKS, WINDOWS = 2, [[0, 1], [2, 3]]
NAMES = {
    *(f"Train/Samples/{name}" for name in ("train_loss", "lr", "grad_norm", "loss_scale", "skipped_steps")),
    "Train/Samples/samples_per_second",
    *(f"Train/Memory/{kind}" for kind in ("parameters", "masters", "gradients", "optimizer", "gathered")),
    *(f"Train/Memory/{kind}" for kind in ("transit", "activations")),
}


def written(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["name"], []).append((row["step"], float(row["value"])))
    return found


# -- monitors ---------------------------------------------------------------------------------------------------------


def monitored(folder: str, stage: int, **settings: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Masters after two windows of two micro-batches, and the mean loss of the first on this rank."""
    block = {"enabled": True, "output_path": folder, "job_name": f"stage{stage}"}
    with start(stage, accumulation=2, csv_monitor=block, **settings) as engine:
        assert engine.monitor.enabled and (engine.monitor.csv_monitor is not None) == (dist.get_rank() == 0)
        losses = [micro_step(engine, step) for window in WINDOWS for step in window]
        engine.monitor.write_events([("mine", len(losses), engine.global_samples)])
        return masters(engine), sum(losses[:2]) / 2


def unmonitored(stage: int) -> dict[str, torch.Tensor]:
    with start(stage, accumulation=2) as engine:
        for window in WINDOWS:
            for step in window:
                micro_step(engine, step)
        return masters(engine)


def test_every_stage_writes_the_same_names_and_numbers(workers: Workers, tmp_path: Path) -> None:
    first: list[float] = []
    for stage in STAGES:
        (found, one), (_, other) = workers(RANKS).run(monitored, str(tmp_path), stage)
        events = written(tmp_path / f"stage{stage}")
        assert set(events) == NAMES | {"mine"}
        samples = [2 * RANKS * 2, 2 * RANKS * 4]
        assert all([at for at, _ in rows_] == samples for name, rows_ in events.items() if name != "mine")
        assert events["Train/Samples/train_loss"][0][1] == pytest.approx((one + other) / 2, rel=1e-6)
        assert events["Train/Samples/lr"][0][1] == 0.1 and events["mine"] == [(samples[1], 4.0)]
        losses = [value for _, value in events["Train/Samples/train_loss"]]
        first = first or losses
        assert losses == pytest.approx(first, rel=1e-6)
        pages = read_pages(tmp_path / f"stage{stage}")
        assert [(page["update"], page["samples"], page["ended"]) for page in pages.values()] == [
            (2, samples[1], True)
        ] * 2
        plain = workers(RANKS).run(unmonitored, stage)[0]
        assert all(torch.equal(found[name], plain[name]) for name in plain)


def items_and_tokens(folder: str) -> None:
    class Counting(Tiny):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.nn.functional.one_hot(ids % 6, 6).float())

    torch.manual_seed(0)
    block = {"enabled": True, "output_path": folder, "job_name": "items"}
    with start(2, Counting(), jsonl_monitor=block, zero={"compute_grad_norm": False}) as engine:
        rank = dist.get_rank()
        engine.backward(loss_of(engine, torch.ones(2, 3 + rank, dtype=torch.long)) * (10 + rank), num_items=5 + rank)
        engine.step()


def test_the_loss_is_weighted_by_items_and_rides_where_no_norm_is_formed(workers: Workers, tmp_path: Path) -> None:
    workers(RANKS).run(items_and_tokens, str(tmp_path))
    events = written(tmp_path / "items")
    assert "Train/Samples/grad_norm" not in events
    torch.manual_seed(0)
    value = float(loss_of(Tiny(), torch.nn.functional.one_hot(torch.ones(2, 3, dtype=torch.long), 6).float()))
    assert events["Train/Samples/train_loss"][0][1] == pytest.approx(value * (10 + 11) / (5 + 6), rel=1e-5)
    rate = events["Train/Samples/tokens_per_second"][0][1] / events["Train/Samples/samples_per_second"][0][1]
    assert rate == pytest.approx((6 + 8) / 4)


# -- gradient norms ---------------------------------------------------------------------------------------------------


class Unused(Tiny):
    """Its last parameter never has a gradient, and one layer is used on rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            x = self.layers[2](self.layers[0](x))
        else:
            x = self.layers[2](self.layers[1](self.layers[0](x)))
        return self.out(x)


def norms(stage: int, precision: str = "fp32") -> list[dict[str, float]]:
    twin = reference([], RANKS)
    twin.accumulation = 2
    found = []
    with start(stage, accumulation=2, precision=precision, clip=0.01) as engine:
        for step in (0, 1):
            engine.backward(loss_of(engine, rows(step, dist.get_rank())))
            if step == 1:
                found.append(engine.gradient_norms())
                total = sum(norm**2 for norm in found[0].values()) ** 0.5
            engine.step()
        assert abs(total - engine.get_global_grad_norm()) <= 1e-6 * total
        assert engine.gradient_norms() == {}
    return found


def unused_norms(stage: int) -> None:
    torch.manual_seed(0)
    with start(stage, Unused()) as engine:
        engine.backward(loss_of(engine, rows(0, dist.get_rank())))
        found = engine.gradient_norms()
        wanted = [n for n, _ in engine.module.named_parameters() if not n.startswith("idle")]
        assert list(found) == wanted and all(norm > 0 for norm in found.values())
        for name, param in engine.module.named_parameters():
            whole = safe_get_full_grad(param)
            assert (whole is None) == (name not in found)
            assert whole is None or abs(float(whole.norm()) - found[name]) <= 1e-6 * found[name]
        engine.step()
    with raises(UsageError, "gradient_norms() on an engine that was destroyed"):
        engine.gradient_norms()


def zeroed(engine: Any) -> None:
    for param in engine.module.layers[0].parameters():
        safe_set_full_grad(param, torch.zeros(param.shape))


def doubled(engine: Any) -> None:
    for param in engine.module.parameters():
        safe_set_full_grad(param, 2 * safe_get_full_grad(param))


def edited(engine: Any) -> None:
    for param in engine.module.parameters():
        param.grad.mul_(3)


def again(engine: Any) -> None:
    engine.backward(loss_of(engine, rows(0, dist.get_rank())))


def behind(engine: Any) -> None:
    for param in engine.module.parameters():
        part = safe_get_local_grad(param)
        if part is not None:
            part.data.mul_(5)  # a view of the sum, and no counter shows the write


def norms_before_a_change(stage: int) -> None:
    """What `gradient_norms` has read is not read again by the step, unless it was changed in between."""
    torch.manual_seed(0)
    with start(stage, clip=0.01) as engine:
        for change in (None, zeroed, doubled, edited, again, behind):
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            engine.gradient_norms()
            if change is not None:
                change(engine)
            whole = [safe_get_full_grad(param).double() for param in engine.module.parameters()]
            wanted = sum(float(gradient.square().sum()) for gradient in whole) ** 0.5
            with (
                mock.patch.object(grad_norm, "_squares", wraps=grad_norm._squares) as read,
                mock.patch.object(zero_optimizer, "global_norm", wraps=grad_norm.global_norm) as met,
            ):
                engine.step()
            assert change is not None or not read.called
            assert met.called == (change is not None)
            assert abs(engine.get_global_grad_norm() - wanted) <= 1e-6 * wanted, change


def norms_before_a_delta_weight_one_rank(stage: int) -> None:
    """Where one rank has written to its part, all form the norm anew; the next step knows nothing of it."""
    torch.manual_seed(0)
    with start(stage, clip=0.01) as engine:
        for changing in (False, True, False):
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            before = engine.gradient_norms()
            bucket = next(b for b in engine.optimizer.reducer.buckets if b.group.ranks.counted)
            if changing and dist.get_rank() == 1:
                with bucket.total.borrowed() as total:
                    bucket.own(total).mul_(1000)
            with mock.patch.object(zero_optimizer, "global_norm", wraps=grad_norm.global_norm) as met:
                engine.step()
            assert met.called == changing
            wanted = sum(one**2 for one in before.values()) ** 0.5
            assert (engine.get_global_grad_norm() > 100 * wanted) == changing
            assert changing or abs(engine.get_global_grad_norm() - wanted) <= 1e-12 * wanted


def norms_of_a_part(stage: int) -> None:
    """The optimizer has one layer, and the others have gradients too: asking changes nothing."""
    found = []
    for asks in (False, True):
        torch.manual_seed(0)
        model = Tiny()
        sgd = torch.optim.SGD(model.out.parameters(), lr=1.0)
        with start(stage, model, optimizer=sgd, clip=0.01) as engine:
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            if asks:
                engine.gradient_norms()
            engine.step()
            full = safe_get_full_fp32_param(engine.module.out.weight).clone()
            found.append((engine.get_global_grad_norm(), full))
    (norm_before, before), (norm_after, after) = found
    assert abs(norm_before - norm_after) <= 1e-12 * norm_before
    assert torch.equal(before, after)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_asking_for_norms_changes_nothing_where_the_optimizer_has_a_part(workers: Workers, stage: int) -> None:
    workers(RANKS).run(norms_of_a_part, stage)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_change_on_one_rank_after_gradient_norms_makes_all_form_the_norm_anew(workers: Workers, stage: int) -> None:
    workers(RANKS).run(norms_before_a_delta_weight_one_rank, stage)


def test_gradient_norms_are_those_of_one_process(workers: Workers) -> None:
    model = tiny()
    for step in (0, 1):
        for rank in range(RANKS):
            (loss_of(model, rows(step, rank)) / 2 / RANKS).backward()
    wanted = {name: float(p.grad.norm()) for name, p in model.named_parameters() if p.grad is not None}
    for stage in STAGES:
        for (found,) in workers(RANKS).run(norms, stage):
            assert list(found) == list(wanted)
            assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_some_ranks_have_counts_and_one_that_none_has_is_left_out(workers: Workers, stage: int) -> None:
    workers(RANKS).run(unused_norms, stage)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_change_after_gradient_norms_is_in_the_norm_of_the_step(workers: Workers, stage: int) -> None:
    workers(RANKS).run(norms_before_a_change, stage)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_norms_in_low_precision(workers: Workers, stage: int, precision: str) -> None:
    workers(RANKS).run(norms, stage, precision)


# -- operations -------------------------------------------------------------------------------------------------------


def counted(name: str, fused: bool, again: bool | None, stage: int) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.make(fused, again)
    params = sum(p.numel() for p in model.parameters())
    with start(stage, model) as engine:
        profiler = FlopsProfiler(engine.module, engine)
        profiler.start_profile()
        loss = engine(case.inputs()).float().square().mean()
        engine.backward(loss)
        profiler.stop_profile()
        engine.step()
        row = profiler.rows()[""]
        assert (row.forward, row.backward, row.again) == case.counts(fused, again), (name, fused, again, stage)
        assert row.params == params and profiler.outside() == (0, 0, 0)


def counted_at_stages(cells: list[tuple[str, bool, bool | None]], stages: tuple[int, ...]) -> None:
    for cell in cells:
        for stage in stages:
            counted(*cell, stage)


def test_counts_are_exact_where_parameters_are_split(workers: Workers) -> None:
    cells = [("gpt", True, False), ("moe", False, None), ("lora", False, False)]
    workers(RANKS).run(counted_at_stages, cells, (0, 3), timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_counts_at_every_stage(workers: Workers, name: str, ranks: int) -> None:
    workers(ranks).run(counted_at_stages, [cell for cell in CELLS if cell[0] == name], STAGES, timeout=120)


def block(folder: str) -> None:
    case = CASES["gpt"]
    torch.manual_seed(0)
    file = f"{folder}/profile{dist.get_rank()}.txt"
    section = {"enabled": True, "profile_step": 1, "output_file": file}
    with start(3, case.make(True, None), accumulation=2, flops_profiler=section) as engine:
        assert (engine.flops_profiler is not None) == (dist.get_rank() == 0)
        for _ in range(6):
            engine.backward(engine(case.inputs()).float().square().mean())
            engine.step()
        if dist.get_rank() == 0:
            rows_ = engine.flops_profiler.rows()
            assert (rows_[""].forward, rows_[""].backward) == case.counts(True, None)[:2]
            assert not any(m._forward_hooks and "Counter" in str(m._forward_hooks) for m in engine.module.modules())


def test_the_block_reports_each_micro_batch_of_its_step_once_on_rank_0(workers: Workers, tmp_path: Path) -> None:
    workers(RANKS).run(block, str(tmp_path))
    text = (tmp_path / "profile0.txt").read_text()
    assert not (tmp_path / "profile1.txt").exists()
    assert text.count("Profile Summary at step 1:") == 2
    flops = CASES["gpt"].counts(True, None).forward
    assert text.count(f"{flops / 1e3:.2f} K") >= 2
    for words in ("world size:", "bwd latency", "step latency", "samples/second", "data parallel size"):
        assert text.count(f"\n{words}") == 2
