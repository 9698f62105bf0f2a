"""Activation checkpointing under the engine: gradients as without it, and the bytes kept for backward."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.activation_checkpointing.saved_inputs import Saved
from tests.parallel.tiny import raises, start

RANKS, ROWS, WIDTH, BLOCKS = 2, 6, 8, 4
FLAGS = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
SUBSETS = [dict.fromkeys(s, True) for n in range(4) for s in itertools.combinations(FLAGS, n)]
INPUT = ROWS * WIDTH * 4  # bytes of a block's input


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x


class Pairs:
    """A client's unit: neighbours hold the same activations; data parallelism is over all ranks, or across pairs."""

    def __init__(self, data_parallel_across: bool) -> None:
        world, me = dist.get_world_size(), dist.get_rank()
        pairs = [[i, i + 1] for i in range(0, world, 2)]
        across = [list(range(i, world, 2)) for i in range(2)] if data_parallel_across else [list(range(world))]
        self._pair = next(g for ranks, g in [(r, dist.new_group(r)) for r in pairs] if me in ranks)
        self._data = next(g for ranks, g in [(r, dist.new_group(r)) for r in across] if me in ranks)

    def get_model_parallel_group(self) -> Any:
        return self._pair

    def get_data_parallel_group(self) -> Any:
        return self._data


def kept() -> dict[str, int]:
    """Bytes of saved inputs by tier."""
    found = {"device": 0, "host": 0}
    for entry in gc.get_objects():
        if type(entry) is Saved:
            found[entry.tier] += entry.values.nbytes
    return found


def train(stage: int, block: dict[str, Any], mpu: Any, precision: str = "fp32") -> tuple[list[torch.Tensor], Any]:
    """Gradients of two steps, and what the last forward kept: by the flags, and as plain saved tensors."""
    from deepspeed.utils import safe_get_full_grad

    torch.manual_seed(0)
    model = Deep()
    engine = start(stage, model, precision=precision, activation_checkpointing=block, mpu=mpu)
    of_parameters = {p._ds_member.group.full.untyped_storage()._cdata for p in model.parameters()}
    torch.manual_seed(1)
    grads: list[torch.Tensor] = []
    plain: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if t.requires_grad and storage._cdata not in of_parameters:
            plain[storage._cdata] = storage.nbytes()
        return t

    for step in range(2):
        x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))  # alike on the ranks of a pair
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            plain.clear()
            out = engine(x)
        found = (kept(), sum(plain.values()))
        engine.backward(out.float().square().mean())
        del out
        grads += [safe_get_full_grad(p).clone() for p in model.parameters()]
        engine.step()
    assert kept() == {"device": 0, "host": 0}
    engine.destroy()
    return grads, found


def cell(stage: int, precision: str, across: bool) -> None:
    mpu = Pairs(across)
    wanted, (_, everything) = train(stage, {}, mpu, precision)
    size = INPUT if precision == "fp32" else INPUT // 2
    for flags in SUBSETS:
        block = flags or {"enabled": True}
        grads, (by_flags, plain) = train(stage, block, mpu, precision)
        assert all(torch.equal(a, b) for a, b in zip(wanted, grads, strict=True)), block
        share = BLOCKS * size // (2 if "partition_activations" in flags else 1)
        tier = "host" if "cpu_checkpointing" in flags else "device"
        if flags:
            assert by_flags == {"device": 0, "host": 0} | {tier: share}, (block, by_flags)
        else:
            assert plain == share < everything / 4, (plain, everything)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_each_flag_alone_and_together(workers: Any, stage: int) -> None:
    workers(RANKS).run(cell, stage, "fp32", True, timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pairs_within_data_parallel_ranks(workers: Any, stage: int, precision: str) -> None:
    workers(4).run(cell, stage, precision, True, timeout=180)


def compiled() -> None:
    wanted, _ = train(0, {}, None)
    del wanted
    engine = start(3, Deep().eval(), activation_checkpointing={"cpu_checkpointing": True})
    x = torch.ones(ROWS, 5)
    before = engine(x)
    engine.compile(backend="eager")
    after = engine(x)
    assert torch.equal(before, after)
    assert kept()["host"] == 2 * BLOCKS * INPUT
    engine.backward((before + after).mean())
    engine.step()
    engine.destroy()


def test_blocks_may_be_compiled(workers: Any) -> None:
    workers(1).run(compiled, timeout=90)


def refused() -> None:
    from deepspeed.errors import DeepSpeedConfigError

    with raises(DeepSpeedConfigError, "activation_checkpointing.enabled", "no repeated blocks"):
        start(0, nn.Linear(3, 3), activation_checkpointing={"enabled": True})


def test_enabled_on_a_model_without_blocks_is_an_error(workers: Any) -> None:
    workers(1).run(refused)
