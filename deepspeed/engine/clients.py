"""What clients take for granted: a model may get another engine, and a loss may come divided already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from deepspeed.foundation.log import say
from deepspeed.zero.lifecycle import Hook

_CLOSE = "_ds_close"


def take_over(model: nn.Module, close: Callable[[], None]) -> None:
    """End the engine that has `model`, as Lightning's Trainer asks for when it validates after it has fitted.

    Args:
        model: gets a new engine.
        close: ends that one, when its turn has come.
    """
    before: Any = vars(model).get(_CLOSE)
    if before is not None:
        say(f"{type(model).__name__} gets a new engine: the one it had is closed")
        before()
    vars(model)[_CLOSE] = Hook(close)


def let_go(model: nn.Module) -> None:
    """The engine of `model` is closed."""
    vars(model).pop(_CLOSE, None)


def loss_is_divided(model: nn.Module) -> bool:
    """Whether losses were divided by the accumulation steps before they reach the engine.

    Lightning's Trainer does so in automatic optimization, and leaves the rest to the engine.
    """
    lightning = any(kind.__name__ == "LightningModule" for kind in type(model).__mro__)
    return lightning and getattr(model, "_trainer", None) is not None and bool(model.automatic_optimization)
