"""What ranks of a sequence hold, send and save: bytes as the formula has them, and any mesh after any other."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.tensor_parallel.parallelize import plan_of
from deepspeed.zero.api.memory_estimate import state_bytes
from tests.parallel.checkpointing import differences, everything
from tests.parallel.dense import adamw
from tests.parallel.sequence_runs import LENGTH, config_of, loss_of, start
from tests.parallel.tensor_runs import model_of

Sizes = dict[str, int]


def ranks_of(sizes: Sizes) -> int:
    return int(torch.tensor([1, *sizes.values()]).prod())


def steps(engine: Any, which: range) -> list[float]:
    losses = []
    for step in which:
        loss = loss_of(engine, step, 0)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# -- memory -----------------------------------------------------------------------------------------------------------


def held(sizes: Sizes, stage: int) -> tuple[float, float]:
    """Bytes of state on this rank, and what the plan says: parameters ÷ tp, their states ÷ (dp_shard × sp) besides."""
    model = model_of("Llama", hidden_size=96, intermediate_size=256, num_hidden_layers=4)
    dense = sum(param.numel() for param in model.parameters())
    with start(model, config_of(sizes, stage), adamw) as engine:
        mesh = current_mesh()
        plan = plan_of(model)
        own = dense if plan is None else plan.held(mesh.axis("tp").rank)
        steps(engine, range(1))
        engine.backward(loss_of(engine, 1, 0))  # the formula is of the moment before a step, with moments there
        now = engine.state_bytes()
        engine.step()
        share = mesh.size("dp_shard") * mesh.size("sp")
        return sum(now.values()) - now["gathered"], state_bytes(stage, share, low_precision=False).total * own


@pytest.mark.parametrize(
    ("sizes", "stage"),
    [
        pytest.param(sizes, stage, marks=() if (sizes, stage) == ({"sp": 2}, 3) else pytest.mark.slow)
        for sizes in ({"sp": 2}, {"sp": 4}, {"sp": 2, "dp_shard": 2}, {"sp": 2, "tp": 2}, {"sp": 2, "dp_replicate": 2})
        for stage in (0, 1, 2, 3)
        if "dp_replicate" not in sizes or stage == 3
    ],
    ids=str,
)
def test_states_are_what_the_plan_says(workers: Any, sizes: Sizes, stage: int) -> None:
    for found, said in workers(ranks_of(sizes)).run(held, sizes, stage, timeout=90):
        assert abs(found - said) <= 0.03 * said, (found, said)


# -- the wire ---------------------------------------------------------------------------------------------------------


def sent(sp: int, kv: int) -> Counter[tuple[str, int]]:
    """Calls of a step over the ranks of a sequence by operation and bytes, after batches and losses are compared."""
    config = config_of({"sp": sp}, 0, comms_logger={"enabled": True})
    with start(model_of("Llama", num_key_value_heads=kv), config) as engine:
        steps(engine, range(10))
        comms_logger.reset()
        steps(engine, range(10, 11))
        comms_logger.enabled = False
        found: Counter[tuple[str, int]] = Counter()
        for row in comms_logger.summary():
            found[row["op"], row["bytes"]] += row["count"]
        comms_logger.reset()
    return found


def formula(sp: int, kv: int) -> Counter[tuple[str, int]]:
    """Of fp32: query, key, value and context of each layer, there and in backward; positions; the loss.

    In backward, before their gradients, the context and copied heads come once more.
    """
    made = model_of("Llama", num_key_value_heads=kv).config
    rows, width, heads = 2, made.hidden_size // made.num_attention_heads, made.num_attention_heads
    copies = max(1, sp // kv)
    calls: Counter[tuple[str, int]] = Counter()
    again = int(copies > 1)
    for count, times in ((heads, 2), (kv * copies, 2 + again), (kv * copies, 2 + again), (heads, 3)):
        calls["all_to_all_single", 4 * rows * LENGTH // sp * count * width] += times * made.num_hidden_layers
    calls["all_gather_into_tensor", 8 * rows * LENGTH] += 1  # positions
    calls["all_reduce", 4] += 1  # tokens that count
    calls["all_gather_into_tensor", 4 * sp] += 1  # parts of the loss
    calls["all_reduce", 4 * sp] += 1  # and in backward
    return calls


@pytest.mark.parametrize(("sp", "kv"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_bytes_are_those_of_the_formula(workers: Any, sp: int, kv: int) -> None:
    for found in workers(sp).run(sent, sp, kv, timeout=60):
        engines = ("reduce", "agreement")  # of gradients and the window, as without sequences
        assert {key: count for key, count in found.items() if key[0] not in engines} == formula(sp, kv)


# -- checkpoints ------------------------------------------------------------------------------------------------------

MESHES: list[Sizes] = [
    {}, {"sp": 2}, {"sp": 4}, {"dp_shard": 2}, {"tp": 2}, {"sp": 2, "dp_shard": 2}, {"sp": 2, "tp": 2},
    {"sp": 2, "dp_replicate": 2}, {"sp": 2, "tp": 2, "dp_shard": 2},
]  # fmt: skip


def kept(folder: str, sizes: Sizes, stage: int, family: str, load: bool) -> tuple[Any, list[float]]:
    """Masters and moments where a run was saved or loaded, and the losses after it."""
    with start(model_of(family, seed=4 if load else 3), config_of(sizes, stage), adamw) as engine:
        if load:
            engine.load_checkpoint(folder)
        else:
            steps(engine, range(2))
            engine.save_checkpoint(folder)
        return everything(engine), steps(engine, range(2, 5))


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(20))
def test_random_pairs_of_meshes(workers: Any, tmp_path: Path, trial: int) -> None:
    draw = random.Random(trial)
    family = draw.choice(["Llama", "GPT2", "Qwen3"])
    pair = [draw.choice([one for one in MESHES if "sp" in one]), draw.choice(MESHES)]
    draw.shuffle(pair)
    ends = []
    for sizes, load in zip(pair, (False, True), strict=True):
        stage = 3 if "dp_replicate" in sizes else draw.randint(0, 3)
        ends.append(workers(ranks_of(sizes)).run(kept, str(tmp_path), sizes, stage, family, load, timeout=240)[0])
    (wanted, one), (found, two) = ends
    assert not differences(found, wanted)
    assert max(abs(a - b) / b for a, b in zip(one, two, strict=True)) <= 2e-6, (one, two)
