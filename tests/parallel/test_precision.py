"""Loss scales, dtypes on the wire and in accumulators, casts: at every stage on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import LossScaleError, UsageError
from tests.parallel.tiny import (
    STAGES,
    WIDTH,
    Tiny,
    expect_close,
    loss_of,
    masters,
    micro_step,
    raises,
    reference,
    rows,
    said,
    sgd,
    start,
    tiny,
    with_words,
)
from tests.parity.reference import Reference

RANKS = 2


def fp16(**section: Any) -> dict[str, Any]:
    return {"fp16": {"enabled": True, **section}}


def overflowing_step(engine: Any, step: int, bad: bool) -> None:
    """Rank 1 alone plants an infinity in the gradient of the second block."""
    planted = []
    if bad and dist.get_rank() == 1:
        block = engine.module.layers[1][0]
        planted.append(block.register_forward_hook(lambda _module, _inputs, output: output * float("inf")))
    micro_step(engine, step)
    for hook in planted:
        hook.remove()


def dynamic_scale() -> None:
    """Hysteresis 2, window 2, minimum 2: the scale and the schedule after each step."""
    plan = [(False, 8), (True, 8), (True, 4), (False, 4), (False, 8), (True, 8), (True, 4), (True, 2)]
    section = fp16(initial_scale_power=3, hysteresis=2, loss_scale_window=2, min_loss_scale=2)
    halving = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
    for stage in STAGES:
        with said() as lines, start(stage, scheduler=halving, **section) as engine:
            assert engine.dynamic_loss_scale() and engine.initial_dynamic_scale() == 8
            rate, skipped = 0.1, 0
            for step, (bad, scale) in enumerate(plan):
                before = masters(engine)
                overflowing_step(engine, step, bad)
                rate, skipped = (rate, skipped + 1) if bad else (rate / 2, skipped)
                assert (engine.loss_scale(), engine.skipped_steps) == (scale, skipped), (stage, step)
                assert engine.get_lr() == [rate] and engine.global_steps == step + 1
                assert engine.was_step_applied() != bad and engine.optimizer.overflow == bad
                if bad:
                    expect_close(masters(engine), before, 0.0, at=(stage, step))
            with raises(LossScaleError, "minimum", "min_loss_scale"):
                overflowing_step(engine, 9, True)
        if dist.get_rank() == 0:
            named = with_words(lines, "step 2 is skipped", "'layers.1.0.bias'", "module 'layers.1.0'", "rank 1")
            assert named == 1, lines


def test_dynamic_loss_scale(workers: Any) -> None:
    workers(RANKS).run(dynamic_scale)


def static_scale() -> None:
    for stage in STAGES:
        with start(stage, **fp16(loss_scale=64, min_loss_scale=64)) as engine:
            assert not engine.dynamic_loss_scale() and engine.loss_scale() == 64
            for step, bad in enumerate([False, True, True, False]):
                overflowing_step(engine, step, bad)
            assert engine.loss_scale() == 64 and (engine.global_steps, engine.skipped_steps) == (4, 2)
        with start(stage, precision="bf16") as engine:  # no scale, the same check
            overflowing_step(engine, 0, True)
            assert (engine.skipped_steps, engine.loss_scale()) == (1, 1.0)


def test_static_loss_scale_and_bf16_overflow(workers: Any) -> None:
    workers(RANKS).run(static_scale)


def ways_to_scale() -> None:
    for stage in STAGES:
        results = {}
        for way in ("backward", "scale", "bare"):
            with said() as lines, start(stage, **fp16(loss_scale=128)) as engine:
                loss = loss_of(engine, rows(0, dist.get_rank()))
                if way == "backward":
                    engine.backward(loss)
                else:
                    (engine.scale(loss) if way == "scale" else loss).backward()
                engine.step()
                results[way] = masters(engine)
            if dist.get_rank() == 0:
                assert with_words(lines, "unscaled", "underflow") == (way == "bare"), lines
        expect_close(results["scale"], results["backward"], 0.0, at=stage)
        expect_close(results["bare"], results["backward"], 1e-4, at=stage)
    with start(1, **fp16(loss_scale=128)) as engine:
        with raises(UsageError, "scales the loss twice"):
            engine.backward(engine.scale(loss_of(engine, rows(0, 0))))
        engine.zero_grad()
        micro_step(engine, 0)
        assert engine.get_global_grad_norm() < 1e3
    with start(1) as engine:  # fp32: nothing to scale
        loss = loss_of(engine, rows(0, 0))
        assert engine.scale(loss) is loss


def test_scale_and_bare_backward_mean_the_same(workers: Any) -> None:
    workers(RANKS).run(ways_to_scale)


def autocast() -> None:
    twin = Reference(tiny(), sgd, RANKS)
    for rank in range(RANKS):
        with torch.autocast("cpu", torch.bfloat16):
            out = twin.copies[rank](rows(0, rank))
        twin.backward(rank, out.float().square().mean())
    twin.step()
    for stage in STAGES:
        with start(stage, torch_autocast={"enabled": True, "dtype": "bfloat16"}) as engine:
            assert engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.bfloat16
            assert engine(rows(0, 0)).dtype == torch.bfloat16 and engine.module.out.weight.dtype == torch.float32
            micro_step(engine, 0)
            expect_close(masters(engine), twin.parameters(), at=stage)


def test_torch_autocast(workers: Any) -> None:
    workers(RANKS).run(autocast)


def auto_cast() -> None:
    for stage in STAGES:
        with said() as lines, start(stage, precision="bf16") as engine:
            assert engine.module.out.weight.dtype == torch.bfloat16
            assert engine(rows(0, 0)).dtype == torch.bfloat16
            micro_step(engine, 1)
        if dist.get_rank() == 0:
            assert with_words(lines, "inputs are cast to bfloat16", "layers.0.0", "auto_cast: false") == 1, lines
        with start(stage, precision="bf16", auto_cast=False) as engine:
            with raises(RuntimeError, "dtype"):
                engine(rows(0, 0))
            assert engine(rows(0, 0).bfloat16()).dtype == torch.bfloat16


def test_auto_cast(workers: Any) -> None:
    workers(RANKS).run(auto_cast)


class Mixed(Tiny):
    """A BatchNorm, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("table", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x) + self.shift)


def dtypes_kept() -> None:
    kept = {"data_types": {"keep_in_fp32_modules": ["layers.1", "out"]}}
    for stage in STAGES:
        for extra in ({}, kept):
            torch.manual_seed(0)
            model = Mixed()
            with start(stage, model, precision="bf16", **extra) as engine:
                low = torch.bfloat16
                wanted = {"norm": torch.float32, "layers.0": low, "layers.1": low, "layers.2": low, "out": low}
                wanted |= {"layers.1": torch.float32, "out": torch.float32} if extra else {}
                for name, dtype in wanted.items():
                    assert {p.dtype for p in model.get_submodule(name).parameters()} == {dtype}, (stage, name)
                before = masters(engine)
                micro_step(engine, 0)
                moved = {name for name, value in masters(engine).items() if not torch.equal(value, before[name])}
                assert moved == set(before), set(before) - moved
                found = {name: b.dtype for name, b in model.named_buffers() if not name.startswith("norm")}
                assert found == {"table": torch.float64, "shift": torch.float32, "count": torch.int64}
                assert model.norm.running_mean.dtype == torch.float32


def test_modules_and_buffers_that_keep_their_dtype(workers: Any) -> None:
    workers(RANKS).run(dtypes_kept)


def rounded_mean(dtype: torch.dtype, steps: tuple[int, ...] = (0,), once: bool = False) -> dict[str, torch.Tensor]:
    """Masters after an update on the mean of rank gradients, each (or `once` their sum) rounded to `dtype`."""
    twin = Reference(tiny(), sgd, RANKS, len(steps))
    for rank in range(RANKS):
        total: dict[str, torch.Tensor] = {}
        for step in steps:
            twin.backward(rank, loss_of(twin.copies[rank], rows(step, rank)))
            for name, gradient in twin._sums[rank].items():
                total[name] = total.get(name, 0.0) + (gradient if once else gradient.to(dtype).float())
            twin._sums[rank].clear()
        twin._sums[rank] |= {name: value.to(dtype).float() if once else value for name, value in total.items()}
    twin.step()
    return twin.parameters()


def on_the_wire(stages: tuple[int, ...]) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with start(1, precision=precision) as engine:
            assert engine.communication_data_type == dtype
    for stage in stages:
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
            with start(stage, communication_data_type=word) as engine:
                assert engine.communication_data_type == dtype
                micro_step(engine, 0)
                expect_close(masters(engine), rounded_mean(dtype), at=(stage, word))
            with start(stage, communication_data_type=word, accumulation=2) as engine:
                micro_step(engine, 0)
                micro_step(engine, 1)
                wanted = rounded_mean(dtype, (0, 1), once=stage < 2)  # there the window is summed before it travels
                expect_close(masters(engine), wanted, at=(stage, word, "window"))
        for extra in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}):
            for precision, bar in (("fp32", 1e-6), ("bf16", 1e-3)):
                twin = reference([[0, 1]], RANKS, precision=precision)
                with start(stage, precision=precision, accumulation=2, **extra) as engine:
                    micro_step(engine, 0)
                    micro_step(engine, 1)
                    expect_close(masters(engine), twin.parameters(), bar, at=(stage, extra, precision))


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.slow)], ids=str)
def test_dtypes_and_factors_on_the_wire(workers: Any, stages: tuple[int, ...]) -> None:
    workers(RANKS).run(on_the_wire, stages)


def accumulators() -> None:
    for stage in STAGES:
        held = {}
        for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            settings = {"data_types": {"grad_accum_dtype": word}, "accumulation": 2}
            with start(stage, precision="bf16", **settings) as engine:
                assert engine.get_data_types() == (torch.bfloat16, dtype)
                micro_step(engine, 0)
                micro_step(engine, 1)
                held[word] = engine.state_bytes()["gradients"]
                bar = 1e-3 if word == "fp32" else 1e-2
                expect_close(masters(engine), reference([[0, 1]], RANKS, precision="bf16").parameters(), bar, at=stage)
        assert held["fp32"] == 2 * held["bf16"], (stage, held)


def test_accumulators_have_the_dtype_asked_for(workers: Any) -> None:
    workers(RANKS).run(accumulators)
