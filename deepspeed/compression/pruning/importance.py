"""Importance scores of weights and units.

Criteria: magnitude |w|; activation |w| · ‖x‖ (Wanda, arXiv:2306.11695); movement, the sum of -lr · g · w
(arXiv:2005.07683); taylor, a running sum of |g · w|, or of squared sums of units (arXiv:1906.10771).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from deepspeed.compression.pruning.distributed_topk import exact_sums, kept_of
from deepspeed.compression.pruning.rules import CompressionRule
from deepspeed.compression.pruning.sharded_view import Exchange, Owned
from deepspeed.errors import CompressionError

_MOMENTUM = 0.9  # momentum of the Taylor scores of single weights


class Scores:
    """Scores of pruning rules: magnitude and activation on demand, movement and taylor accumulated over steps.

    Args:
        rules: rules of the model.
        owned: this rank's parts of the parameters, by first name (tied parameters have several names).
        first_name: first name of each parameter, by any of its names.
        exchange: collectives over the ranks that share the parameters.
    """

    def __init__(
        self, rules: Sequence[CompressionRule], owned: dict[str, Owned], first_name: dict[str, str], exchange: Exchange
    ) -> None:
        self._owned, self._first_name, self._exchange = owned, first_name, exchange
        self._rules = {rule.name: rule for rule in rules}
        self._weights: dict[tuple[str, str], torch.Tensor] = {}  # by (rule, parameter), over [low, high)
        self._units: dict[str, torch.Tensor] = {}  # float64 over all families of a rule, equal on all ranks
        self.inputs: dict[str, tuple[torch.Tensor, int]] = {}  # sums of squared inputs of a weight, and their axis

    def forget(self, rule: CompressionRule) -> None:
        """Delete the scores of a rule, after its mask has become final."""
        self._units.pop(rule.name, None)
        for key in [key for key in self._weights if key[0] == rule.name]:
            del self._weights[key]

    # -- with every step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_gradients(self, rules: Sequence[CompressionRule]) -> None:
        """Update movement and taylor scores by the accumulated gradients of this step. Collective."""
        for rule in rules:
            if rule.criterion not in ("movement", "taylor"):
                continue
            if rule.families:
                self._grow_units(rule)
            else:
                for name in rule.weights:
                    self._grow(rule, self._owned[self._first_name[name]])

    def _grow(self, rule: CompressionRule, owned: Owned) -> None:
        with owned.gradient() as gradient, owned.values() as values:
            if gradient is None:
                return
            moved = gradient.to(torch.float32) * values.to(torch.float32)
            score = self._weights.get((rule.name, owned.name))
            if score is None:
                score = self._weights[rule.name, owned.name] = torch.zeros_like(moved)
            if rule.criterion == "movement":
                score.sub_(moved, alpha=owned.learning_rate)
            else:
                score.mul_(_MOMENTUM).add_(moved.abs_())

    def _grow_units(self, rule: CompressionRule) -> None:
        parts, first, most = [], 0, 1  # index of the family's first unit, and elements per unit
        for family in rule.families:
            for slot in family.slots:
                owned = self._owned[self._first_name[slot.name]]
                start, stop = owned.counted
                with owned.gradient() as gradient, owned.values() as values:
                    if gradient is None or start == stop:
                        continue
                    moved = owned.part(gradient).to(torch.float64) * owned.part(values).to(torch.float64)
                    unit = slot.units(owned.shape, start, stop)
                    rate = owned.learning_rate if rule.criterion == "movement" else 1.0
                    parts.append((-moved * rate, torch.where(unit >= 0, unit + first, unit)))
                most += owned.numel // family.size + 1
            first += family.size
        grown = exact_sums(parts, first, most, self._exchange)
        if rule.criterion == "taylor":
            grown = grown.square()
        self._units[rule.name] = self._units.get(rule.name, torch.zeros_like(grown)) + grown

    # -- on demand ----------------------------------------------------------------------------------------------------

    def of_weights(self, rule: CompressionRule) -> Callable[[Owned], torch.Tensor]:
        """Return a function that computes the fp32 scores of this rank's elements [low, high) of a parameter.

        The function raises CompressionError for an unknown criterion.
        """

        def score(owned: Owned) -> torch.Tensor:
            if rule.criterion in ("movement", "taylor"):
                grown = self._weights.get((rule.name, owned.name))
                return torch.zeros(owned.high - owned.low) if grown is None else grown
            with owned.values() as values:
                sizes = values.to(torch.float32).abs()
            if rule.criterion == "magnitude":
                return sizes
            if rule.criterion == "activation":
                sums, axis = self.inputs[owned.name]
                norms, stride = sums.sqrt().to(torch.float32), owned.shape[axis + 1 :].numel()
                return sizes * norms[torch.arange(owned.low, owned.high) // stride % norms.numel()]
            raise CompressionError(f"{rule.name}: single weights have no scores by criterion {rule.criterion!r}")

        return score

    def by_pattern(
        self, rule: CompressionRule, owned: Owned, score: Callable[[Owned], torch.Tensor], ratio: float
    ) -> torch.Tensor:
        """Return bool flags of this rank's elements [low, high) for an N:M or block pattern. Collective.

        Args:
            rule: rule with the pattern.
            owned: the parameter; its scores are all-gathered.
            score: function of the parameter that returns the scores over [low, high).
            ratio: fraction to keep at this step.
        """
        kind, n, m = rule.pattern or ("of", 1, 1)
        whole = self._exchange.whole(owned.part(score(owned)).contiguous(), owned.cuts, f"scores of {owned.name}")
        if kind == "of":
            rows = whole.view(-1, m)
            count = n if ratio <= rule.ratio else max(n, -int(-round(m * ratio, 6) // 1))  # the share may still fall
            best = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :count]
            flags = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, best, True)
        else:
            tall = whole.view(owned.shape[0] // n, n, -1, m)
            blocks = tall.sum((1, 3)).view(-1)
            keep = torch.zeros_like(blocks, dtype=torch.bool)
            keep[torch.sort(blocks, descending=True, stable=True).indices[: kept_of(blocks.numel(), ratio)]] = True
            flags = keep.view(tall.shape[0], 1, -1, 1).expand_as(tall).reshape(-1)
        return flags.reshape(-1)[owned.low : owned.high]

    def of_units(self, rule: CompressionRule) -> list[torch.Tensor]:
        """Return the float64 scores [units] of each dependency group, equal on all ranks. Collective.

        Raises:
            CompressionError: the criterion has no scores of units (activation).
        """
        sizes = [family.size for family in rule.families]
        if rule.criterion in ("movement", "taylor"):
            grown = self._units.get(rule.name)
            total = torch.zeros(sum(sizes), dtype=torch.float64) if grown is None else grown
            return list(total.split(sizes))
        if rule.criterion != "magnitude":
            raise CompressionError(f"{rule.name}: units have no scores by criterion {rule.criterion!r}")
        parts, first, most = [], 0, 1
        for family in rule.families:
            for slot in (slot for slot in family.slots if slot.scored):
                owned = self._owned[self._first_name[slot.name]]
                start, stop = owned.counted
                with owned.values() as values:
                    magnitudes = owned.part(values).to(torch.float64).abs()
                unit = slot.units(owned.shape, start, stop)
                parts.append((magnitudes, torch.where(unit >= 0, unit + first, unit)))
                most = max(most, len(family.slots) * (owned.numel // (family.size // family.blocks) + 1))
            first += family.size
        return list(exact_sums(parts, first, most, self._exchange).split(sizes))

    # -- in a checkpoint ----------------------------------------------------------------------------------------------

    def stored(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (rule name, scores over [low, high)) of one parameter's single weights, for a checkpoint."""
        yield from ((rule, score) for (rule, of), score in self._weights.items() if of == name)

    def put(self, rule: str, name: str, score: torch.Tensor) -> None:
        """Load scores that `stored` returned for a rule and a parameter."""
        self._weights[rule, name] = score.to(torch.float32).clone()

    def state_dict(self) -> dict[str, Any]:
        """Return the scores of units, which are equal on all ranks."""
        return {"units": {rule: score.clone() for rule, score in self._units.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the scores of units; scores of single weights are loaded by `put`."""
        self._weights.clear()
        self._units = {rule: score.clone() for rule, score in saved["units"].items() if rule in self._rules}
