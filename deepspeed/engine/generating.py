"""The `generate` of a model whose blocks are on several stages: each of its forward passes goes through all of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.comm.api import all_gather_object
from deepspeed.comm.axis import Axis
from deepspeed.comm.mesh import Mesh
from deepspeed.errors import PipelineError
from deepspeed.foundation.tree import map_tensors


class Staged(Protocol):
    """What is asked of an engine of stages."""

    module: nn.Module
    mesh: Mesh
    training: bool

    def eval_batch(self, data_iter: Iterator[Any] | None, **kwargs: Any) -> Any:
        """Run micro-batches forward; outputs on the last stage."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Switch to training or evaluation."""
        ...


def generate(engine: Staged, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the model's own `generate` with forward passes through all stages. All ranks call together.

    Args:
        engine: of the stages.
        args: for `generate`.
        kwargs: the same by name; `use_cache` is False.

    Raises:
        PipelineError: the model has no `generate`.
    """
    model: Any = engine.module
    if not hasattr(model, "generate"):
        raise PipelineError(f"{type(model).__name__} has no generate()")
    axis, training = engine.mesh.axis("pp"), engine.training
    with _through_stages(engine, model, axis), _drawn_as_on_rank_0(axis):
        engine.train(False)
        try:
            return model.generate(*args, **{**kwargs, "use_cache": False})
        finally:
            engine.train(training)


@contextmanager
def _through_stages(engine: Staged, model: nn.Module, axis: Axis) -> Iterator[None]:
    """Inside, calling the model runs all stages, and gives the last one's outputs on each."""
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if args:
            raise PipelineError("forward passes of generate() name their arguments")
        if getattr(forward, "inside", False):
            return own(**kwargs)
        forward.inside = True  # type: ignore[attr-defined]
        try:
            found = engine.eval_batch(iter([kwargs]), compute_loss=False, num_micro_batches=1)
        finally:
            forward.inside = False  # type: ignore[attr-defined]
        return _sent_by_last(found[0] if found else None, axis)

    # The signature of forward is read by `generate` to see which arguments the model takes.
    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


def _sent_by_last(outputs: Any, axis: Axis) -> Any:
    """What the last stage has, on every stage."""
    mine = None if outputs is None else map_tensors(lambda tensor: tensor.detach(), outputs)
    return _told(mine, axis)[-1]


def _told(mine: Any, axis: Axis) -> list[Any]:
    everyone: list[Any] = [mine] * axis.size
    if axis.size > 1:
        all_gather_object(everyone, mine, group=axis.group)
    return everyone


@contextmanager
def _drawn_as_on_rank_0(axis: Axis) -> Iterator[None]:
    """Inside, all stages draw the numbers that the first one draws; afterwards each goes on where it was."""
    state = _told(torch.get_rng_state(), axis)[0]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield
