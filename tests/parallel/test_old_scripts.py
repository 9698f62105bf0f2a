"""What old scripts and clients' suites look at on two ranks: names, logs, files, dtypes."""

from __future__ import annotations

import copy
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import UsageError
from deepspeed.runtime.utils import CheckOverflow, PartitionedTensor
from tests.parallel.tiny import loss_of, micro_step, raises, rows, said, sgd, start, tiny, with_words


def tools() -> None:
    rank = dist.get_rank()
    param = nn.Parameter(torch.ones(3))
    assert not CheckOverflow([{"params": [param]}]).check()
    param.grad = torch.ones(3)
    check = CheckOverflow([[param]])
    assert not check.check() and not check.has_overflow_serial([param])
    if rank == 1:
        param.grad[1] = float("nan")
    assert check.check() and check.has_overflow([param])
    assert check.has_overflow_serial([param]) == (rank == 1) == check._has_inf_or_nan(param.grad)
    assert check.check_using_norm([-1.0 if rank else 3.0]) and check.check_using_norm([float("inf")], False)
    assert not check.check_using_norm([2.0])
    assert not CheckOverflow()._has_inf_or_nan(torch.full((4,), 3e38))  # their sum is none

    for shape in ((7, 3), (1,), (2, 2, 2)):
        whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        part = PartitionedTensor(whole, dist.group.WORLD)
        assert part.full_size() == list(shape) and part.data().numel() == part.local_size().numel()
        assert torch.equal(part.full(), whole)
        again = PartitionedTensor.from_meta(part.to_meta(), part.data(), dist.group.WORLD)
        assert torch.equal(again.full(), whole)
    with raises(ValueError, "the meta is of 2 parts"):
        PartitionedTensor.from_meta(part.to_meta(), torch.ones(9), dist.group.WORLD)


def test_tools_of_old_scripts(workers: Any) -> None:
    workers(2).run(tools)


def a_run(folder: str, stage: int, precision: str) -> list[str]:
    with said() as lines:
        engine = start(stage, precision=precision)
    engine.backward(loss_of(engine, rows(0, dist.get_rank())))
    engine.step()
    low = torch.float32 if precision == "fp32" else torch.bfloat16
    groups = engine.optimizer.bit16_groups
    assert [p for group in groups for p in group] == list(engine.module.parameters()) and engine.optimizer.fp16_groups
    state = engine.optimizer.state_dict()
    assert isinstance(state.of, weakref.ref) and state.of() is engine.optimizer  # who keeps it keeps no engine
    copies = pickle.loads(pickle.dumps(state)), copy.copy(state), type(state)(state)
    assert set(state) == {"optimizer", "loss_scaler"} and all(set(one) == set(state) for one in copies)
    for one, key in ((state, "fp32_flat"), *((one, "fp32_flat_groups") for one in copies)):
        with raises(KeyError, key):
            one[key]
    if stage == 3:
        for param in engine.module.parameters():
            assert param.partition_numel() == -(-param.ds_numel // dist.get_world_size())
    for masters in (
        engine.optimizer.single_partition_of_fp32_groups,
        engine.optimizer.fp32_partitioned_groups_flat,
        state["fp32_flat_groups"],
    ):
        assert all(one.dtype == torch.float32 and one.dim() == 1 and not one.requires_grad for one in masters)
        ranks = 1 if stage == 0 else dist.get_world_size()
        held = torch.tensor(float(sum(one.numel() for one in masters)))
        dist.all_reduce(held)
        assert held * ranks / dist.get_world_size() >= sum(p.numel() for p in tiny().parameters())
    with raises(AttributeError):
        engine.optimizer.fp32_partitioned_groups_flat = []
    assert next(engine.module.parameters()).dtype == low
    assert engine.memory_breakdown() is False and engine.log_level() is None
    assert engine.get_wall_clock_timers() == {}
    engine.save_checkpoint(folder, "tag", client_state={"epoch": 3})
    _, client = engine.load_checkpoint(folder)
    assert client == {"epoch": 3, "ds_version": deepspeed.__version__}
    engine.destroy()
    return lines


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_logs_files_and_groups(workers: Any, tmp_path: Path, stage: int, precision: str) -> None:
    lines, _ = workers(2).run(a_run, str(tmp_path), stage, precision)
    assert lines[0].startswith(f"DeepSpeed info: version={deepspeed.__version__}, torch={torch.__version__}, ")
    assert "ranks=2, backend=" in lines[0] and with_words(lines, "DeepSpeed info") == 1
    names = {path.name for path in (tmp_path / "tag").glob("*.pt")}
    model = "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
    prefix = "bf16_" if precision == "bf16" else ""
    assert names == {model, f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt"}


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.full((6,), 1.001))
        self.register_buffer("count", torch.ones(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)).float() * self.scale


def buffers(stage: int, wanted: str | None) -> dict[str, torch.dtype]:
    with start(stage, Buffered(), precision="bf16", data_types={"buffer_dtype": wanted}) as engine:
        micro_step(engine, 0)
        return {name: buffer.dtype for name, buffer in engine.module.named_buffers()}


def test_buffers_have_the_dtype_that_is_asked_for(workers: Any) -> None:
    for stage in (0, 3):
        plain, cast = workers(2).run(buffers, stage, None)[0], workers(2).run(buffers, stage, "bf16")[1]
        assert plain["scale"] == torch.float32 and cast.pop("scale") == torch.bfloat16
        plain.pop("scale")
        assert plain == cast and cast["norm.running_mean"] == torch.float32 and cast["count"] == torch.int64


def converted() -> None:
    rank = dist.get_rank()
    with deepspeed.zero.Init():
        model = tiny()
    fresh = [nn.Parameter(torch.full((5, 6), float(rank + 1))), nn.Parameter(torch.full((3,), 7.0 + rank))]
    model.out.weight.convert_to_zero_parameters(fresh)
    assert all(p.ds_status.name == "NOT_AVAILABLE" and p.ds_numel == p.numel() for p in fresh)
    with deepspeed.zero.GatheredParameters(fresh):
        assert torch.equal(fresh[0], torch.ones(5, 6)) and fresh[1][0] == 7  # rank 0's
    model.out.weight.convert_to_zero_parameters(fresh)  # once more changes nothing
    model.out.weight = fresh[0]
    model.out.bias = nn.Parameter(torch.zeros(5))
    engine = start(3, model)
    micro_step(engine, 0)
    with raises(UsageError, "add them to the model before deepspeed.initialize"):
        model.out.weight.convert_to_zero_parameters([nn.Parameter(torch.ones(2))])
    engine.destroy()


def test_parameters_are_sharded_as_another_is(workers: Any) -> None:
    workers(2).run(converted)


def callables() -> list[float]:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    config = {"train_micro_batch_size_per_gpu": 2, "scheduler": {"params": {}}, "zero_optimization": {"stage": 2}}
    model = tiny()
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=sgd, lr_scheduler=schedule, config=config
    )
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR) and engine.scheduler_name() is None
    rates = []
    for step in range(3):
        micro_step(engine, step)
        rates += engine.get_lr()
    engine.destroy()
    engine, *_, none = deepspeed.initialize(model=tiny(), optimizer=sgd, config={**config, "scheduler": {}})
    assert none is None
    engine.destroy()
    return rates


def test_callables_beside_a_scheduler_block_without_type(workers: Any) -> None:
    assert workers(2).run(callables)[0] == pytest.approx([0.05, 0.025, 0.0125])


def lightning_dtypes(stage: int, precision: str) -> torch.dtype:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    module = Module()
    with start(stage, module, precision=precision):
        assert next(module.parameters()).dtype == module.dtype
    return module.dtype


@pytest.mark.drawn(2)
@pytest.mark.parametrize(("stage", "precision"), [(2, "fp16"), (3, "bf16"), (0, "fp32")])
def test_a_lightning_module_says_the_dtype_of_its_parameters(workers: Any, stage: int, precision: str) -> None:
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    assert workers(2).run(lightning_dtypes, stage, precision)[0] == dtypes[precision]


def overflown(factor: float) -> float | None:
    with start(2, precision="fp16") as engine:
        engine.backward(loss_of(engine, rows(0, dist.get_rank())) * factor)
        engine.step()
        assert engine.skipped_steps == 1 and not engine.was_step_applied()
        return engine.get_global_grad_norm()


@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_the_norm_of_gradients_that_the_loss_scale_made_too_large_is_infinite(workers: Any, factor: float) -> None:
    assert workers(2).run(overflown, factor) == [float("inf")] * 2
