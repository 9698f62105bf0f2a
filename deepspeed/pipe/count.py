"""What every stage says of a window at its end, and what follows when the numbers do not agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from deepspeed.comm.api import told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.errors import PipelineError

_APART = 1e-5  # relative; kernels may round the ends of differently aligned slices in another way


class Count(NamedTuple):
    """One rank's numbers of a window.

    Args:
        loss: its mean loss; 0 where it has none.
        losses: micro-batches that it has a loss of.
        items: that its losses are sums over; 0 where they are means.
        stage: which it is.
        step: updates before this window.
        forward: chunks times micro-batches that it has computed.
        backward: those that it ran backward of.
        metrics: numbers that it reports beside the loss.
        failed: whether it has no loss because computing it raised.
    """

    loss: float
    losses: float
    items: float
    stage: float
    step: float
    forward: float
    backward: float
    metrics: float = 0.0
    failed: float = 0.0


def mean_loss(counts: Sequence[Count]) -> float:
    """The mean loss over the ranks that have one, or over the items that their losses are sums over."""
    total = sum(one.loss * one.losses for one in counts)
    return total / (sum(one.items for one in counts if one.losses) or sum(one.losses for one in counts) or 1.0)


class Means:
    """Numbers that the last stage reports beside the loss, as means over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}  # of values times weights, and of weights

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, found: Mapping[str, torch.Tensor | float], weight: float = 1.0) -> None:
        """One micro-batch's.

        Args:
            found: one number each.
            weight: samples that it counts for.
        """
        for name, value in found.items():
            total, weights = self._sums.get(name, (0.0, 0.0))
            number = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
            self._sums[name] = total + number * weight, weights + weight  # on the device: nobody waits for it

    def over(self, axis: Axis) -> dict[str, float]:
        """The means over all ranks that have one. All ranks of the axis call together."""
        sums: dict[str, tuple[float, float]] = {}
        mine = {name: (float(total), weights) for name, (total, weights) in self._sums.items()}
        for theirs in told_by_all(axis, mine):
            for name, (total, weights) in theirs.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = before[0] + total, before[1] + weights
        return {name: total / weights for name, (total, weights) in sums.items() if weights}


def check(counts: Sequence[Count], stages: int, micros: int, chunks: int) -> None:
    """See that a window was computed once, by stages that stand at the same update.

    Args:
        counts: of all ranks.
        stages: how many there are.
        micros: micro-batches of the window.
        chunks: parts of each stage.

    Raises:
        PipelineError: a micro-batch is missing or was computed twice, a loss was counted on two stages, or a stage is
            updates behind; says which.
    """
    for rank, one in enumerate(counts):
        where = f"rank {rank} (stage {one.stage:.0f})"
        for name, found in (("forward", one.forward), ("backward", one.backward)):
            if found != micros * chunks:
                raise PipelineError(
                    f"{where} ran {found:.0f} times {name} in a window of {micros} micro-batches and {chunks} chunks"
                )
        if one.losses != (micros if one.stage == stages - 1 else 0):
            raise PipelineError(
                f"{where} counted {one.losses:.0f} losses in a window of {micros}: the last stage ({stages - 1}) "
                f"counts all of them, and no other stage any"
            )
        if one.step != counts[0].step:
            raise PipelineError(
                f"{where} has made {one.step:.0f} updates and rank 0 (stage {counts[0].stage:.0f}) "
                f"{counts[0].step:.0f}: one of them is stale"
            )


def check_shared(values: dict[str, torch.Tensor], axis: Axis) -> None:
    """See that what several stages hold has one value. All ranks of the axis call together.

    Args:
        values: parameters that this stage shares with others, by name.
        axis: the stages.

    Raises:
        PipelineError: a stage's copy went its own way; says which.
    """
    mine = {
        name: (float(value.detach().double().sum()), float(value.detach().double().abs().sum()))
        for name, value in values.items()
    }
    everyone = told_by_all(axis, mine)
    first: dict[str, tuple[int, tuple[float, float]]] = {}
    for stage, theirs in enumerate(everyone):
        for name, (total, size) in theirs.items():
            other, (wanted, _) = first.setdefault(name, (stage, (total, size)))
            if not abs(total - wanted) <= _APART * size:
                raise PipelineError(
                    f"'{name}' is held by stages {other} and {stage}, and is not the same there after an update: "
                    f"it is no longer tied"
                )
