"""Random damage to valid configurations: it resolves, or it is a DeepSpeedConfigError, and nothing else."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, Facts
from deepspeed.config.schema import sections_by_path, spellings
from tests.unit.config.clients import ACCELERATE_3, HF_AUTO, LIGHTNING, QUICKSTART

TP = {"patterns": ["q"], "partition_type": "row"}
GROUP = {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["attention"]}
BLOCKS = {
    "train_batch_size": 8,
    "tensor_parallel": {"autotp_size": 0, "partition_config": {"layer_specs": [TP]}},
    "compression_training": {
        "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"g": GROUP}}
    },
    "zero_optimization": {"stage": 3, "leaf_module": {"classes": ["Expert"]}, "cpu_offload": False},
    "checkpoint": {"writer": {"type": None}},
}
BASES = [QUICKSTART, ACCELERATE_3, HF_AUTO, LIGHTNING, BLOCKS]
NAMES = sorted({name for section in sections_by_path().values() for name in spellings(section)})
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 3, 2**70, -0.0, 1.5, 1e6, 5e8, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "auto", "none", "cpu", "true", "1e-3", "x" * 300, "\ud800", [], [1], ["auto"], [[]], {}, {"enabled": True},
    {"a": {"b": 1}}, {1: 2}, {None: None}, (1, 2), {1, 2}, b"x", object(), 1j, float,
]  # fmt: skip


def homes(config: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The configuration and every dict and list inside it."""
    found: list[Any] = [config]
    for value in config.values() if isinstance(config, dict) else config:
        if isinstance(value, (dict, list)) and value:
            found += homes(value)
    return found


def damage(config: dict[str, Any], rng: random.Random) -> None:
    home = rng.choice(homes(config))
    if isinstance(home, list):
        home[rng.randrange(len(home))] = copy.deepcopy(rng.choice(JUNK))
        return
    name = rng.choice(list(home)) if home else "a"
    move = rng.randrange(6)
    if move == 0:
        home.pop(name, None)
    elif move == 1:
        home[rng.choice(NAMES)] = copy.deepcopy(rng.choice(JUNK))
    elif move == 2 and isinstance(name, str) and name:
        at = rng.randrange(len(name))
        home[name[:at] + rng.choice("abcdef._3") + name[at + 1 :]] = home.pop(name)
    elif move == 3:
        home[rng.choice(NAMES)] = copy.deepcopy(home.get(name))
    elif move == 4:
        home[rng.choice([None, 1, "", "a.b", "auto", ("a",)])] = copy.deepcopy(rng.choice(JUNK))
    else:
        home[name] = copy.deepcopy(rng.choice(JUNK))


@pytest.mark.parametrize("count", [400, pytest.param(2000, marks=pytest.mark.slow)])
def test_random_mutations(count: int) -> None:
    rng = random.Random(20)
    facts = Facts(hidden_size=64, loader_batch_size=2, num_train_steps=100, device="cpu", bf16_fast=False)
    resolved = 0
    for _ in range(count):
        config = copy.deepcopy(rng.choice(BASES))
        for _ in range(rng.randint(1, 3)):
            damage(config, rng)
        before = repr(config)
        try:
            cfg = DeepSpeedConfig(config, world=rng.choice([1, 2]), facts=facts)
        except DeepSpeedConfigError as error:
            assert str(error)
        else:
            resolved += 1
            assert cfg.explain()
            assert cfg.train_batch_size > 0
        assert repr(config) == before
    assert 0.075 * count < resolved < 0.925 * count
