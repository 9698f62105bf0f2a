"""Runs that do not fit under a limit, as models, JSON and limits; and one such run."""

from __future__ import annotations

import copy
import gc
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from deepspeed.errors import MemoryExhaustedError

MB = 1 << 20


class Blocks(nn.Module):
    """Repeated blocks; each row of the input is repeated `again` times, which makes activations large."""

    def __init__(self, width: int, depth: int, again: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.width, self.again = width, again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.repeat_interleave(self.again, 0)).view(-1, self.again, self.width).mean(1)
        return x.float().square().mean()

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.width)


class Words(nn.Module):
    """A language model whose scores over the vocabulary are larger than all of its blocks."""

    def __init__(self, width: int, depth: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.words, self.length = nn.Embedding(vocabulary, width), length
        layer = {"d_model": width, "nhead": 4, "dim_feedforward": 2 * width, "batch_first": True, "dropout": 0.0}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randint(0, self.words.num_embeddings, (rows, self.length))


class Pictures(nn.Module):
    """Convolutions, whose activations are large and whose parameters are small."""

    def __init__(self, channels: int, depth: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        parts = ([nn.Conv2d(channels, channels, 3, padding=1), nn.Tanh()] for _ in range(4 * depth))
        flat = [layer for part in parts for layer in part]
        self.layers = nn.ModuleList(nn.Sequential(*flat[at : at + 8]) for at in range(0, len(flat), 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, 3, self.size, self.size)


MODELS: dict[str, Callable[..., Any]] = {"blocks": Blocks, "words": Words, "pictures": Pictures}


def laid_over(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A JSON with the keys of another in it."""
    found = copy.deepcopy(config)
    for key, value in change.items():
        found[key] = laid_over(found.get(key, {}), value) if isinstance(value, dict) else value
    return found


def suggestion(message: str) -> dict[str, Any]:
    """The part of the JSON that a message suggests."""
    return json.JSONDecoder().raw_decode(message.split("What would fit: ", 1)[1])[0]


def typed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Numbers in the dtype of the parameters."""
    return x.to(next(model.parameters()).dtype) if x.is_floating_point() else x


def train(engine: Any, model: Any, micro: int, updates: int) -> None:
    """So many updates of random data."""
    for _ in range(updates * engine.gradient_accumulation_steps()):
        engine.backward(engine(typed(model, model.batch(micro))))
        engine.step()


_base: list[int] = []  # bytes of addresses of this process before any plant


def _settle() -> int:
    """What a process has mapped once torch is whole and ranks have met; the same before every run of a plant."""
    if not _base:
        for stage in (2, 3):  # threads that they start have addresses of their own
            model = Blocks(8, 2)
            with _engine(model, {**_json(stage), "bf16": {"enabled": True}}) as engine:
                train(engine, model, 1, 1)
        gc.collect()
        _base.append(psutil.Process().memory_info().vms)
    return _base[0]


def _engine(model: nn.Module, config: dict[str, Any]) -> Any:
    import deepspeed

    kind = getattr(torch.optim, config.get("optimizer", {"type": "AdamW"})["type"])
    rest = {key: copy.deepcopy(value) for key, value in config.items() if key != "optimizer"}
    return deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=1e-4), config=rest)[0]


def run_limited(model: tuple[str, dict[str, Any]], room: int, config: dict[str, Any], folder: str) -> None:
    """Two updates under a limit on addresses; a rank that runs out of memory leaves its report, and fails.

    Args:
        model: name and sizes.
        room: MiB for the model and all that it is trained with.
        config: the JSON.
        folder: takes a report by rank: category, message, suggestion.
    """
    torch.manual_seed(0)
    base, before = _settle(), resource.getrlimit(resource.RLIMIT_AS)
    made = MODELS[model[0]](**model[1])
    resource.setrlimit(resource.RLIMIT_AS, (base + room * MB, before[1]))
    try:
        with _engine(made, config) as engine:
            train(engine, made, config["train_micro_batch_size_per_gpu"], 2)
            resource.setrlimit(resource.RLIMIT_AS, before)
    except MemoryExhaustedError as error:
        resource.setrlimit(resource.RLIMIT_AS, before)
        report = {"category": error.category, "message": str(error), "suggestion": dict(error.suggestion)}
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(report))
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def reports(folder: str) -> list[dict[str, Any]]:
    """What ranks have left there."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def _json(stage: int, micro: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    steady = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    zero = {"stage": stage, "reduce_bucket_size": 10**6, **steady, **(zero or {})}
    return {"train_micro_batch_size_per_gpu": micro, "zero_optimization": zero, **more}


WIDE = ("blocks", {"width": 64, "depth": 16, "again": 8})
LARGER = ("blocks", {"width": 2048, "depth": 20})  # 83.9 M elements, 320 MiB in 32 bits

# Name: category, ranks, model, room in MiB, JSON.
PLANTS: dict[str, tuple[str, int, tuple[str, dict[str, Any]], int, dict[str, Any]]] = {
    "blocks at stage 1": ("activations", 2, WIDE, 150, _json(1, 4096)),
    "scores over the vocabulary": (
        "activations", 2, ("words", {"width": 64, "depth": 2, "vocabulary": 20000, "length": 64}), 200, _json(2, 16),
    ),
    "one picture a rank": (
        "activations", 1, ("pictures", {"channels": 16, "depth": 8, "size": 256}), 128, _json(1, 1),
    ),
    "optimizer at stage 0": ("optimizer", 2, LARGER, 1500, _json(0, 4)),
}  # fmt: skip
