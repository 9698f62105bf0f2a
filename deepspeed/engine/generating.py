"""The `generate` of a model whose blocks are on several stages: each of its forward passes goes through all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.comm.api import told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.errors import PipelineError
from deepspeed.foundation.tree import map_tensors


def generate(
    model: Any, axis: Axis, outputs_of: Callable[[dict[str, Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model's own `generate` with forward passes through all stages. All ranks call together.

    Args:
        model: its root; on each stage with the stage's blocks.
        axis: the stages.
        outputs_of: runs keyword arguments of the model's forward through all stages; outputs on the last, else None.
        args: for `generate`.
        kwargs: the same by name; `use_cache` is False.

    Raises:
        PipelineError: the model has no `generate`.
    """
    if not hasattr(model, "generate"):
        raise PipelineError(f"{type(model).__name__} has no generate()")
    with _through_stages(model, axis, outputs_of), _drawn_as_on_rank_0(axis):
        return model.generate(*args, **{**kwargs, "use_cache": False})


@contextmanager
def _through_stages(model: nn.Module, axis: Axis, outputs_of: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Inside, calling the model runs all stages, and gives the last one's outputs on each."""
    own, before, inside = model.forward, vars(model).get("forward"), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if args:
            raise PipelineError("forward passes of generate() name their arguments")
        if inside:
            return own(**kwargs)
        inside = True
        try:
            found = outputs_of(kwargs)
        finally:
            inside = False
        return _sent_by_last(found, axis)

    # The signature of forward is read by `generate` to see which arguments the model takes.
    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward
        if before is not None:  # a client's own
            model.forward = before


def _sent_by_last(outputs: Any, axis: Axis) -> Any:
    """What the last stage has, on every stage."""
    mine = None if outputs is None else map_tensors(lambda tensor: tensor.detach(), outputs)
    return told_by_all(axis, mine)[-1]


@contextmanager
def _drawn_as_on_rank_0(axis: Axis) -> Iterator[None]:
    """Inside, all stages draw the numbers that the first one draws; afterwards each goes on where it was."""
    state = told_by_all(axis, torch.get_rng_state())[0]
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        yield
