"""Writes to gathered parameters: kept, or refused by name; masters that nobody changed keep their bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import ShardedParameterError
from deepspeed.zero import GatheredParameters
from tests.parallel.tiny import STAGES, adamw, loss_of, masters, micro_step, raises, rows, start, tiny

RANKS = 2
WHOLE = {"stage3_param_persistence_threshold": 0}


def data_writes() -> None:
    for stage in STAGES:
        with start(stage, sharded=False, zero=WHOLE if stage == 3 else None) as engine:
            weight = engine.module.out.weight
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            loss_of(engine, rows(0, 0))  # at stage 3 it stays gathered after this
            weight.data.fill_(0.33)
            if stage < 3:
                engine.step()
                assert (weight - 0.33).abs().max() < 0.3
            else:
                with raises(ShardedParameterError, "out.weight"):
                    engine.step()


def test_data_writes_are_kept_or_raise(workers: Any) -> None:
    workers(RANKS).run(data_writes, timeout=120)


def held_writes() -> None:
    for how in ("data", "detach", "row"):
        with start(3, sharded=False, zero=WHOLE) as engine:
            weight = engine.module.out.weight
            with GatheredParameters(weight):
                view = weight.data if how == "data" else weight.detach() if how == "detach" else weight.detach()[0]
            view.zero_()
            with raises(ShardedParameterError, "out.weight"):
                loss_of(engine, rows(0, 0))
            with GatheredParameters(weight):
                view = weight.data if how == "data" else weight.detach() if how == "detach" else weight.detach()[0]
            view.zero_()
            del view
            with raises(ShardedParameterError, "out.weight"):
                weight.sum()


def test_writes_to_views_of_freed_parameters_raise(workers: Any) -> None:
    workers(RANKS).run(held_writes, timeout=120)


def unchanged() -> None:
    for stage in STAGES:
        with start(stage, optimizer=adamw, precision="bf16", zero={}) as engine:
            micro_step(engine, 0)
            before = masters(engine)
            with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
                pass
            after = masters(engine)
            assert all(torch.equal(after[name], before[name]) for name in before), stage
            with GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    engine.module.out.weight[1, 2] = 3.0
            before["out.weight"][1, 2] = 3.0
            after = masters(engine)
            assert all(torch.equal(after[name], before[name]) for name in before), stage


def test_an_edit_rounds_no_master_that_it_did_not_change(workers: Any) -> None:
    workers(RANKS).run(unchanged, timeout=120)


def partitioned() -> None:
    with start(3, optimizer=adamw, precision="bf16") as engine:
        weight = engine.module.out.weight
        micro_step(engine, 0)
        before = masters(engine)["out.weight"]
        weight.all_gather()
        weight.data[0] = 2.0
        weight.partition(has_been_updated=True)
        before[0] = 2.0
        assert torch.equal(masters(engine)["out.weight"], before)


def test_partition_keeps_writes_through_data(workers: Any) -> None:
    workers(RANKS).run(partitioned, timeout=120)


def hybrid_edit() -> None:
    for updates in (True, False):
        model = tiny()
        settings = {"optimizer": adamw} if updates else {"optimizer": None}
        with start(3, model, zero={"mics_shard_size": 2}, **settings) as engine:
            with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
                if dist.get_rank() == 0:
                    for param in model.parameters():
                        param.fill_(0.5)
            assert all(bool((param == 0.5).all()) for param in model.parameters())
            with GatheredParameters(model.out.weight, modifier_rank=3), torch.no_grad():
                model.out.weight.fill_(float(dist.get_rank()))
            assert bool((model.out.weight == 3).all())
            del engine


def test_an_edit_reaches_all_replicas_with_and_without_an_optimizer(workers: Any) -> None:
    workers(4).run(hybrid_edit, timeout=120)


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.apply(self.fill)

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, float(dist.get_rank()))


def applied() -> None:
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    with deepspeed.zero.Init(data_parallel_group=half):
        made = Filled()
    assert bool((made.inner.weight == 2 * (dist.get_rank() // 2)).all())


def test_apply_under_init_over_a_group_without_rank_0(workers: Any) -> None:
    workers(4).run(applied, timeout=120)
