"""Two worlds in which the same training program runs: this rank's engines, or the reference of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.cells import gradients, masters
from tests.parity.configs import config
from tests.parity.reference import OptimizerFactory, Reference

Losses = Callable[[Any, int], Any]  # (model, rank) -> one loss, or a tuple of losses on one graph


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that moves every parameter that has a gradient, even a gradient of zero."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4, weight_decay=0.5)


class EngineTrainer:
    """One model under one engine."""

    def __init__(self, world: EngineWorld, model: nn.Module, optimizer: OptimizerFactory, accumulation: int) -> None:
        import deepspeed

        self._world = world
        self.engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            optimizer=optimizer(list(model.parameters())),
            config=config(world.stage, model, world.precision, accumulation, sharded=world.sharded, zero=world.zero),
        )

    def model(self, rank: int) -> Any:
        return self.engine

    def backward(self, losses: Losses, plain: bool = False, synced: bool = True) -> None:
        """Forward and backward of one micro-batch; `plain` uses `loss.backward()`, not `synced` `no_sync()`."""
        with contextlib.nullcontext() if synced else self.engine.no_sync():
            found = losses(self.engine, self._world.rank)
            found = found if isinstance(found, tuple) else (found,)
            for index, loss in enumerate(found):
                self._world.note("loss", loss.item())
                keep = index < len(found) - 1
                loss.backward(retain_graph=keep) if plain else self.engine.backward(loss, retain_graph=keep)

    def step(self) -> None:
        self.engine.step()
        self._world.note("masters", masters(self.engine))

    def micro_step(self) -> None:
        """The step after a micro-batch that does not end the window."""
        self.engine.step()

    def flush(self, seen: int) -> None:
        """End a window of which `seen` micro-batches have come."""
        self.engine.flush()
        self._world.note("masters", masters(self.engine))

    def discard(self) -> None:
        """Forget the gradients since the last step."""
        self.engine.zero_grad()

    def gradients(self) -> None:
        """Note the mean gradients."""
        self._world.note("gradients", gradients(self.engine))

    def evaluate(self, forward: Losses) -> None:
        """Note what the model in eval mode gives to this rank."""
        self.engine.eval()
        with torch.no_grad():
            self._world.note("evaluation", forward(self.engine, self._world.rank).float().clone())
        self.engine.train()

    def each_model(self, apply: Callable[[Any], Any]) -> None:
        """Change the model itself, as a user may between steps."""
        apply(self.engine.module)


class ReferenceTrainer:
    """One model under the reference; the same verbs."""

    def __init__(self, world: ReferenceWorld, model: nn.Module, optimizer: OptimizerFactory, accumulation: int) -> None:
        self._world = world
        self._twin = Reference(model, optimizer, world.ranks, accumulation, world.precision)

    def model(self, rank: int) -> Any:
        return self._twin.copies[rank]

    def backward(self, losses: Losses, plain: bool = False, synced: bool = True) -> None:
        for rank, replica in enumerate(self._twin.copies):
            found = losses(replica, rank)
            found = found if isinstance(found, tuple) else (found,)
            for loss in found:
                self._world.note("loss", loss.item(), rank)
            self._twin.backward(rank, *found)

    def step(self) -> None:
        self._twin.step()
        self._world.note("masters", self._twin.parameters())

    def micro_step(self) -> None:
        pass

    def flush(self, seen: int) -> None:
        asked, self._twin.accumulation = self._twin.accumulation, seen
        self.step()
        self._twin.accumulation = asked

    def discard(self) -> None:
        self._twin.discard()

    def gradients(self) -> None:
        self._world.note("gradients", self._twin.gradients())

    def evaluate(self, forward: Losses) -> None:
        replica = self._twin.copies[0].eval()  # all ranks evaluate with rank 0's statistics
        with torch.no_grad():
            for rank in range(self._world.ranks):
                self._world.note("evaluation", forward(replica, rank).float(), rank)
        replica.train()

    def each_model(self, apply: Callable[[Any], Any]) -> None:
        for replica in (self._twin.master, *self._twin.copies):
            apply(replica)


class EngineWorld:
    """This rank's side; `notes` is what it saw, in order."""

    def __init__(self, stage: int, precision: str, sharded: bool = True, zero: dict[str, Any] | None = None) -> None:
        self.stage, self.precision, self.sharded, self.zero = stage, precision, sharded, zero
        self.rank = dist.get_rank()
        self.notes: list[tuple[str, Any]] = []
        self._trainers: list[EngineTrainer] = []

    def note(self, label: str, value: Any) -> None:
        self.notes.append((label, value))

    def train(self, model: nn.Module, optimizer: OptimizerFactory = adamw, accumulation: int = 1) -> EngineTrainer:
        self._trainers.append(EngineTrainer(self, model, optimizer, accumulation))
        return self._trainers[-1]

    def close(self) -> None:
        for trainer in self._trainers:
            trainer.engine.destroy()


class ReferenceWorld:
    """All ranks at once; `notes[rank]` is what that rank should see, in order."""

    def __init__(self, ranks: int, precision: str) -> None:
        self.ranks, self.precision = ranks, precision
        self.notes: list[list[tuple[str, Any]]] = [[] for _ in range(ranks)]

    def note(self, label: str, value: Any, rank: int | None = None) -> None:
        for each in range(self.ranks) if rank is None else [rank]:
            self.notes[each].append((label, value))

    def train(self, model: nn.Module, optimizer: OptimizerFactory = adamw, accumulation: int = 1) -> ReferenceTrainer:
        return ReferenceTrainer(self, model, optimizer, accumulation)
