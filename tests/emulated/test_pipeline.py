"""A model in stages, on the device: losses as on the CPU, and no report."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.utils import safe_get_full_fp32_param
from tests.emulated import runs
from tests.emulated.needs import LIMIT, need_compiler

need_compiler()


def staged(pp: int, stage: int, settings: Any, own_stream: bool, lengths: bool, late: bool) -> runs.Seen:
    import deepspeed
    from deepspeed.comm import get_rank
    from deepspeed.comm.collectives import collectives
    from deepspeed.comm.process_groups.mesh import current_mesh
    from tests.parallel.dense import momentum
    from tests.parallel.pipeline_runs import batches, config_of, deep, replica

    draw = random.Random(get_rank())
    with runs.observed(own_stream) as seen:
        model = deep("GPTNeo", 4 if pp == 2 else 8)
        config = config_of(stage, pp, 4, 1.0, **settings)
        engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
        collectives.PLANTED_DELAY = (lambda _: time.sleep(draw.random() * 0.004)) if late else None
        try:
            for window in range(3):
                given = batches(model, 4 * window, 4, replica(current_mesh()), lengths)
                seen.losses.append(float(engine.train_batch(given)))
        finally:
            collectives.PLANTED_DELAY = None
        engine.destroy()
    return seen


LATER = {"pipeline": {"schedule": "zero_bubble"}}
TWO = {"pipeline": {"schedule": "interleaved", "chunks": 2}}
CELLS = [
    (2, 2, 1, {}, True, True, True),
    *(
        pytest.param(ranks, pp, stage, settings, own, False, False, marks=pytest.mark.slow)
        for ranks, pp in ((2, 2), (4, 4), (4, 2))
        for stage in (0, 1, 3)
        for settings in ({}, TWO)
        for own in (False, True)
    ),
    pytest.param(4, 2, 1, {"tensor_parallel": {"autotp_size": 2}}, False, False, False, marks=pytest.mark.slow),
    pytest.param(2, 2, 3, TWO, False, True, True, marks=pytest.mark.slow),
    *(
        pytest.param(ranks, pp, stage, LATER, own, True, late, marks=pytest.mark.slow)
        for ranks, pp in ((2, 2), (4, 4), (4, 2))
        for stage in (0, 1)
        for own, late in ((False, False), (True, True))
    ),
]


@pytest.mark.parametrize(("ranks", "pp", "stage", "settings", "own", "lengths", "late"), CELLS)
def test_stages_train_as_on_the_cpu(
    workers: Any, emulated: Any, ranks: int, pp: int, stage: int, settings: Any, own: bool, lengths: bool, late: bool
) -> None:
    theirs = workers(ranks).run(staged, pp, stage, settings, False, lengths, False, timeout=LIMIT)
    ours = emulated(ranks).run(staged, pp, stage, settings, own, lengths, late, timeout=LIMIT)
    assert [report for rank in ours for report in rank.reports] == []
    for rank, other in zip(ours, theirs, strict=True):
        assert max(abs(a - b) / abs(b) for a, b in zip(rank.losses, other.losses, strict=True)) <= 2e-6


class Mirror(nn.Module):
    """A square layer that two stages share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.weight)


def mirrored(stage: int, settings: Any, own_stream: bool) -> runs.Seen:
    """The first stage uses tied layers A and B, the last one B and A: their gradients come in opposite orders."""
    import deepspeed
    from deepspeed.comm.process_groups.mesh import current_mesh
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from tests.parallel.dense import momentum
    from tests.parallel.pipeline_runs import config_of, replica

    width, draw = 8, torch.Generator().manual_seed(3)
    a, b = (TiedLayerSpec(key, Mirror, width) for key in ("a", "b"))
    with runs.observed(own_stream) as seen:
        torch.manual_seed(0)
        between = [LayerSpec(nn.Linear, width, width) for _ in range(2)]
        model = PipelineModule([a, b, *between, b, a], 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        optimizer = momentum(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(stage, 2, 2, **settings))
        for _ in range(3):
            rows = torch.randn(2, 2, 4, width, generator=draw).to(engine.device) * (1 + replica(current_mesh()))
            seen.losses.append(float(engine.train_batch(iter([(x, x.flip(0)) for x in rows]))))
        seen.extra = {
            name: safe_get_full_fp32_param(param).cpu() for name, param in model.tied_modules.named_parameters()
        }
        engine.destroy()
    return seen


MIRRORED = [
    (2, 1, {}),
    *(
        pytest.param(*cell, marks=pytest.mark.slow)
        for cell in (
            (2, 0, {}), (2, 3, {}), (4, 0, {}), (4, 1, {}), (4, 3, {}),
            (2, 1, {"deterministic_reduction": True}), (4, 1, {"deterministic_reduction": True}),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "stage", "settings"), MIRRORED)
@pytest.mark.parametrize("own", [pytest.param(False, marks=pytest.mark.slow), True])
def test_tied_layers_whose_gradients_come_in_opposite_orders_are_summed_each_with_its_own(
    workers: Any, emulated: Any, ranks: int, stage: int, settings: Any, own: bool
) -> None:
    theirs = workers(ranks).run(mirrored, stage, settings, False, timeout=LIMIT)
    ours = emulated(ranks).run(mirrored, stage, settings, own, timeout=LIMIT)
    assert [report for rank in ours for report in rank.reports] == []
    for rank, other in zip(ours, theirs, strict=True):
        assert rank.losses == pytest.approx(other.losses, rel=2e-6)
        for name, value in rank.extra.items():
            assert float((value - other.extra[name]).norm()) <= 2e-6 * float(value.norm()), name
