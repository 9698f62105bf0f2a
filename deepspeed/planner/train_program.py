"""Training loop that predictions and measurements run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.config.load import load_raw
from deepspeed.config.sections.monitor import MonitorSections
from deepspeed.engine.pipeline_engine import PipelineEngine
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.foundation.fake_mode import STEP, following
from deepspeed.foundation.pytree import tensors_in

MICRO_BATCH = "micro-batch"
Loss = Callable[[Any, Any], torch.Tensor]
# Blocks with effects outside of the process, or that only observe a run: left out of a program.
OUTSIDE = {
    *MonitorSections.model_fields, "flops_profiler", "comms_logger", "autotuning", "timeline", "wall_clock_breakdown",
    "memory_breakdown", "steps_per_print", "dump_state",
}  # fmt: skip


class ForwardArguments(NamedTuple):
    """Positional and keyword arguments of a forward, as one micro-batch."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A model, its configuration, and one micro-batch that is used repeatedly.

    Args:
        model: a module, which is copied, or a callable that creates one.
        config: dict, path or base64 of the JSON.
        batch: one micro-batch of this rank: a mapping of keyword arguments, a sequence of arguments, both in
            `ForwardArguments`, or one argument of the model's forward.
        loss: computes the loss from (output, batch); None: the output's loss, or the mean of its first tensor.
        optimizer: as in `deepspeed.initialize`: a callable that creates one from parameters, or None for the JSON's.
        updates: number of updates.
        expert_load: as in `predict_memory`; used by predictions only.
    """

    model: nn.Module | Callable[[], nn.Module]
    config: Any
    batch: Any
    loss: Loss | None = None
    optimizer: Any = None
    updates: int = 3
    expert_load: float = 1.0

    def made_model(self) -> nn.Module:
        """Return a copy of the module `model`, or a new module from the callable `model`.

        Raises:
            ArgumentError: the callable returned no module.
        """
        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"model is, or its callable returned, a {type(model).__name__}; it takes a torch module"
            )
        return model

    def settings(self) -> dict[str, Any]:
        """Return the configuration without keys that act outside of the process or only observe a run (`OUTSIDE`)."""
        return {key: value for key, value in load_raw(self.config).items() if key not in OUTSIDE}

    def loss_of(self, engine: Any) -> torch.Tensor:
        """Run forward on the micro-batch and return the loss.

        Raises:
            ArgumentError: the output has no tensor that requires gradients.
        """
        batch = self.batch
        if isinstance(batch, ForwardArguments):
            outputs = engine(*batch.args, **batch.kwargs)
        elif isinstance(batch, Mapping):
            outputs = engine(**batch)
        elif isinstance(batch, (list, tuple)):
            outputs = engine(*batch)
        else:
            outputs = engine(batch)
        if self.loss is not None:
            return self.loss(outputs, batch)
        loss = getattr(outputs, "loss", None)
        if loss is None:
            tensors = (t for t in tensors_in(outputs) if t.requires_grad)
            loss = outputs if isinstance(outputs, torch.Tensor) else next(tensors, None)
        if loss is None:
            raise ArgumentError(
                "the model's output has no tensor with a graph: pass loss=…, a callable of (output, batch)"
            )
        return loss if loss.dim() == 0 else loss.float().mean()

    def run(self, engine: Any, after: Callable[[], None], mark: Callable[[str], None] | None = None) -> None:
        """Run `updates` updates with the same micro-batch.

        Args:
            engine: engine of the model.
            after: called after each backward and each step; in a pipeline, before and after each `STEP`.
            mark: called before each micro-batch and each `STEP`; in a pipeline before each forward (`F0` of chunk 0),
                backward (`B0`), and each `STEP`. None: not called.

        Raises:
            ArgumentError: the output has no tensor that requires gradients.
            NotAvailableError: `loss` is set and the model is a pipeline.
        """
        if isinstance(engine, PipelineEngine):
            self._run_windows(engine, after, mark)
            return
        for _ in range(self.updates * engine.gradient_accumulation_steps()):
            if mark is not None:
                mark(MICRO_BATCH)
            loss = self.loss_of(engine)
            engine.backward(loss)
            del loss
            after()
            if mark is not None:
                mark(STEP)
            engine.step()
            after()

    def _run_windows(
        self, engine: PipelineEngine, after: Callable[[], None], mark: Callable[[str], None] | None
    ) -> None:
        """Run the updates of a pipeline, with the model's own loss; NotAvailableError if `loss` is set."""
        if self.loss is not None:
            raise NotAvailableError("stages of a pipeline take the model's own loss: leave `loss` out")

        def entered(phase: str) -> None:
            if phase == STEP:
                after()
            if mark is not None:
                mark(phase)

        with following(entered):
            for _ in range(self.updates):
                engine.train_batch(itertools.repeat(self.batch))
                after()
