"""Runs that do not fit under a limit, as models, JSON and limits; and one such run."""

from __future__ import annotations

import copy
import gc
import json
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn

from deepspeed.engine.memory.suggestions import Setting
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


class Series(nn.Module):
    """A recurrent network, whose matrices are few and of several shapes."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.cells, self.length = nn.LSTM(width, width, depth, batch_first=True), length
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0]).float().square().mean()

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.length, self.cells.input_size)


class Experts(nn.Module):
    """Feed-forward networks of which each row uses one, behind a table of words that is larger than each of them."""

    def __init__(self, width: int, experts: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(depth))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                for _ in range(experts)
            )
            for _ in range(depth)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights = gate(x).softmax(-1)
            x = x + sum(weights[:, at : at + 1] * expert(x) for at, expert in enumerate(experts))
        return x.float().square().mean()

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randint(0, self.words.num_embeddings, (rows,))


MODELS: dict[str, Callable[..., Any]] = {
    "blocks": Blocks, "words": Words, "pictures": Pictures, "series": Series, "experts": Experts,
}  # fmt: skip


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
            with engine_of(model, {**_json(stage), "bf16": {"enabled": True}}) as engine:
                train(engine, model, 1, 1)
        gc.collect()
        _base.append(psutil.Process().memory_info().vms)
    return _base[0]


def engine_of(model: nn.Module, config: dict[str, Any]) -> Any:
    import deepspeed

    kind = getattr(torch.optim, config.get("optimizer", {"type": "AdamW"})["type"])
    rest = {key: copy.deepcopy(value) for key, value in config.items() if key != "optimizer"}
    return deepspeed.initialize(model=model, optimizer=kind(model.parameters(), lr=1e-4), config=rest)[0]


class Plant(NamedTuple):
    """A run that does not fit.

    Args:
        category: what memory runs out for.
        ranks: processes.
        model: name and sizes.
        room: MiB for the model and all that it is trained with.
        config: the JSON.
        dtype: of the model as it is given.
        alone: the one rank that has a limit; None: all have.
        resumes: memory runs out while a checkpoint is loaded, of a run without a limit (`save_first`).
    """

    category: str
    ranks: int
    model: tuple[str, dict[str, Any]]
    room: int
    config: dict[str, Any]
    dtype: torch.dtype = torch.float32
    alone: int | None = None
    resumes: bool = False


def save_first(plant: Plant, folder: str) -> None:
    """One update without a limit, and a checkpoint."""
    torch.manual_seed(0)
    made = MODELS[plant.model[0]](**plant.model[1]).to(plant.dtype)
    with engine_of(made, plant.config) as engine:
        train(engine, made, plant.config["train_micro_batch_size_per_gpu"], 1)
        engine.save_checkpoint(str(Path(folder, "saved")))


def run_limited(plant: Plant, change: dict[str, Any], folder: str) -> int:
    """Two updates under a limit on addresses; a rank that runs out of memory leaves its report, and fails.

    Args:
        plant: the run.
        change: laid over its JSON.
        folder: takes a report by rank: category, message, suggestion, whether a checkpoint was loaded.

    Returns:
        MiB of the limit that were never used.
    """
    torch.manual_seed(0)
    config = laid_over(plant.config, change)
    base, before, resumed = _settle(), resource.getrlimit(resource.RLIMIT_AS), False
    made = MODELS[plant.model[0]](**plant.model[1]).to(plant.dtype)
    if plant.alone in (None, int(os.environ["RANK"])):
        resource.setrlimit(resource.RLIMIT_AS, (base + plant.room * MB, before[1]))
    try:
        with engine_of(made, config) as engine:
            if plant.resumes:
                resumed = engine.load_checkpoint(str(Path(folder, "saved")))[0] is not None
                assert resumed
            train(engine, made, config["train_micro_batch_size_per_gpu"], 2)
            resource.setrlimit(resource.RLIMIT_AS, before)
    except MemoryExhaustedError as error:
        resource.setrlimit(resource.RLIMIT_AS, before)
        rank = int(os.environ["RANK"])
        report = {"rank": rank, "category": error.category, "message": str(error), "suggestion": error.suggestion}
        report["resumed"] = resumed
        Path(folder, f"{rank}.json").write_text(json.dumps(report))
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return plant.room - (_most_mapped() - base) // MB


def _most_mapped() -> int:
    """Most bytes of addresses that this process ever had."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmPeak:"))
    return int(line.split()[1]) * 1024


def predicted_and_mapped(model: tuple[str, dict[str, Any]], config: dict[str, Any], folder: str) -> tuple[int, int]:
    """MiB that advice computes for the setting of a run, and that two updates map, under a limit that is never met."""
    torch.manual_seed(0)
    for part in ("offload_optimizer", "offload_param"):
        if part in config["zero_optimization"]:
            config["zero_optimization"][part]["nvme_path"] = folder
    base, before = _settle(), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (base + (64 << 30), before[1]))
    made = MODELS[model[0]](**model[1])
    try:
        with engine_of(made, config) as engine:
            needs = engine._instruments._memory.holding().needs(Setting.of(engine._instruments._state.ds_config))
            train(engine, made, config["train_micro_batch_size_per_gpu"], 2)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return int(needs) // MB, (_most_mapped() - base) // MB


def reports(folder: str) -> list[dict[str, Any]]:
    """What ranks have left there."""
    return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def _json(stage: int, micro: int = 1, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    steady = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    zero = {"stage": stage, "reduce_bucket_size": 10**6, **steady, **(zero or {})}
    return {"train_micro_batch_size_per_gpu": micro, "zero_optimization": zero, **more}


WIDE = ("blocks", {"width": 64, "depth": 16, "again": 8})
LARGER = ("blocks", {"width": 2048, "depth": 20})  # 83.9 M elements, 320 MiB in 32 bits

SQUARE = ("blocks", {"width": 1536, "depth": 16})  # 37.8 M elements, 144 MiB in 32 bits
SQUARES = ("blocks", {"width": 1536, "depth": 32})
SERIES = ("series", {"width": 768, "depth": 6, "length": 4})
EXPERTS = ("experts", {"width": 384, "experts": 4, "depth": 6, "vocabulary": 20000})
BF16, ALL16 = {"bf16": {"enabled": True}}, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
FP16, SGD = {"fp16": {"enabled": True, "loss_scale": 1.0}}, {"optimizer": {"type": "SGD"}}
DISK = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
AWAY = {"offload_optimizer": DISK | {"buffer_count": 1}}
ALL_AWAY = AWAY | {"offload_param": DISK | {"buffer_count": 1, "max_in_cpu": 0}}
PAIR = {"stage3_max_live_parameters": 5 * 10**6, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}

PLANTS = {
    "blocks at stage 1": Plant("activations", 2, WIDE, 150, _json(1, 4096)),
    "scores over the vocabulary": Plant(
        "activations", 2, ("words", {"width": 64, "depth": 2, "vocabulary": 20000, "length": 64}), 200, _json(2, 16)
    ),
    "one picture a rank": Plant(
        "activations", 1, ("pictures", {"channels": 16, "depth": 8, "size": 256}), 128, _json(1, 1)
    ),
    "optimizer at stage 0": Plant("optimizer", 2, LARGER, 1500, _json(0, 4)),
    "optimizer of a series at stage 2": Plant("optimizer", 1, SERIES, 420, _json(2, 2)),
    "optimizer in 16 bits at stage 0": Plant("optimizer", 2, SQUARE, 300, _json(0, 2, **ALL16)),
    "optimizer of one rank alone": Plant("optimizer", 2, SQUARE, 300, _json(0, 2, **ALL16), alone=1),
    "masters of bf16 at stage 1": Plant("masters", 1, SQUARES, 395, _json(1, 2, **BF16)),
    "masters of fp16 at stage 3": Plant("masters", 1, SQUARES, 395, _json(3, 2, **FP16)),
    "gradients at stage 3": Plant("gradients", 1, SQUARE, 430, _json(3, 2, **SGD)),
    "gradients of a window at stage 1": Plant("gradients", 2, SQUARES, 540, _json(1, 2, gradient_accumulation_steps=2)),
    "gathered at stage 3": Plant("gathered", 2, SQUARES, 680, _json(3, 2, **SGD)),
    "beside what is gathered at stage 3": Plant("activations", 2, SQUARES, 700, _json(3, 2, **SGD)),
    "messages of a window at stage 1": Plant("transit", 2, SQUARE, 420, _json(1, 2, gradient_accumulation_steps=2)),
    "a resumed run at stage 2": Plant("optimizer", 1, SQUARE, 450, _json(2, 2), resumes=True),
    "a resumed run with little room": Plant("optimizer", 1, SQUARE, 330, _json(2, 2), resumes=True),
    "a resumed run at stage 1": Plant("optimizer", 2, SQUARE, 360, _json(1, 2), resumes=True),
    "buffers of a disk at stage 2": Plant(
        "pools", 1, SQUARE, 600, _json(2, 2, {"offload_optimizer": DISK | {"buffer_count": 64}})
    ),
}

# Less than the model itself needs while it is laid out.
HOPELESS = {"parameters at stage 3": Plant("parameters", 1, SQUARE, 147, _json(3, 2))}

# Name: ranks, model, JSON, how far a prediction may lie above.
MEASURED: dict[str, tuple[int, tuple[str, dict[str, Any]], dict[str, Any], float]] = {
    "stage 0": (1, SQUARE, _json(0, 2), 1.5),
    "stage 2 in bf16": (1, SQUARE, _json(2, 2, **BF16), 1.5),
    "stage 2 on two ranks": (2, SQUARE, _json(2, 2), 2.0),
    "stage 2 and a disk": (1, SQUARE, _json(2, 2, AWAY), 2.0),
    "stage 3 and a disk in bf16": (1, SQUARE, _json(3, 2, PAIR | ALL_AWAY, **BF16), 2.0),
    "stage 3 and a disk on two ranks": (2, SQUARE, _json(3, 2, PAIR | ALL_AWAY), 2.0),
    "experts and a disk": (1, EXPERTS, _json(2, 2, AWAY, **BF16), 2.0),
}
