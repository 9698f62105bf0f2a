"""What can be taken out of a model as one, found once and proven: families by the parameter that was named."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.families import HEAD_KEYS, Shrink, config_of, ffn_shrinks, head_shrinks
from deepspeed.compression.twin import prove
from deepspeed.compression.units import Family
from deepspeed.errors import CompressionError

_FINDERS = {"ffn": ffn_shrinks, "heads": head_shrinks}


class Plan:
    """The coupled tensors of a model.

    Args:
        model: plain or sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, config_of(model)
        self._graph: list[Family] | None = None
        self._found: dict[str, list[Shrink]] = {}
        self.refused: dict[str, str] = {}
        self.distances: dict[str, float] = {}

    @property
    def heads(self) -> int | None:
        """Attention heads, where the config says them."""
        return next(
            (getattr(self.config, k) for k in HEAD_KEYS if isinstance(getattr(self.config, k, None), int)), None
        )

    def shrinks(self, kind: str) -> list[Shrink]:
        """What the config can say smaller of one kind, proven on a twin; empty, with a reason in `refused`."""
        if kind not in self._found:
            self._found[kind] = []
            if self.config is None or kind not in _FINDERS:
                self.refused[kind] = f"{type(self.model).__name__} has no config that could say fewer {kind}"
                return []
            find: Any = _FINDERS[kind]
            try:
                for shrink in find(self.model, self.config):
                    proven, self.distances[kind] = prove(type(self.model), self.config, find, shrink)
                    self._found[kind].append(proven)
                if not self._found[kind]:
                    self.refused[kind] = f"{type(self.config).__name__} names no width of the {kind} units"
            except CompressionError as error:
                self._found[kind], self.refused[kind] = [], str(error)
        return self._found[kind]

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

    def _channels(self) -> list[Family]:
        """Families of a convolutional network that says what its inputs look like (`example_input_array`)."""
        example = getattr(self.model, "example_input_array", None)
        if self._graph is None:
            from deepspeed.compression.graph import channel_families

            self._graph = [] if example is None else channel_families(self.model, example)
        return self._graph

    def shrink_of(self, family: Family) -> Shrink | None:
        """The config's number that a family belongs to."""
        for shrink in self.shrinks(family.kind):
            if any(one.label == family.label for one in shrink.families):
                return shrink
        return None
