"""What a worker does: a few steps of one cell, on the emulated device or on the CPU, and what was seen meanwhile."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from tests.emulated.cells import Cell
from tests.parity.models import VOCABULARY, WIDTH, SmallLM, batch

STEPS = 3


@dataclass
class Seen:
    """What one rank saw."""

    losses: list[float]
    reports: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    waits: list[tuple[str, str]] = field(default_factory=list)
    trace: list[tuple[str, int, int, str]] = field(default_factory=list)
    extra: Any = None


class Embedding(torch.nn.Embedding):
    """Small values, as language models begin: logits of a tied head are then small beside the loss in bf16 too."""

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=0.05)


class LM(SmallLM):
    """The model of the parity table, its blocks computed again in backward if asked."""

    checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(VOCABULARY, WIDTH)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        import deepspeed

        x = self.embedding(ids)
        for block in self.blocks:
            x = deepspeed.checkpointing.checkpoint(block, x) if self.checkpointing else block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def emulates() -> Any:
    """The extension in a worker that has it, else None."""
    device = sys.modules.get("tests.emulated.device")
    return None if device is None else device.native


@contextlib.contextmanager
def observed(own_stream: bool = False) -> Iterator[Seen]:
    """Collect what the emulated device sees inside, on a stream of the user's own if asked."""
    native, seen = emulates(), Seen([])
    if native is None:
        yield seen
        return
    torch.cuda.synchronize()
    native.clear()
    before = torch.cuda.current_stream()
    if own_stream:
        own = torch.cuda.Stream()
        own.wait_stream(before)
        torch.cuda.set_stream(own)
    try:
        yield seen
    finally:
        seen.counters, seen.waits, seen.trace = native.counters(), native.waits(), native.trace()
        for _ in range(20):  # every failed message is raised once
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
                break
        seen.reports = list(dict.fromkeys(native.reports()))
        torch.cuda.set_stream(before)
        native.clear()


def config_of(cell: Cell) -> dict[str, Any]:
    """The JSON of a cell."""
    nvme = {"nvme_path": tempfile.gettempdir() + "/deepspeed-tests", "pin_memory": True}
    if cell.small_buckets:
        nvme["buffer_count"] = 1
    optimizer, _, parameters = cell.tier.partition("-")
    zero: dict[str, Any] = {"stage": cell.stage, "stage3_param_persistence_threshold": 0}
    if optimizer != "device":
        zero["offload_optimizer"] = {"device": optimizer, "pin_memory": True} | (nvme if optimizer == "nvme" else {})
    if parameters:
        limits = {"max_in_cpu": 0} | nvme if parameters == "nvme" else {}
        zero["offload_param"] = {"device": parameters, "pin_memory": True} | limits
    if cell.hybrid:
        zero["mics_shard_size"] = 2
    if cell.small_buckets:
        zero |= {"reduce_bucket_size": 3000, "stage3_prefetch_bucket_size": 3000, "stage3_max_live_parameters": 8000}
    entries: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4}},
        "zero_optimization": zero,
    }
    if cell.secondary:
        zero["zero_hpz_partition_size"] = 2
    if cell.wire:
        where = "" if cell.hosts else "_within_host"
        weights = {f"weights{where}": cell.wire} if cell.stage else {}
        entries["wire"] = {f"gradients{where}": cell.wire, **weights}
    if cell.dtype == "fp16":
        entries["fp16"] = {"enabled": True, "initial_scale_power": 8}
    elif cell.dtype != "fp32":
        entries[cell.dtype] = {"enabled": True}
    return entries


def engine_of(cell: Cell, model: type[LM] = LM) -> Any:
    """An engine of a cell over a model whose weights depend on nothing."""
    import deepspeed

    torch.manual_seed(0)
    config = config_of(cell)
    with deepspeed.zero.Init(config_dict_or_path=config) if cell.init else contextlib.nullcontext():
        made = model()
    if cell.init and torch.version.cuda and torch.cuda.is_available():
        _as_drawn_on_the_cpu(made, model)
    made.checkpointing = cell.checkpointing
    if cell.checkpointing:
        deepspeed.checkpointing.configure(None, deepspeed_config=config)
    engine, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)
    return engine


def _as_drawn_on_the_cpu(made: LM, model: type[LM]) -> None:
    """Set the weights that a CPU draws: a card draws its own from the same seed."""
    import deepspeed

    torch.manual_seed(0)
    drawn = dict(model().named_parameters())
    with deepspeed.zero.GatheredParameters(list(made.parameters()), modifier_rank=0), torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(drawn[name])


def micro_step(engine: Any, step: int, micro: int = 0) -> float:
    """Forward, backward and `step` on this rank's rows; the loss is read after all of it, as a user's log does."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ids, targets = (part.to(engine.device) for part in batch(step, micro, rank))
    loss = engine(ids, targets)
    engine.backward(loss)
    engine.step()
    return float(loss)


def train(cell: Cell, steps: int = STEPS) -> Seen:
    """The losses of a cell, and what was seen."""
    with observed(cell.own_stream) as seen:
        engine = engine_of(cell)
        for step in range(steps):
            seen.losses += [micro_step(engine, step, micro) for micro in range(cell.accumulation)]
        engine.destroy()
        del engine
    return seen
