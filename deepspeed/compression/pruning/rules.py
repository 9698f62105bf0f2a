"""Parses the JSON into pruning rules: which parameters, by what score, at which steps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.compression.pruning.dependency_groups import CONV, Family, ParameterSlice, axis_slot, out_axis
from deepspeed.compression.pruning.distributed_topk import kept_of
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.unwrap import ADAPTER
from deepspeed.config.sections.compression import CompressionGroup, CompressionTraining
from deepspeed.config.validate import pattern_of
from deepspeed.errors import CompressionError

_CRITERIA = {"l1": "magnitude", "topk": "movement", "snip_momentum": "taylor"}
LEARNED = ("movement", "taylor", "activation")  # criteria that look at training, so the first mask needs a step


@dataclass(eq=False)
class CompressionRule:
    """One group of one technique.

    Args:
        name: `technique.group`.
        technique: of the JSON.
        ratio: share kept at the end.
        offset: applied steps before the mask acts.
        end: applied steps after which it is final; None: at once, or never where the criterion may revive.
        stride: applied steps between two masks.
        cubic: the share falls along a cubic from offset to end.
        criterion: the score.
        over_all: one threshold for all parameters or families (scope global).
        pattern: N:M or blocks, of single weights.
        weights: names of the parameters whose single weights go; empty for units.
        families: units; empty for single weights.
        physical: the units leave the engine when the schedule ends.
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
        """Whether a later mask may keep what an earlier one dropped: the master stays dense until it is final."""
        return self.criterion == "movement" or (self.end is not None and self.end > self.offset)

    def due(self, step: int) -> bool:
        """Whether a mask is formed after `step` applied steps."""
        first = max(self.offset, 1) if self.criterion in LEARNED else self.offset
        if step < first:
            return False
        if self.end is None and not self.revives:
            return step == first
        if self.end is not None and step >= self.end:
            return step == max(self.end, first)
        return step == first or (step - self.offset) % self.stride == 0

    def final(self, step: int) -> bool:
        """Whether the mask formed at `step` is the last."""
        return step >= self.end if self.end is not None else not self.revives

    def ratio_at(self, step: int) -> float:
        """The share kept by a mask formed after `step` applied steps."""
        if not self.cubic or self.end is None or step >= self.end:
            return self.ratio
        done = (step - self.offset) / (self.end - self.offset)
        return 1.0 - (1.0 - self.ratio) * (1.0 - (1.0 - done) ** 3)

    def names(self) -> list[str]:
        """Parameters it touches."""
        return [*self.weights, *dict.fromkeys(name for family in self.families for name in family.names())]


def matched(model: nn.Module, expressions: list[str], packed: bool = False) -> Iterator[tuple[int, str, nn.Module]]:
    """(place of the expression, name, module) of compressible modules; `packed`: of those that pack experts too.

    Raises:
        CompressionError: an expression finds none.
    """
    for place, expression in enumerate(expressions):
        found = [
            (name, module)
            for name, module in model.named_modules()
            if (compressible(module) or (packed and experts_of(module)))
            and (expression == "*" or re.search(expression, name))
            and ADAPTER not in name
        ]
        if not found:
            raise CompressionError(
                f"{expression!r} finds no Linear, Conv1D, convolution or Embedding in {type(model).__name__}; modules "
                f"are named as in model.named_modules(), for instance {_some_names(model)}"
            )
        yield from ((place, name, module) for name, module in found)


def _some_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if compressible(module)][:4]


def compressible(module: nn.Module) -> bool:
    """Whether techniques work on a module's weight."""
    return isinstance(module, (nn.Linear, nn.Embedding, *CONV)) or type(module).__name__ == "Conv1D"


def experts_of(module: nn.Module) -> list[str]:
    """Names of a module's own parameters that pack several experts: three axes, and no convolution."""
    own = {} if compressible(module) else module._parameters
    return [name for name, p in own.items() if p is not None and len(getattr(p, "ds_shape", p.shape)) == 3]


def rules_of(
    model: nn.Module, section: CompressionTraining, plan: PruningPlan, called: bool = False
) -> list[CompressionRule]:
    """The pruning rules of a model.

    Args:
        model: the model, plain or sharded.
        section: `compression_training`.
        plan: finds coupled tensors.
        called: the old calls are used, and `redundancy_clean` is to come.

    Raises:
        CompressionError: modules are not there, are named twice, or cannot be pruned so.
    """
    made: list[CompressionRule] = []
    for technique, one in section.pruning.items():
        shared = one.shared_parameters
        if not shared.enabled:
            continue
        groups: dict[str, Any] = dict(one.different_groups)
        if not groups:
            groups = {"all": None}
        taken: dict[str, str] = {}
        for name, group in groups.items():
            rule = _rule(technique, name, group, shared)
            if technique == "sparse_pruning":
                _single_weights(model, rule, group, shared)
            elif technique == "expert_pruning":
                if called:
                    raise CompressionError(f"{rule.name}: experts leave through initialize alone: no init_compression")
                rule.families, rule.physical = list(_experts(model, group, plan)), True
                for family in rule.families:
                    plan.check_said(family, kept_of(family.size, rule.ratio))
            else:
                rule.families = list(_units(model, technique, group, shared, plan))
                wanted = getattr(shared, "physical", None)
                rule.physical = not called if wanted is None else wanted
                _check_removable(rule, plan, wanted)
                for family in rule.families if wanted is not False and not rule.over_all else ():
                    if family.config:
                        plan.check_said(family, kept_of(family.size // family.blocks, rule.ratio))
            _check_named_once(rule, taken)
            made.append(rule)
    plan.forget_twin()
    return made


def _rule(technique: str, name: str, group: Any, shared: Any) -> CompressionRule:
    ratio = shared.dense_ratio if group is None else group.params.dense_ratio
    criterion = shared.criterion or _CRITERIA[shared.method]
    return CompressionRule(
        f"{technique}.{name}",
        technique,
        ratio,
        shared.schedule_offset,
        shared.schedule_offset_end,
        shared.schedule_offset_stride,
        shared.schedule == "cubic",
        criterion,
        shared.scope == "global",
    )


def _check_removable(rule: CompressionRule, plan: PruningPlan, wanted: bool | None) -> None:
    """`"physical": true` of units that nobody knows how to take out."""
    stuck = [family for family in rule.families if family.config is False]
    if wanted and stuck:
        reason = plan.why_not(stuck[0].kind, [family.label for family in stuck])
        raise CompressionError(f"{rule.name}: physical is true, and units cannot be taken out of {reason}")


def _check_named_once(rule: CompressionRule, taken: dict[str, str]) -> None:
    things = rule.weights or [f"{family.kind} of {family.label}" for family in rule.families]
    for thing in things:
        if thing in taken:
            raise CompressionError(f"{thing} is named by {taken[thing]} and by {rule.name}: name it once")
        taken[thing] = rule.name


def _single_weights(model: nn.Module, rule: CompressionRule, group: CompressionGroup | None, shared: Any) -> None:
    excluded = [re.compile(text) for text in shared.excluded_modules]
    given = "block_pattern" in shared.model_fields_set or shared.method == "snip_momentum"
    rule.pattern = pattern_of(shared.block_pattern) if given else None
    found = dict.fromkeys(
        name
        for _, name, module in matched(model, group.modules if group is not None else ["*"])
        if not any(text.search(name) for text in excluded)
    )
    first = {id(param): name for name, param in model.named_parameters()}
    rule.weights = list(dict.fromkeys(first[id(model.get_submodule(name).weight)] for name in found))
    if rule.pattern is not None:
        _check_pattern(model, rule)


def _check_pattern(model: nn.Module, rule: CompressionRule) -> None:
    kind, n, m = rule.pattern or ("", 1, 1)
    if kind == "of" and abs(rule.ratio - n / m) > 1e-9:
        raise CompressionError(f"{rule.name}: {n}:{m} keeps {n / m:g}, and dense_ratio says {rule.ratio:g}")
    params = dict(model.named_parameters())
    for name in rule.weights:
        shape = tuple(getattr(params[name], "ds_shape", params[name].shape))
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        if columns % m or (kind == "block" and rows % n):
            raise CompressionError(
                f"{rule.name}: {name} of shape {shape} is no whole number of {n}{'x:'[kind == 'of']}{m}"
            )


def _units(model: nn.Module, technique: str, group: Any, shared: Any, plan: PruningPlan) -> Iterator[Family]:
    chosen = list(matched(model, group.modules, packed=technique == "row_pruning"))
    if technique == "head_pruning":
        yield from _heads(model, group, shared, plan, chosen)
        return
    families: dict[int, tuple[Family, list[str]]] = {}
    for place, name, module in chosen:
        packed = [f"{name}.{param}" for param in experts_of(module)]
        for weight in packed:
            family = plan.packed_family(weight)
            families.setdefault(id(family), (family, []))[1].append(weight)
        if packed:
            continue
        weight = f"{name}.weight"
        family = None
        if group.related_modules is None:
            family = plan.family_of(weight, out_axis(module), "channels" if technique == "channel_pruning" else "ffn")
        if family is None:
            partners = _partners(model, group, place, name)
            family = _rows(model, name, module, partners)
            if partners:
                plan.prove_named(family)
        families.setdefault(id(family), (family, []))[1].append(weight)
    for family, weights in families.values():
        yield _scored_by(family, weights)


def _experts(model: nn.Module, group: CompressionGroup, plan: PruningPlan) -> Iterator[Family]:
    """Whole experts of the modules that pack them."""
    for _, name, module in matched(model, group.modules, packed=True):
        packed = [f"{name}.{param}" for param in experts_of(module)]
        if packed:
            yield _scored_by(plan.packed_family(packed[0], "experts"), packed)
        elif group.modules != ["*"]:
            raise CompressionError(f"expert_pruning: {name} packs no experts; name the modules that do (mlp.experts$)")


def _scored_by(family: Family, weights: list[str]) -> Family:
    """The family, with magnitude read off the modules that were named."""
    slots = [ParameterSlice(s.name, s.axes, s.table, s.name in weights, s.layouts) for s in family.slots]
    return Family(family.kind, family.label, family.size, slots, family.blocks, family.config)


def _partners(model: nn.Module, group: Any, place: int, name: str) -> list[str]:
    """Modules named as partners of a module: those that share the most of its name, of each expression."""
    if group.related_modules is None:
        return []
    every = [other for other, _ in model.named_modules()]
    chosen = []
    for expression in group.related_modules[place]:
        found = [other for other in every if re.search(expression, other)]
        ends = [other for other in found if re.search(rf"(?:{expression})$", other)] or found
        if not ends:
            raise CompressionError(f"related_modules: {expression!r} finds no module")
        most = max(_common(name, other) for other in ends)
        chosen += [other for other in ends if _common(name, other) == most]
    return chosen


def _common(one: str, two: str) -> int:
    pairs = zip(one.split("."), two.split("."), strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(one.count("."), two.count(".")) + 1)


def _shape(model: nn.Module, name: str) -> torch.Size | None:
    module, _, last = name.rpartition(".")
    param = getattr(model.get_submodule(module), "_parameters", {}).get(last)
    return None if param is None else torch.Size(getattr(param, "ds_shape", param.shape))


def _rows(model: nn.Module, name: str, module: nn.Module, partners: list[str]) -> Family:
    """Output rows of one module, and what its partners have of them."""
    axis = out_axis(module)
    shape = _shape(model, f"{name}.weight")
    if shape is None:
        raise CompressionError(f"{name} has no weight of its own")
    size = shape[axis]
    slots = [axis_slot(f"{name}.weight", axis, size, size)]
    if _shape(model, f"{name}.bias") is not None:
        slots.append(axis_slot(f"{name}.bias", 0, size, size, scored=False))
    for partner in partners:
        other = model.get_submodule(partner)
        for last in ("weight", "bias"):
            part = _shape(model, f"{partner}.{last}")
            if part is None or (last == "bias" and len(_shape(model, f"{partner}.weight") or ()) > 1):
                continue
            at = 0 if len(part) == 1 else 1 - out_axis(other)
            if part[at] % size:
                raise CompressionError(
                    f"{partner}.{last} of shape {tuple(part)} does not take the {size} rows of {name}"
                )
            slots.append(axis_slot(f"{partner}.{last}", at, part[at], size, scored=False))
    kind = "channels" if isinstance(module, CONV) else "rows"
    return Family(kind, name, size, slots, 1, None if partners else False)


def _heads(model: nn.Module, group: Any, shared: Any, plan: PruningPlan, chosen: list[Any]) -> Iterator[Family]:
    for place, name, module in chosen:
        weight, axis = f"{name}.weight", 1 - out_axis(module)
        family = plan.family_of(weight, axis, "heads") if group.related_modules is None else None
        if family is not None:
            yield _scored_by(family, [weight])
            continue
        heads = shared.num_heads or plan.heads
        shape = _shape(model, weight)
        if heads is None or shape is None or shape[axis] % heads:
            raise CompressionError(
                f"head_pruning: num_heads is {heads}, and {name} takes {None if shape is None else shape[axis]} inputs"
            )
        slots = [axis_slot(weight, axis, shape[axis], heads)]
        for partner in _partners(model, group, place, name):
            for last in ("weight", "bias"):
                part = _shape(model, f"{partner}.{last}")
                if part is not None:
                    at = out_axis(model.get_submodule(partner)) if len(part) > 1 else 0
                    slots.append(axis_slot(f"{partner}.{last}", at, part[at], heads, scored=False))
        yield Family("heads", name, heads, slots, 1, False)
