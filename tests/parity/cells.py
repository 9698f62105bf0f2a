"""One cell of the parity table, run on the engine and on the reference."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.configs import config
from tests.parity.models import batch, small_lm
from tests.parity.reference import Reference

STEPS = 20
FEWER = 12  # of the fast cells: up to the last step that is planted below
POISON = 1e30  # finite in the fp32 loss, infinite in fp16 gradients
POISONED_STEPS = (3, 4, 11)  # the first spends the hysteresis, the second halves the scale

SGD = {"lr": 0.05, "momentum": 0.9}
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4}
ADAMW_DEFAULT_EPS = {"lr": 1e-3, "weight_decay": 0.1}
OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("SGD", SGD),
    "adamw": ("AdamW", ADAMW),
    "adamw-default-eps": ("AdamW", ADAMW_DEFAULT_EPS),
}


CPU, NVME, HALF = {"device": "cpu"}, {"device": "nvme"}, {"device": "cpu", "ratio": 0.5}
TIERS: dict[str, dict[str, dict[str, Any]]] = {
    "device": {},
    "cpu": {"offload_optimizer": CPU},
    "ratio": {"offload_optimizer": HALF},
    "nvme": {"offload_optimizer": NVME},
    "cpu-cpu": {"offload_optimizer": CPU, "offload_param": CPU},
    "nvme-nvme": {"offload_optimizer": NVME, "offload_param": NVME},
    "ratio-nvme": {"offload_optimizer": HALF, "offload_param": NVME},
    "device-cpu": {"offload_param": CPU},
    "nvme-cpu": {"offload_optimizer": NVME, "offload_param": CPU},
}


@dataclass(frozen=True)
class Cell:
    """A row of settings; `bucket` None leaves every bucket size at its default, `tier` is a key of `TIERS`."""

    stage: int
    ranks: int
    precision: str
    accumulation: int
    bucket: int | None = None
    optimizer: str = "sgd"
    client: bool = True
    clip: float = 0.0
    sharded: bool = True
    zero: tuple[tuple[str, Any], ...] = ()
    tier: str = "device"

    def __str__(self) -> str:
        parts = [f"stage{self.stage}", f"ranks{self.ranks}", self.precision, f"acc{self.accumulation}"]
        parts += [f"bucket-{self.bucket or 'default'}", ("client-" if self.client else "json-") + self.optimizer]
        parts += ["clip"] * bool(self.clip) + ["defaults"] * (not self.sharded)
        return "-".join(parts + [self.tier] * (self.tier != "device"))


@dataclass
class Record:
    """What one process saw: losses per micro-batch, and per-step gradients, norms and masters."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    published: dict[str, torch.Tensor] = field(default_factory=dict)
    skipped: int = 0


def make_optimizer(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A factory of the torch optimizer that a name of `OPTIMIZERS` stands for."""
    kind, options = OPTIMIZERS[name]
    return lambda parameters: getattr(torch.optim, kind)(parameters, **options)


def tier_of(name: str) -> dict[str, Any]:
    """The entries of `zero_optimization` that offload; `name` is a key of `TIERS`."""
    found = {}
    for key, section in TIERS[name].items():
        folder = {"nvme_path": str(Path(tempfile.gettempdir()) / "deepspeed-tests")}
        limit = {"max_in_cpu": 0} if key == "offload_param" else {}
        found[key] = {**section, **(folder | limit if section["device"] == "nvme" else {})}
    return found


def poison(cell: Cell, step: int, micro: int, rank: int) -> float:
    """The factor of the loss; large enough to overflow fp16 at the planted places."""
    planted = cell.precision == "fp16" and step in POISONED_STEPS
    return POISON if planted and rank == cell.ranks - 1 and micro == cell.accumulation - 1 else 1.0


def reference(cell: Cell, steps: int = STEPS) -> list[Record]:
    """The reference's records, one per rank; cells that differ in layout only share one replay."""
    return _replay(cell.ranks, cell.precision, cell.accumulation, cell.optimizer, cell.clip, steps)


@cache
def _replay(ranks: int, precision: str, accumulation: int, optimizer: str, clip: float, steps: int) -> list[Record]:
    cell = Cell(0, ranks, precision, accumulation)
    twin = Reference(small_lm(), make_optimizer(optimizer), ranks, accumulation, precision, clip)
    records = [Record() for _ in range(ranks)]
    for step in range(steps):
        for micro in range(accumulation):
            for rank, replica in enumerate(twin.copies):
                loss = replica(*batch(step, micro, rank)) * poison(cell, step, micro, rank)
                twin.backward(rank, loss)
                records[rank].losses.append(loss.item())
        gradients = twin.gradients()
        twin.step()
        for record in records:
            record.gradients.append(gradients)
            record.norms.append(twin.norm)
            record.first = record.first or twin.parameters()
    for record in records:
        record.last, record.skipped = twin.parameters(), twin.skipped
    return records


def build_engine(cell: Cell) -> Any:
    """An engine for the cell on this rank."""
    import deepspeed

    model = small_lm()
    kind, options = OPTIMIZERS[cell.optimizer]
    zero: dict[str, Any] = dict(cell.zero) | tier_of(cell.tier)
    if cell.bucket:
        zero |= {"reduce_bucket_size": cell.bucket, "allgather_bucket_size": cell.bucket}
    extra: dict[str, Any] = {} if cell.client else {"optimizer": {"type": kind, "params": options}}
    settings = config(cell.stage, model, cell.precision, cell.accumulation, cell.clip, cell.sharded, zero=zero, **extra)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=make_optimizer(cell.optimizer)(list(model.parameters())) if cell.client else None,
        config=settings,
    )
    return engine


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """The full fp32 masters of what is trained now, by name, on every rank."""
    from deepspeed.zero.api.tensor_access import safe_get_full_fp32_param

    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}


def published(engine: Any) -> dict[str, torch.Tensor]:
    """The full parameters that computation sees, by name, on every rank."""
    from deepspeed.zero import GatheredParameters

    values = {}
    for name, parameter in engine.module.named_parameters():
        with GatheredParameters(parameter):
            values[name] = parameter.detach().clone()
    return values


def gradients(engine: Any) -> dict[str, torch.Tensor]:
    """The full mean gradients by name, on every rank."""
    found = {name: parameter.grad for name, parameter in engine.module.named_parameters()}
    return {name: grad.detach().float().clone() for name, grad in found.items() if grad is not None}


def run_cell(cell: Cell, steps: int = STEPS, inspect: bool = False) -> Record:
    """Train the cell on this rank's engine.

    Args:
        cell: the settings.
        steps: optimizer steps.
        inspect: also record each step's gradients.
    """
    engine = build_engine(cell)
    record = Record()
    for step in range(steps):
        for micro in range(cell.accumulation):
            loss = engine(*batch(step, micro, dist.get_rank())) * poison(cell, step, micro, dist.get_rank())
            record.losses.append(loss.item())
            engine.backward(loss)
            if inspect and micro == cell.accumulation - 1:
                record.gradients.append(gradients(engine))
            engine.step()
        record.norms.append(engine.get_global_grad_norm())
        record.first = record.first or masters(engine)
    record.last, record.published, record.skipped = masters(engine), published(engine), engine.skipped_steps
    engine.destroy()
    return record
