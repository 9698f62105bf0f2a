"""Difference of the log-probabilities of training from those of generation, by update, for programs and monitors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from deepspeed.comm.collectives.same_error import raise_together
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import UsageError

if TYPE_CHECKING:
    from deepspeed.rollouts.losses import Mismatch

_ROLLOUTS = "Train/Rollouts/"


class RolloutReport:
    """Measurements of `mismatch` over all ranks and the micro-batches of an update.

    Args:
        state: state of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._parts: list[Mismatch] = []  # of the micro-batches since the update before
        self._update, self._seen = -1, 0  # updates, and micro-batches of the window, that were done at the last of them
        self._written = True

    def measure_mismatch(
        self, train_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor
    ) -> Mismatch:
        """Compare the log-probabilities of this micro-batch's tokens by training with those by generation.

        All ranks call this in the same micro-batches, each with its own tokens; a mask may be false everywhere. `d` is
        log p_train - log p_rollout of a token that generation has drawn: k1 = mean(d), which is minus the estimator k1
        of KL(rollout | train) in J. Schulman's note "Approximating KL divergence"; k3 = mean(exp(d) - 1 - d), its k3;
        largest = max |d|; outside = share with exp(d) not in [0.99, 1.01]. Monitors get
        `Train/Rollouts/{k1,k3,largest,outside,tokens}` after the update.

        Args:
            train_logprobs: by the training forward (`torch_logprobs`), under the weights that drew the tokens,
                floating-point [B, T].
            rollout_logprobs: of the rollouts, floating-point [B, T].
            mask: true at the tokens of answers, [B, T].

        Returns:
            The difference over all ranks in this micro-batch; `rollout_mismatch` has that of the update.

        Raises:
            DataError: the shapes differ.
            UsageError: on another rank they do.
        """
        from deepspeed.rollouts.losses import merged_mismatch, mismatch

        axis = self._state.axes.dp_sp_group
        own = raise_together(
            axis,
            lambda: mismatch(train_logprobs, rollout_logprobs, mask),
            lambda rank, text: UsageError(f"measure_mismatch failed on rank {rank}: {text}"),
        )
        everyone = merged_mismatch(all_gather_objects(axis, own))
        seen = self._state.window.seen
        if self._update != self._state.global_steps or seen < self._seen:  # another update, or the window began anew
            self._parts = []
        self._update, self._seen = self._state.global_steps, seen
        self._parts.append(everyone)
        self._written = False
        return everyone

    @property
    def last(self) -> Mismatch | None:
        """The difference in the update that was measured last, over its micro-batches so far; None if none was."""
        from deepspeed.rollouts.losses import merged_mismatch

        return merged_mismatch(self._parts) if self._parts else None

    def events(self) -> Iterator[tuple[str, float]]:
        """Yield (name, value) for the monitors, once for each measured update."""
        if not self._written and self.last is not None:
            self._written = True
            yield from ((f"{_ROLLOUTS}{name}", float(value)) for name, value in asdict(self.last).items())
