"""The pruning plan: the verified dependency groups of a model, by parameter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.channel_graph import channel_families, not_proven, runner, whole_twin
from deepspeed.compression.pruning.dependency_groups import Family
from deepspeed.compression.pruning.experts import chosen_of, expert_shrinks, prove_experts
from deepspeed.compression.pruning.transformers_groups import (
    Shrink,
    dense_class,
    ffn_shrinks,
    head_shrinks,
)
from deepspeed.compression.pruning.unwrap import inside, slots_under_adapters
from deepspeed.compression.pruning.verify import prove
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import HEAD_KEYS, config_number, config_of

_FINDERS = {"ffn": (ffn_shrinks, prove), "heads": (head_shrinks, prove), "experts": (expert_shrinks, prove_experts)}


class PruningPlan:
    """The coupled tensors of a model.

    Args:
        model: plain or sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefix, self.inner = inside(model)
        self.config = config_of(self.inner)
        self._graph: list[Family] | None = None
        self._found: dict[str, list[Shrink]] = {}
        self.refused: dict[str, str] = {}
        self.left_alone: dict[str, str] = {}  # convolutions whose channels stay, and why
        self.distances: dict[str, float] = {}
        self.unproven: list[str] = []  # modules whose partners were named, where no inputs are known to try it
        self._twin: tuple[Any, ...] | None = None

    @property
    def heads(self) -> int | None:
        """Attention heads, where the config says them."""
        return config_number(self.config, HEAD_KEYS)

    def shrinks(self, kind: str) -> list[Shrink]:
        """What the config can say smaller of one kind, proven on a twin; empty, with a reason in `refused`."""
        if kind not in self._found:
            self._found[kind] = []
            if self.config is None or kind not in _FINDERS:
                self.refused[kind] = f"{type(self.model).__name__} has no config that could say fewer {kind}"
                return []
            find: Any = _FINDERS[kind][0]
            try:
                for shrink in find(self.inner, self.config):
                    proven, self.distances[kind] = _FINDERS[kind][1](dense_class(self.inner), self.config, find, shrink)
                    self._found[kind].append(self._named(proven))
                if not self._found[kind]:
                    self.refused[kind] = f"{type(self.config).__name__} names no width of the {kind} units"
            except CompressionError as error:
                self._found[kind], self.refused[kind] = [], str(error)
        return self._found[kind]

    def _named(self, shrink: Shrink) -> Shrink:
        """The shrink by the names that parameters have in the whole model."""
        if not self.prefix:
            return shrink
        there = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for family in shrink.families:
            family.label = self.prefix + family.label
            slots = [replace(slot, name=self.prefix + slot.name) for slot in family.slots]
            here = [[slot] if slot.name in there else slots_under_adapters(self.model, slot) for slot in slots]
            family.slots = [slot for some in here for slot in some]
        return shrink

    def family_of(self, name: str, axis: int, kind: str) -> Family | None:
        """The family of which an axis of a parameter holds units; None when no plan has it."""
        for family in self._channels() if kind == "channels" else ():
            if any(slot.name == name and slot.axes[-1] == axis for slot in family.slots):
                return family
        for shrink in self.shrinks(kind):
            for family in shrink.families:
                if any(slot.name == name and slot.axes[-1] == axis for slot in family.slots):
                    return family
        return None

    def prove_named(self, family: Family) -> None:
        """Try a family whose partners were named by hand on a twin, where inputs for it are known.

        Raises:
            CompressionError: a model without these units is not the model with the units masked.
        """
        if self._twin is None:
            self._twin = self._running_twin()
        if not self._twin:
            self.unproven.append(family.label)
            return
        reason = not_proven(self._twin[0], family, self._twin[1])
        if reason:
            raise CompressionError(
                f"related_modules do not name all that goes with {family.label}: {reason}; without related_modules "
                f"its {family.kind} are masked and stay"
            )

    def _running_twin(self) -> tuple[Any, ...]:
        """(twin, what runs it); empty where no inputs are known that it takes."""
        run = runner(self.model)
        if run is None:
            return ()
        twin = whole_twin(self.model)
        try:
            with torch.no_grad():
                run(twin)
        except (CompressionError, RuntimeError, ValueError, TypeError):
            return ()
        return twin, run

    def forget_twin(self) -> None:
        """No more families are tried: the twin's memory is given back."""
        self._twin = None

    def why_not(self, kind: str, labels: list[str]) -> str:
        """Why units of these modules cannot be taken out.

        Args:
            kind: of the families.
            labels: names of the modules.
        """
        found = [f"{label}: {self.left_alone[label]}" for label in labels if label in self.left_alone]
        kinds = {"rows": "ffn"}
        reason = self.refused.get(kinds.get(kind, kind), "no partners of these modules are known")
        return "; ".join(found) or f"{', '.join(labels[:3])}: {reason}; name them in related_modules"

    def check_said(self, family: Family, kept: int) -> None:
        """See that the model's config can be saved with so many units.

        Args:
            family: of this plan.
            kept: units that stay of each run of them.

        Raises:
            CompressionError: it cannot; the text names the nearest number that can.
        """
        shrink, width = self.shrink_of(family), family.size // family.blocks
        if shrink is None or self._unsaid(shrink, width, width):
            return  # a config that is wrong already is no matter of the cut
        reason = self._unsaid(shrink, kept, width)
        if reason:
            order = sorted(range(1, width), key=lambda other: abs(other - kept))
            near = next((other for other in order if not self._unsaid(shrink, other, width)), width)
            raise CompressionError(
                f"{type(self.config).__name__} cannot say {kept} of {width} {shrink.kind} units: {reason}; the nearest "
                f"number that can be exported is {near} (dense_ratio {near / width:.4g})"
            )

    def _unsaid(self, shrink: Shrink, kept: int, of: int) -> str:
        """What a config says against a number; empty: nothing."""
        if shrink.kind == "experts" and kept < chosen_of(self.config):
            return f"a token passes {chosen_of(self.config)}"
        made = shrink.config(self.config, kept, of)
        try:
            getattr(made, "validate", lambda: None)()
        except Exception as error:  # whatever a config refuses itself by
            return str(error.__cause__ or error).splitlines()[-1].strip()
        return ""

    def packed_family(self, name: str, kind: str = "ffn") -> Family:
        """The family of FFN units, or of whole experts, that a packed tensor of experts holds.

        Raises:
            CompressionError: no plan has it.
        """
        axes = 1 if kind == "experts" else 2
        for shrink in self.shrinks(kind):
            for family in shrink.families:
                if any(slot.name == name and len(slot.axes) == axes for slot in family.slots):
                    return family
        raise CompressionError(
            f"{name} is packed, and no {'units' if kind == 'ffn' else kind} of it are known: "
            f"{self.refused.get(kind, 'no number of the config changes it so')}"
        )

    def _channels(self) -> list[Family]:
        """Families of a convolutional network that says what its inputs look like (`example_input_array`)."""
        example = getattr(self.model, "example_input_array", None)
        if self._graph is None and example is None:
            self.refused["channels"] = f"{type(self.model).__name__} has no example_input_array to trace it with"
        if self._graph is None:
            self._graph = [] if example is None else channel_families(self.model, example, self.left_alone)
        return self._graph

    def shrink_of(self, family: Family) -> Shrink | None:
        """The config's number that a family belongs to."""
        for shrink in self.shrinks(family.kind):
            if any(one.label == family.label and one.names() == family.names() for one in shrink.families):
                return shrink
        return None
