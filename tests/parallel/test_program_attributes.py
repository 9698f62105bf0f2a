"""Attributes that programs read of engines, optimizers and parameters on two ranks, against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import NotAvailableError, UsageError
from deepspeed.runtime.utils import all_gather_dp_groups
from deepspeed.utils import groups
from tests.parallel.tiny import STAGES, adamw, loss_of, raises, rows, start, tiny


def attributes(stage: int, precision: dict[str, Any], folder: str) -> None:
    engine = start(stage, tiny(), adamw, **precision)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert engine._config is engine.config or engine._config is not None
    assert engine.dist_backend == "gloo" and engine.random_ltd_enabled() is False
    assert engine.fp16_master_weights_and_gradients() is False and engine.get_compile_time() == 0.0
    assert engine._support_torch_style_backward and engine.warn_unscaled_loss
    assert dist.get_world_size(engine.seq_data_parallel_group) == world
    with raises(UsageError, "pass training_data"):
        engine.set_data_post_process_func(print)
    engine._report_progress(1)
    engine.print_forward_breakdown(1.5)
    assert groups._get_broadcast_src_rank() == 0

    optimizer = engine.optimizer
    names = {param: name for name, param in engine.module.named_parameters()}
    assert optimizer.param_names == names
    assert dist.get_world_size(optimizer.dp_process_group) == world
    assert len(optimizer.real_dp_process_group) == len(optimizer.param_groups) == 1
    assert optimizer.dynamic_loss_scale is bool("fp16" in precision)
    assert optimizer.cpu_offload is False and optimizer.partition_gradients is (stage >= 2)
    assert optimizer.allgather_bucket_size >= max(p.numel() for p in engine.module.parameters()) or stage == 3
    assert optimizer.nccl_start_alignment_factor >= 1
    with raises(NotAvailableError, "quantized"):
        optimizer.quantize_nontrainable_params()

    loss = loss_of(engine, rows(0, rank))
    engine.backward(loss)
    assert optimizer.check_overflow() is False
    engine.step()
    for param in engine.module.parameters():
        master = optimizer.get_full_hp_param(param)
        moment = optimizer.get_full_hp_param(param, "exp_avg")
        assert torch.equal(master, deepspeed.utils.safe_get_full_fp32_param(param))
        assert torch.equal(moment, deepspeed.utils.safe_get_full_optimizer_state(param, "exp_avg")) and moment.any()
    if stage < 3:
        whole = torch.cat([param.detach().flatten() for param in engine.module.parameters()])
        flat = optimizer.bit16_groups_flat
        assert sum(t.numel() for t in flat) >= whole.numel()
        assert {v.item() for t in flat for v in t} >= {v.item() for v in whole}
        for buffer, shards in zip(flat, optimizer.parallel_partitioned_bit16_groups, strict=True):
            assert torch.equal(torch.cat(shards), buffer) and len(shards) == world
            assert shards[0].data_ptr() == buffer.data_ptr()
    else:
        with raises(NotAvailableError, "stage 3"):
            _ = optimizer.bit16_groups_flat

    loss = loss_of(engine, rows(1, rank))
    if rank == 1:
        loss = loss * float("nan")
    engine.backward(loss)
    assert optimizer.check_overflow() is True
    engine.zero_grad()

    own = Path(folder, str(rank))
    own.mkdir()
    engine._copy_recovery_script(str(own))
    assert "zero_to_fp32" in (own / "zero_to_fp32.py").read_text()
    engine.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_attributes_that_programs_read(workers: Any, stage: int, precision: dict[str, Any], tmp_path: Path) -> None:
    workers(2).run(attributes, stage, precision, str(tmp_path))


def masters_to_parameters(stage: int) -> None:
    engine = start(stage, tiny(), adamw, bf16={"enabled": True})
    engine.backward(loss_of(engine, rows(0, dist.get_rank())))
    engine.step()
    before = [deepspeed.utils.safe_get_full_fp32_param(param) for param in engine.module.parameters()]
    for group in engine.optimizer.groups:
        with group.updated.borrowed() as masters, torch.no_grad():
            masters.mul_(2)
    engine.optimizer.update_lp_params()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for param, master in zip(engine.module.parameters(), before, strict=True):
            assert torch.equal(param.detach(), (master * 2).bfloat16())
    engine.destroy()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_masters_are_rounded_into_parameters(workers: Any, stage: int) -> None:
    workers(2).run(masters_to_parameters, stage)


def parameters() -> None:
    engine = start(3, tiny(), adamw, zero={"stage3_param_persistence_threshold": 0})
    params = list(engine.module.parameters())
    assert [param.param_idx_in_group for param in params] == list(range(len(params)))
    handle = params[0].all_gather_coalesced(params)
    handle.wait()
    assert all(param.numel() == param.ds_numel and param.detach().isfinite().all() for param in params)
    params[0].partition(params)
    assert all(param.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE for param in params)
    engine.destroy()


def test_sharded_parameters_gather_together(workers: Any) -> None:
    workers(2).run(parameters)


def shards_of_others(bucket: int) -> None:
    rank = dist.get_rank()
    flats = [torch.full((2 * size,), float(rank)) for size in (5, 8)]
    parts = [list(flat.chunk(2)) for flat in flats]
    for part in parts:
        part[rank].add_(10 * torch.arange(part[rank].numel()))
    all_gather_dp_groups(flats, parts, [None, None], 1, bucket)
    for flat, size in zip(flats, (5, 8), strict=True):
        want = torch.cat([owner + 10.0 * torch.arange(size) for owner in range(2)])
        assert torch.equal(flat, want)


@pytest.mark.parametrize("bucket", [1, 6, 1000])
def test_shards_are_gathered_from_their_owners(workers: Any, bucket: int) -> None:
    workers(2).run(shards_of_others, bucket)
