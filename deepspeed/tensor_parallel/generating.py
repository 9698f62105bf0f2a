"""`generate` of a cut model: all ranks of `tp` take the same prompt, and draw the same tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.comm.api import told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.comm.same_batches import digest
from deepspeed.errors import DataError, NotAvailableError
from deepspeed.tensor_parallel.dropout import draw_alike
from deepspeed.tensor_parallel.guard import guard


def guard_generating(model: nn.Module, axis: Axis) -> None:
    """Let a model's own `generate` compare what it is given, and draw from the first rank's random state.

    Args:
        model: cut; one without `generate` stays as it is.
        axis: the ranks that share it.
    """

    def look(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = getattr(self, "generation_config", None)
        everyone = told_by_all(axis, digest([args, kwargs, own]))
        other = next((at for at, found in enumerate(everyone) if found != everyone[0]), None)
        if other is not None:
            raise DataError(
                f"ranks {axis.ranks[0]} and {axis.ranks[other]} share the model's matrices (tp), and generate() was "
                f"given other arguments on each, or has another generation_config: give both the same prompts"
            )
        if _ends_by_a_clock([*args, *kwargs.values(), own], kwargs):
            raise NotAvailableError(
                "generate() with max_time is not available for a model that is cut over ranks (tp): each would stop by "
                "a clock of its own, and the others wait for it; give max_new_tokens instead"
            )
        draw_alike(axis)

    guard(model, "generate", look)


def _ends_by_a_clock(given: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an argument, a config or a criterion says after how many seconds to stop."""
    if "max_time" in kwargs:
        return kwargs["max_time"] is not None
    inside = [one for value in given for one in (value if isinstance(value, (list, tuple)) else [value])]
    return any(getattr(one, "max_time", None) is not None for one in inside)
