"""What old addresses give on two ranks: groups by dimension, norms over a client's model-parallel ranks, one engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import deepspeed
from deepspeed.comm.process_groups.mesh import forget_meshes
from deepspeed.runtime import utils
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from tests.harness import WorkerPool

Workers = Callable[[int], WorkerPool]


def sums_over_groups() -> list[float]:
    forget_meshes()  # those of engines that earlier tests had on these workers: the newest one answers
    rank = deepspeed.comm.get_rank()
    values = []
    for group in (groups._get_data_parallel_group(), groups._get_sequence_parallel_group()):
        value = torch.tensor([rank + 1.0])
        deepspeed.comm.all_reduce(value, group=group)
        values.append(value.item())
    sizes = [groups.get_data_parallel_world_size(), groups._get_sequence_parallel_world_size()]
    return [*values, *sizes, groups.get_data_parallel_rank(), groups.get_model_parallel_rank()]


def test_data_parallelism_spans_the_world_and_the_rest_one_rank(workers: Workers) -> None:
    assert workers(2).run(sums_over_groups) == [[3.0, 1.0, 2, 1, 0, 0], [3.0, 2.0, 2, 1, 1, 0]]


def norm_over_model_ranks(norm_type: float) -> float:
    rank = deepspeed.comm.get_rank()
    split, same = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    split.model_parallel = True
    split.grad, same.grad = torch.tensor([3.0 + rank]), torch.tensor([12.0])
    mpu = SimpleNamespace(
        get_model_parallel_group=deepspeed.comm.get_world_group, get_model_parallel_rank=deepspeed.comm.get_rank
    )
    return utils.clip_grad_norm_([split, same], 1e9, norm_type, mpu).item()


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (float("inf"), 12.0)])
def test_parameters_whole_on_model_ranks_count_once(workers: Workers, norm_type: float, norm: float) -> None:
    assert workers(2).run(norm_over_model_ranks, norm_type) == [norm, norm]


def clients_look_at_an_engine(stage: int) -> list[bool]:
    model = torch.nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    norm = utils.clip_grad_norm_(model.parameters(), 0.5)
    engine.step()
    clipped = abs(engine.get_global_grad_norm() - 0.5) < 1e-5 and abs(norm.item() - 20**0.5) < 1e-5
    inner = optimizer.param_groups is engine.basic_optimizer.param_groups
    kinds = (DeepSpeedOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    looks = [isinstance(engine, DeepSpeedEngine), inner, *(isinstance(optimizer, kind) for kind in kinds)]
    engine.destroy()
    return [*looks, clipped]


@pytest.mark.parametrize("stage", [0, 3])
def test_clients_recognise_an_engine(workers: Workers, stage: int) -> None:
    assert workers(2).run(clients_look_at_an_engine, stage) == [[True] * 6] * 2
