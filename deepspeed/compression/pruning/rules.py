"""Pruning rules (parameters, criterion and schedule) from `compression_training`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import CONV, Family, ParameterSlice, out_axis
from deepspeed.compression.pruning.distributed_topk import kept_of
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.transformers_groups import ADAPTER
from deepspeed.config.sections.compression import CompressionGroup, CompressionTraining
from deepspeed.config.validate import pattern_of
from deepspeed.errors import CompressionError

_CRITERIA = {"l1": "magnitude", "topk": "movement", "snip_momentum": "taylor"}
LEARNED = ("movement", "taylor", "activation")  # criteria that observe training, so the first mask needs a step


@dataclass(eq=False)
class CompressionRule:
    """Pruning rule of one group in the configuration.

    Args:
        name: `technique.group`.
        technique: key of the technique, such as `sparse_pruning`.
        ratio: final fraction of kept elements or units.
        offset: number of applied steps before the first mask.
        end: number of applied steps after which the mask is final; None: the first mask is final, but with criterion
            movement, masks change until the end of training.
        stride: number of applied steps between two masks.
        cubic: whether the kept fraction decreases by the cubic schedule of arXiv:1710.01878 from `offset` to `end`.
        criterion: `magnitude`, `activation`, `movement` or `taylor` (see `importance`).
        over_all: whether all parameters or dependency groups share one threshold (scope global).
        pattern: ("of", n, m) for N:M sparsity, ("block", rows, columns) for blocks; None: unstructured.
        weights: names of parameters with single weights to prune; empty for units.
        families: dependency groups with units to prune; empty for single weights.
        physical: whether the units are removed from the engine at the end of the schedule.
    """

    name: str
    technique: str
    ratio: float
    offset: int
    end: int | None
    stride: int
    cubic: bool
    criterion: str
    over_all: bool
    pattern: tuple[str, int, int] | None = None
    weights: list[str] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    physical: bool = False

    @property
    def revives(self) -> bool:
        """Whether a later mask may keep elements that an earlier one dropped; then the master weight stays dense."""
        return self.criterion == "movement" or (self.end is not None and self.end > self.offset)

    @property
    def removable(self) -> bool:
        """Whether the rule has units that can be removed, because all coupled parameters are known."""
        return bool(self.families) and all(family.config is not False for family in self.families)

    def due(self, step: int) -> bool:
        """Whether a new mask is due after `step` applied steps."""
        first = max(self.offset, 1) if self.criterion in LEARNED else self.offset
        if step < first:
            return False
        if self.end is None and not self.revives:
            return step == first
        if self.end is not None and step >= self.end:
            return step == max(self.end, first)
        return step == first or (step - self.offset) % self.stride == 0

    def final(self, step: int) -> bool:
        """Whether the mask after `step` applied steps is the last one."""
        return step >= self.end if self.end is not None else not self.revives

    def ratio_at(self, step: int) -> float:
        """Return the fraction that the mask after `step` applied steps keeps."""
        if not self.cubic or self.end is None or step >= self.end:
            return self.ratio
        done = (step - self.offset) / (self.end - self.offset)
        return 1.0 - (1.0 - self.ratio) * (1.0 - (1.0 - done) ** 3)

    def names(self) -> list[str]:
        """Return the names of all affected parameters."""
        return [*self.weights, *dict.fromkeys(name for family in self.families for name in family.names())]


def matched(model: nn.Module, expressions: list[str], packed: bool = False) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (index of the expression, module name, module) of compressible modules, except LoRA adapters.

    Args:
        model: model to search.
        expressions: regular expressions for names; "*" matches all.
        packed: whether modules with packed experts are also searched.

    Raises:
        CompressionError: an expression matches no module.
    """
    for index, expression in enumerate(expressions):
        modules = [
            (name, module)
            for name, module in model.named_modules()
            if (compressible(module) or (packed and experts_of(module)))
            and (expression == "*" or re.search(expression, name))
            and ADAPTER not in name
        ]
        if not modules:
            examples = [name for name, module in model.named_modules() if compressible(module)][:4]
            raise CompressionError(
                f"{expression!r} finds no Linear, Conv1D, convolution or Embedding in {type(model).__name__}; modules "
                f"are named as in model.named_modules(), for instance {examples}"
            )
        yield from ((index, name, module) for name, module in modules)


def compressible(module: nn.Module) -> bool:
    """Whether techniques support a module's weight: Linear, `Conv1D`, convolution (not transposed) or Embedding."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONV)) or type(module).__name__ == "Conv1D"


def experts_of(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters with packed experts: 3-D, and not of a compressible module."""
    own = {} if compressible(module) else module._parameters
    return [name for name, p in own.items() if p is not None and len(getattr(p, "ds_shape", p.shape)) == 3]


def rules_of(
    model: nn.Module, section: CompressionTraining, plan: PruningPlan, called: bool = False
) -> list[CompressionRule]:
    """Create the pruning rules of a model, plain or sharded.

    Args:
        model: the model.
        section: `compression_training`.
        plan: the model's dependency groups.
        called: whether `init_compression` was called; then units normally stay in the engine until `redundancy_clean`.

    Raises:
        CompressionError: modules are missing, named twice, or cannot be pruned this way.
    """
    rules: list[CompressionRule] = []
    builder = _RuleBuilder(model, plan, called)
    for technique, block in section.pruning.items():
        if not block.shared_parameters.enabled:
            continue
        groups: dict[str, Any] = dict(block.different_groups) or {"all": None}
        taken: dict[str, str] = {}
        for name, group in groups.items():
            rule = builder.build(technique, name, group, block.shared_parameters)
            for target in rule.weights or [f"{family.kind} of {family.label}" for family in rule.families]:
                if target in taken:
                    raise CompressionError(f"{target} is named by {taken[target]} and by {rule.name}: name it once")
                taken[target] = rule.name
            rules.append(rule)
    plan.forget_twin()
    return rules


class _RuleBuilder:
    """Builder of pruning rules for one model; arguments are those of `rules_of`."""

    def __init__(self, model: nn.Module, plan: PruningPlan, called: bool) -> None:
        self.model, self.plan, self.called = model, plan, called
        params = model.named_parameters(remove_duplicate=False)
        self._shapes = {name: torch.Size(getattr(param, "ds_shape", param.shape)) for name, param in params}

    def build(self, technique: str, name: str, group: Any, shared: Any) -> CompressionRule:
        """Build a rule for a group (None: all modules); CompressionError for experts after `init_compression`."""
        rule = CompressionRule(
            name=f"{technique}.{name}",
            technique=technique,
            ratio=shared.dense_ratio if group is None else group.params.dense_ratio,
            offset=shared.schedule_offset,
            end=shared.schedule_offset_end,
            stride=shared.schedule_offset_stride,
            cubic=shared.schedule == "cubic",
            criterion=shared.criterion or _CRITERIA[shared.method],
            over_all=shared.scope == "global",
        )
        if technique == "sparse_pruning":
            self._set_weights(rule, group, shared)
        elif technique == "expert_pruning":
            if self.called:
                raise CompressionError(f"{rule.name}: experts leave through initialize alone: no init_compression")
            rule.families, rule.physical = list(self._experts(group)), True
            for family in rule.families:
                self.plan.check_said(family, kept_of(family.size, rule.ratio))
        else:
            heads = technique == "head_pruning"
            rule.families = list(self._heads(group, shared) if heads else self._units(technique, group))
            self._set_physical(rule, getattr(shared, "physical", None))
        return rule

    def _set_physical(self, rule: CompressionRule, wanted: bool | None) -> None:
        """Set whether the units of a rule are removed; CompressionError if `physical` is true and impossible."""
        rule.physical = not self.called if wanted is None else wanted
        stuck = [family for family in rule.families if family.config is False]
        if wanted and stuck:
            reason = self.plan.why_not(stuck[0].kind, [family.label for family in stuck])
            raise CompressionError(f"{rule.name}: physical is true, and units cannot be taken out of {reason}")
        for family in rule.families if wanted is not False and not rule.over_all else ():
            if family.config:
                self.plan.check_said(family, kept_of(family.size // family.blocks, rule.ratio))

    def _set_weights(self, rule: CompressionRule, group: CompressionGroup | None, shared: Any) -> None:
        """Set parameters and pattern of a rule for single weights; CompressionError if the pattern does not fit."""
        excluded = [re.compile(text) for text in shared.excluded_modules]
        modules = dict.fromkeys(
            module
            for _, name, module in matched(self.model, group.modules if group is not None else ["*"])
            if not any(text.search(name) for text in excluded)
        )
        first_names = {id(param): name for name, param in self.model.named_parameters()}
        rule.weights = list(dict.fromkeys(first_names[id(module.weight)] for module in modules))
        named = "block_pattern" in shared.model_fields_set or shared.method == "snip_momentum"
        rule.pattern = pattern_of(shared.block_pattern) if named else None
        if rule.pattern is None:
            return
        kind, n, m = rule.pattern
        if kind == "of" and abs(rule.ratio - n / m) > 1e-9:
            raise CompressionError(f"{rule.name}: {n}:{m} keeps {n / m:g}, and dense_ratio says {rule.ratio:g}")
        for name in rule.weights:
            shape = self._shapes[name]
            if shape[1:].numel() % m or (kind == "block" and shape[0] % n):
                raise CompressionError(
                    f"{rule.name}: {name} of shape {tuple(shape)} is no whole number of {n}{'x:'[kind == 'of']}{m}"
                )

    def _units(self, technique: str, group: Any) -> Iterator[Family]:
        """Yield the dependency groups of rows, channels or FFN units that a group's modules select."""
        families: dict[int, tuple[Family, list[str]]] = {}
        for index, name, module in list(matched(self.model, group.modules, packed=technique == "row_pruning")):
            packed = [f"{name}.{param}" for param in experts_of(module)]
            for weight in packed:
                family = self.plan.packed_family(weight)
                families.setdefault(id(family), (family, []))[1].append(weight)
            if packed:
                continue
            weight, family = f"{name}.weight", None
            if group.related_modules is None:
                kind = "channels" if technique == "channel_pruning" else "ffn"
                family = self.plan.family_of(weight, out_axis(module), kind)
            if family is None:
                partners = self._partners(group, index, name)
                family = self._rows(name, module, partners)
                if partners:
                    self.plan.prove_named(family)
            families.setdefault(id(family), (family, []))[1].append(weight)
        for family, weights in families.values():
            yield family.scored_by(weights)

    def _experts(self, group: Any) -> Iterator[Family]:
        """Yield the dependency groups of whole experts; CompressionError for a named module without packed experts."""
        for _, name, module in matched(self.model, group.modules, packed=True):
            packed = [f"{name}.{param}" for param in experts_of(module)]
            if packed:
                yield self.plan.packed_family(packed[0], "experts").scored_by(packed)
            elif group.modules != ["*"]:
                raise CompressionError(
                    f"expert_pruning: {name} packs no experts; name the modules that do (mlp.experts$)"
                )

    def _heads(self, group: Any, shared: Any) -> Iterator[Family]:
        """Yield the dependency groups of heads that a group's modules read or write.

        For a module in no group of the plan, inputs are divided into `num_heads` heads; CompressionError if impossible.
        """
        families: dict[int, tuple[Family, list[str]]] = {}
        for index, name, module in list(matched(self.model, group.modules)):
            weight, axis = f"{name}.weight", 1 - out_axis(module)
            axes = (axis, 1 - axis) if group.related_modules is None else ()
            candidates = [self.plan.family_of(weight, dim, "heads") for dim in axes]
            family = next((known for known in candidates if known is not None), None)
            if family is not None:
                families.setdefault(id(family), (family, []))[1].append(weight)
                continue
            heads = shared.num_heads or self.plan.heads
            shape = self._shapes.get(weight)
            if heads is None or shape is None or shape[axis] % heads:
                inputs = None if shape is None else shape[axis]
                raise CompressionError(f"head_pruning: num_heads is {heads}, and {name} takes {inputs} inputs")
            slots = [ParameterSlice.along_axis(weight, axis, shape[axis], heads)]
            for partner in self._partners(group, index, name):
                outputs = out_axis(self.model.get_submodule(partner))
                for param in (f"{partner}.weight", f"{partner}.bias"):
                    shape = self._shapes.get(param)
                    if shape is not None:
                        axis = outputs if len(shape) > 1 else 0
                        slots.append(ParameterSlice.along_axis(param, axis, shape[axis], heads, scored=False))
            yield Family("heads", name, heads, slots, 1, False)
        for family, weights in families.values():
            yield family.scored_by(weights)

    def _partners(self, group: Any, index: int, name: str) -> list[str]:
        """Return names of related modules: the matches closest to `name`; CompressionError without a match."""
        if group.related_modules is None:
            return []
        partners = []
        for expression in group.related_modules[index]:
            names = [other for other, _ in self.model.named_modules() if re.search(expression, other)]
            ends = [other for other in names if re.search(rf"(?:{expression})$", other)] or names
            if not ends:
                raise CompressionError(f"related_modules: {expression!r} finds no module")
            shared = {other: len(commonprefix([name.split("."), other.split(".")])) for other in ends}
            partners += [other for other in ends if shared[other] == max(shared.values())]
        return partners

    def _rows(self, name: str, module: nn.Module, partners: list[str]) -> Family:
        """Return the dependency group of a module's rows, with partners; CompressionError if their sizes do not fit."""
        axis, shape = out_axis(module), self._shapes.get(f"{name}.weight")
        if shape is None:
            raise CompressionError(f"{name} has no weight of its own")
        size = shape[axis]
        slots = [ParameterSlice.along_axis(f"{name}.weight", axis, size, size)]
        if f"{name}.bias" in self._shapes:
            slots.append(ParameterSlice.along_axis(f"{name}.bias", 0, size, size, scored=False))
        for partner in partners:
            weight, bias = self._shapes.get(f"{partner}.weight"), self._shapes.get(f"{partner}.bias")
            parts = {"weight": weight, "bias": bias if len(weight or ()) <= 1 else None}
            for last, shape in parts.items():
                if shape is None:
                    continue
                axis = 0 if len(shape) == 1 else 1 - out_axis(self.model.get_submodule(partner))
                if shape[axis] % size:
                    raise CompressionError(
                        f"{partner}.{last} of shape {tuple(shape)} does not take the {size} rows of {name}"
                    )
                slots.append(ParameterSlice.along_axis(f"{partner}.{last}", axis, shape[axis], size, scored=False))
        kind = "channels" if isinstance(module, CONV) else "rows"
        return Family(kind, name, size, slots, 1, None if partners else False)
