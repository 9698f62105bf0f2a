"""Kinds of other programs' JSONs that change what is computed: autocast over bf16, masters from 16-bit weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.tiny import Tiny, loss_of, masters, rows, start, tiny

RANKS = 2
AUTOCAST: dict[str, Any] = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


class Cast(Tiny):
    """Notes whether it runs under autocast, and in which dtype its parameters are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noted = (torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type), self.dtype())
        return super().forward(x)

    def dtype(self) -> torch.dtype:
        return self.out.weight.dtype


def trained(engine: Any, steps: int) -> dict[str, torch.Tensor]:
    for step in range(steps):
        engine.backward(loss_of(engine, rows(step, dist.get_rank())))
        engine.step()
    return masters(engine)


def cast(stages: list[int]) -> None:
    found = []
    for stage in stages:
        torch.manual_seed(0)
        engine = start(stage, Cast(), precision="bf16", **AUTOCAST)
        found.append(trained(engine, 2))
        assert engine.module.noted == (True, torch.bfloat16, torch.bfloat16)
        engine.destroy()
    for other in found[1:]:
        assert all(torch.allclose(value, found[0][name], atol=1e-5) for name, value in other.items())


def test_autocast_runs_over_bf16_parameters_at_every_stage(workers: Any) -> None:
    workers(RANKS).run(cast, [0, 1, 2, 3], timeout=120)


def rounded(stage: int, folder: str) -> None:
    engine = start(stage, tiny(), precision="bf16")
    before = trained(engine, 2)
    engine.save_checkpoint(folder, tag="a")
    engine.destroy()
    for keep in (True, False):
        engine = start(stage, tiny(1), precision="bf16", zero={"load_from_fp32_weights": keep})
        engine.load_checkpoint(folder, tag="a")
        expected = {name: value if keep else value.bfloat16().float() for name, value in before.items()}
        assert all(torch.equal(value, expected[name]) for name, value in masters(engine).items())
        engine.destroy()
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_masters_are_loaded_as_the_parameters_are(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(RANKS).run(rounded, stage, str(tmp_path), timeout=120)
