"""`generate` of a cut model: all ranks of `tp` take the same prompt, and draw the same tokens."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from deepspeed.comm.api import told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.comm.same_batches import digest
from deepspeed.errors import DataError
from deepspeed.tensor_parallel.dropout import draw_alike


def guard_generating(model: nn.Module, axis: Axis) -> None:
    """Let a model's own `generate` compare what it is given, and draw from the first rank's random state.

    Args:
        model: cut; one without `generate` stays as it is.
        axis: the ranks that share it.
    """
    if not hasattr(model, "generate"):
        return

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        everyone = told_by_all(axis, digest([args, kwargs]))
        other = next((at for at, found in enumerate(everyone) if found != everyone[0]), None)
        if other is not None:
            raise DataError(
                f"ranks {axis.ranks[0]} and {axis.ranks[other]} share the model's matrices (tp), and generate() was "
                f"given other arguments on each: give both the same prompts"
            )
        draw_alike(axis)
        return type(self).generate(self, *args, **kwargs)

    # A method, so that copies of the model call theirs.
    object.__setattr__(model, "generate", MethodType(generate, model))
