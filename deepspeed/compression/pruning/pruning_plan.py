"""Pruning plan: the verified dependency groups of a model."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.channel_graph import channel_families, not_proven, runner, whole_twin
from deepspeed.compression.pruning.dependency_groups import Family
from deepspeed.compression.pruning.structured_removal import Removal, changed_attributes
from deepspeed.compression.pruning.transformers_groups import (
    Shrink,
    dense_class,
    expert_shrinks,
    experts_per_token,
    ffn_shrinks,
    head_shrinks,
    inside,
    on_meta,
    slots_under_adapters,
)
from deepspeed.compression.pruning.verify import prove, prove_experts
from deepspeed.errors import CompressionError
from deepspeed.foundation.transformers_model import HEAD_KEYS, config_number, config_of

_FINDERS: dict[str, tuple[Any, Any]] = {
    "ffn": (ffn_shrinks, prove),
    "heads": (head_shrinks, prove),
    "experts": (expert_shrinks, prove_experts),
}


class PruningPlan:
    """Verified dependency groups of a model, computed on first use.

    Args:
        model: plain or sharded model, or a wrapper of a Transformers model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.prefix, self.inner = inside(model)
        self.config = config_of(self.inner)
        self._graph: list[Family] | None = None
        self._shrinks: dict[str, list[Shrink]] = {}
        self.refused: dict[str, str] = {}
        self.left_alone: dict[str, str] = {}  # reason by convolution with channels that cannot be removed
        self.distances: dict[str, float] = {}
        self.unproven: list[str] = []  # modules with related_modules that cannot be verified: inputs are unknown
        self._twin: tuple[Any, ...] | None = None

    @property
    def heads(self) -> int | None:
        """Number of attention heads in the config, or None."""
        return config_number(self.config, HEAD_KEYS)

    def shrinks(self, kind: str) -> list[Shrink]:
        """Return the config values that can be reduced to remove units of one kind; each is verified on a small copy.

        Args:
            kind: `ffn`, `heads` or `experts`; no config value is the number of units of other kinds.

        Returns:
            A list; if it is empty, `refused[kind]` has the reason.
        """
        if kind not in _FINDERS:
            return []
        if kind not in self._shrinks:
            self._shrinks[kind] = []
            if self.config is None:
                self.refused[kind] = f"{type(self.model).__name__} has no config that could say fewer {kind}"
                return []
            (find, verify), shrinks = _FINDERS[kind], list[Shrink]()
            try:
                for shrink in find(self.inner, self.config):
                    verified, self.distances[kind] = verify(dense_class(self.inner), self.config, find, shrink)
                    shrinks.append(self._with_whole_names(verified))
                self._shrinks[kind] = shrinks
                if not shrinks:
                    self.refused[kind] = f"{type(self.config).__name__} names no width of the {kind} units"
            except CompressionError as error:
                self.refused[kind] = str(error)
        return self._shrinks[kind]

    def _with_whole_names(self, shrink: Shrink) -> Shrink:
        """Rename the parameters of a `Shrink` from the inner to the whole model, in place, and add LoRA matrices."""
        if not self.prefix:
            return shrink
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for family in shrink.families:
            family.label = self.prefix + family.label
            slots = [replace(slot, name=self.prefix + slot.name) for slot in family.slots]
            pieces = [[slot] if slot.name in names else slots_under_adapters(self.model, slot) for slot in slots]
            family.slots = [slot for piece in pieces for slot in piece]
        return shrink

    def family_of(self, name: str, axis: int, kind: str) -> Family | None:
        """Return the dependency group of this kind with units along an axis of a parameter; None if there is none."""
        for family in self._channels() if kind == "channels" else ():
            if any(slot.name == name and slot.axes[-1] == axis for slot in family.slots):
                return family
        for shrink in self.shrinks(kind):
            for family in shrink.families:
                if any(slot.name == name and slot.axes[-1] == axis for slot in family.slots):
                    return family
        return None

    def prove_named(self, family: Family) -> None:
        """Verify a dependency group from `related_modules` on a copy; without known inputs, add it to `unproven`.

        Raises:
            CompressionError: removing the units gives other outputs than masking them.
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
        """Return (copy of the model, function that computes its outputs); empty if no suitable inputs are known."""
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
        """Free the copy of the model for `prove_named`."""
        self._twin = None

    def why_not(self, kind: str, labels: list[str]) -> str:
        """Return the reason why units of one kind cannot be removed from the modules `labels`, for a message."""
        reasons = [f"{label}: {self.left_alone[label]}" for label in labels if label in self.left_alone]
        reason = self.refused.get("ffn" if kind == "rows" else kind, "no partners of these modules are known")
        return "; ".join(reasons) or f"{', '.join(labels[:3])}: {reason}; name them in related_modules"

    def check_said(self, family: Family, kept_units: int) -> None:
        """Check that the model's config is valid with `kept_units` units per block of a dependency group.

        Raises:
            CompressionError: the config is invalid; the message has the nearest possible number.
        """
        shrink, width = self.shrink_of(family), family.size // family.blocks
        if shrink is None or self._config_refusal(shrink, width, width):
            return  # the dense config is refused too
        reason = self._config_refusal(shrink, kept_units, width)
        if reason:
            order = sorted(range(1, width), key=lambda other: abs(other - kept_units))
            near = next((other for other in order if not self._config_refusal(shrink, other, width)), width)
            raise CompressionError(
                f"{type(self.config).__name__} cannot say {kept_units} of {width} {shrink.kind} units: {reason}; the "
                f"nearest number that can be exported is {near} (dense_ratio {near / width:.4g})"
            )

    def _config_refusal(self, shrink: Shrink, kept_units: int, of: int) -> str:
        """Return the reason why the config is invalid with `kept_units` of `of` units; "" if it is valid."""
        if shrink.kind == "experts" and kept_units < experts_per_token(self.config):
            return f"a token passes {experts_per_token(self.config)}"
        config = shrink.config(self.config, kept_units, of)
        try:
            getattr(config, "validate", lambda: None)()
        except Exception as error:  # any type, by the config's class
            return str(error.__cause__ or error).splitlines()[-1].strip()
        return ""

    def packed_family(self, name: str, kind: str = "ffn") -> Family:
        """Return the dependency group of FFN units, or of whole experts, in a packed tensor of experts.

        Args:
            name: name of the packed parameter.
            kind: `ffn` or `experts`.

        Raises:
            CompressionError: there is no such group.
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
        """Return the dependency groups of channels; empty if the model has no `example_input_array`."""
        if self._graph is None:
            example = getattr(self.model, "example_input_array", None)
            if example is None:
                self.refused["channels"] = f"{type(self.model).__name__} has no example_input_array to trace it with"
            self._graph = [] if example is None else channel_families(self.model, example, self.left_alone)
        return self._graph

    def shrink_of(self, family: Family) -> Shrink | None:
        """Return the reducible config value of a dependency group; None if there is none."""
        for shrink in self.shrinks(family.kind):
            if any(other.label == family.label and other.names() == family.names() for other in shrink.families):
                return shrink
        return None

    def removal_of(self, chosen: list[tuple[Family, torch.Tensor]]) -> Removal:
        """Return the removal of units, which also covers buffers and config values that depend on their number.

        Args:
            chosen: pairs of a dependency group and bool flags of its kept units.

        Raises:
            CompressionError: the config cannot express the smaller model.
        """
        removal = Removal(text=", ".join(f"{int((~k).sum())} {f.kind} of {f.label}" for f, k in chosen[:4]))
        for family, keep in chosen:
            for slot in family.slots:
                removal.cut_slot(slot, keep)
        removal.cut_running_statistics(self.model)
        for family, keep in chosen:  # buffers of routers have an entry per expert, as corrections of their scores
            for home in dict.fromkeys(s.name.rpartition(".")[0] for s in family.slots if family.kind == "experts"):
                for last, buffer in self.model.get_submodule(home).named_buffers(recurse=False):
                    if buffer.shape == (family.size,):
                        removal.cut(f"{home}.{last}", 0, torch.nonzero(keep).view(-1))
        if self.config is not None:
            self._change_config(removal, chosen)
        return removal

    def _change_config(self, removal: Removal, chosen: list[tuple[Family, torch.Tensor]]) -> None:
        """Add new config values and dependent module attributes to a removal; CompressionError if layers differ."""
        config = copy.deepcopy(self.config)
        counts: dict[int, tuple[Shrink, list[tuple[int, int]]]] = {}  # by shrink: (kept, of) of each family
        for family, keep in chosen:
            shrink = self.shrink_of(family)
            if shrink is not None:
                numbers = counts.setdefault(id(shrink), (shrink, []))[1]
                numbers.append((int(keep.sum()) // family.blocks, family.size // family.blocks))
        for shrink, numbers in counts.values():
            if len(set(numbers)) > 1 or len(numbers) != len(shrink.families):
                raise CompressionError(
                    f"{type(config).__name__} says one number of {shrink.kind} for all layers: prune all layers alike "
                    f"(scope layer, modules of every layer), which is the nearest plan that can be exported"
                )
            config = shrink.config(config, *numbers[0])
            removal.config |= {key: getattr(config, key) for key in shrink.changes}
        if counts:
            model_class = dense_class(self.inner)
            before = dict(on_meta(model_class, self.config).named_modules())
            for name, module in on_meta(model_class, config).named_modules():
                changes = changed_attributes(before[name], module) if name in before else {}
                if changes:
                    removal.attributes[(self.prefix + name).removesuffix(".")] = changes
