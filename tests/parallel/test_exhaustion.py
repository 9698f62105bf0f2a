"""Running out of memory on two ranks: the category that it was for is named, and the key that is suggested fits."""

from __future__ import annotations

import gc
import json
import re
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import MemoryExhaustedError
from tests.harness.pool import WorkerPool
from tests.parallel.tiny import start

Workers = Callable[[int], WorkerPool]
MB = 1 << 20


class Deep(nn.Module):
    """Blocks whose activations, or parameters, are large."""

    def __init__(self, width: int, depth: int, again: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.repeat(self.again, 1))[: x.shape[0] * self.again] if self.again > 1 else layer(x)
            if self.again > 1:
                x = x.view(self.again, -1, x.shape[-1]).mean(0)
        return x


def limited(plant: dict[str, Any], change: dict[str, Any]) -> str:
    """Two updates under a limit on addresses: "" or the error."""
    torch.manual_seed(0)
    resource_limit = resource.getrlimit(resource.RLIMIT_AS)
    model = Deep(plant["width"], plant["depth"], plant.get("again", 1))
    zero = {"reduce_bucket_size": plant.get("bucket", 10**5), "stage3_param_persistence_threshold": 0}
    for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"):
        zero[key] = change.get(key, plant.get("live", 10**9))
    micro = change.get("train_micro_batch_size_per_gpu", plant.get("micro", 4))
    steps = change.get("gradient_accumulation_steps", 1)
    stage = change.get("zero_optimization", {}).get("stage", plant["stage"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = nn.Linear(8, 8)
    warm(torch.randn(4, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters()).step()  # the first one imports a good part of torch
    settings: dict[str, Any] = {"accumulation": steps, "sharded": False, "zero": zero}
    settings["activation_checkpointing"] = {"enabled": change.get("enabled", False)}
    with start(stage, model, optimizer, train_micro_batch_size_per_gpu=micro, **settings) as engine:
        for _ in range(steps if plant.get("warm") else 0):  # what ranks share is mapped, and counts as addresses
            engine.backward(engine(torch.randn(1, plant["width"])).square().mean())
            engine.step()
        gc.collect()
        held = int(re.findall(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (held + plant["room"] * MB, resource_limit[1]))
        try:
            for _ in range(2 * steps):
                engine.backward(engine(torch.randn(micro, plant["width"])).square().mean())
                engine.step()
        except MemoryExhaustedError as error:
            return str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, resource_limit)
    return ""


def suggestion(message: str) -> dict[str, Any]:
    """The keys and values of a report."""
    text = message.split("What would fit: ")[1]
    found: dict[str, Any] = {}
    for name, value in re.findall(r'"(\w+)": (\{[^}]*\}|\d+|true)', text):
        found[name] = json.loads(value)
    return found


_WIDE: dict[str, Any] = {"width": 64, "depth": 16, "micro": 4096, "again": 8, "room": 150, "warm": True}
PLANTS: dict[str, dict[str, Any]] = {
    "activations": {"stage": 1, **_WIDE},
    "activations, gathered": {"stage": 3, **_WIDE},
    "optimizer": {"stage": 0, "width": 2800, "depth": 4, "room": 340},
}


@pytest.mark.slow
@pytest.mark.parametrize("category", PLANTS)
def test_the_category_is_named_and_the_suggestion_fits(workers: Workers, category: str) -> None:
    plant, category = PLANTS[category], re.split(r"\W", category)[0]
    said = workers(2).run(limited, plant, {}, timeout=60)
    assert all(f"memory ran out for {category} (" in message for message in said), said
    change = suggestion(said[0])
    assert change, said
    assert workers(2).run(limited, plant, change, timeout=60) == ["", ""], (change, said)
