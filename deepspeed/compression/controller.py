"""Compression beside an engine: what is formed, quantized, removed and written after which applied step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.compression.distill import Distiller
from deepspeed.compression.fake_quantize import FakeQuantizers
from deepspeed.compression.pruning.dependency_groups import CONV, out_axis
from deepspeed.compression.pruning.distributed_topk import kept_of
from deepspeed.compression.pruning.layer_reduction import REDUCED, Depth
from deepspeed.compression.pruning.masks import Masks
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.rules import CompressionRule, rules_of
from deepspeed.compression.pruning.sharded_view import Exchange
from deepspeed.compression.pruning.structured_removal import Removal, removal_of
from deepspeed.compression.pruning.unwrap import left_on
from deepspeed.config.sections.compression import CompressionTraining, QuantizeTraining
from deepspeed.errors import CompressionError
from deepspeed.foundation.log import log_rank0
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.parameters.parallel_groups import ParallelGroups

CALLED = "_ds_compression"  # on a model: the section it was prepared with by the old calls


class Compression:
    """What `compression_training` does while an engine trains.

    Args:
        model: its parameters are managed already.
        section: `compression_training`.
        training: `quantize_training`.
        axes: who shares the state, and who trains on other samples.
        optimizer: None when nothing is trained.
    """

    def __init__(
        self,
        model: nn.Module,
        section: CompressionTraining,
        training: QuantizeTraining,
        axes: ParallelGroups,
        optimizer: ZeroOptimizer | None,
    ) -> None:
        self.model, self.section, self._axes = model, section, axes
        self.training_steps = 0
        self.done: list[str] = []  # rules whose units have left
        self._waiting: dict[str, Any] | None = None
        self.plan = PruningPlan(model)
        self.rules = rules_of(model, section, self.plan, called=left_on(model, CALLED) is not None)
        self.masks = Masks(model, self.rules, axes.shard, optimizer)
        # What is seen of batches is added up over copies of the state too: each copy sees its own.
        self._seen = Exchange(axes.dp_sp_group, self.masks.exchange.device)
        self.quantizers = FakeQuantizers(model, section, training)
        self._watch = _InputNorms(model, self.rules)
        reduced = any(left_on(model, mark) is not None for mark in (CALLED, REDUCED))
        self.depth = Depth(model, section.layer_reduction) if section.layer_reduction.enabled and not reduced else None
        self.distiller = Distiller(model, section.distillation) if section.distillation.enabled else None
        self._announce()
        self.quantizers.at_step(0)
        self._form(0)

    def _announce(self) -> None:
        for rule in self.rules:
            for line in describe(rule, self.masks):
                log_rank0(line)
        if self.plan.unproven:
            log_rank0(
                f"related_modules of {', '.join(self.plan.unproven[:4])}: removed is masked, it is assumed; "
                f"nothing says what {type(self.model).__name__} takes (example_input_array) to try it"
            )

    def step(self) -> list[CompressionRule]:
        """An optimizer step was applied. All ranks call together.

        Returns:
            Rules whose units are to leave the engine now.
        """
        self.training_steps += 1
        self.quantizers.at_step(self.training_steps)
        return [rule for rule in self._form(self.training_steps) if rule.physical and removable(rule)]

    def leaving(self) -> Removal | None:
        """Layers that are to leave the engine now, after the units that leave. All ranks call together."""
        return None if self.depth is None else self.depth.after_step(self.training_steps, self._seen)

    def _form(self, step: int) -> list[CompressionRule]:
        if any(rule.criterion == "activation" and rule.due(step) for rule in self.rules):
            self.masks.scores.inputs = self._watch.of_all_ranks(self._seen)
        ended = self.masks.after_step(step)
        if not any(r.criterion == "activation" and r.name not in self.masks.final for r in self.rules):
            self._watch.remove()
        return ended

    def removal(self, rules: list[CompressionRule]) -> Removal:
        """What is to leave the engine for these rules."""
        chosen = [
            (family, keep)
            for rule in rules
            for family, keep in zip(rule.families, self.masks.units[rule.name], strict=True)
        ]
        made = removal_of(self.model, self.plan, chosen)
        made.rules = [rule.name for rule in rules]
        return made

    def removed(self, removal: Removal, optimizer: ZeroOptimizer | None, names: Mapping[str, str]) -> None:
        """Units or layers have left the engine, whose optimizer is laid out anew; masks of other rules come after it.

        Args:
            removal: what left.
            optimizer: of the engine.
            names: of parameters, by their names before; without those that left.
        """
        state = self.masks.state_dict()
        gone, ended = set(removal.cuts), set(removal.rules)
        if not ended:  # of a checkpoint that does not name them
            ended = {rule.name for rule in self.rules if rule.families and gone >= set(rule.names())}
        left = [rule for rule in self.rules if rule.name not in ended]
        if removal.layers:
            left = [rule for rule in left if follow_layers(rule, removal, names, state)]
        else:
            for rule in left:
                rule.families = [removal.remap(family) for family in rule.families]
        self.left(removal)
        self._watch = self._watch.followed(self.model, left, removal, names)
        self.done += [rule.name for rule in self.rules if rule not in left]
        self.rules = left
        self.plan = PruningPlan(self.model)
        self.masks = Masks(self.model, left, self._axes.shard, optimizer)
        self._waiting = {**state, "units": {r.name: state["units"][r.name] for r in left if r.name in state["units"]}}

    def left(self, removal: Removal) -> None:
        """What has left is not to leave again."""
        if self.depth is not None and self.depth.prefix in removal.layers:
            self.depth.left()

    def resume(self) -> None:
        """The state that masks of other rules had before a removal is back. All ranks call together."""
        if self._waiting is not None:
            self.masks.load_state_dict(self._waiting)
            self._waiting = None

    @property
    def ended(self) -> bool:
        """Whether every schedule has ended."""
        if self.depth is not None and not self.depth.over:
            return False
        return all(rule.name in self.masks.final for rule in self.rules) and self.quantizers.ended

    def state_dict(self) -> dict[str, Any]:
        """What all ranks share of it."""
        return {
            "training_steps": self.training_steps,
            "masks": self.masks.state_dict(),
            "quantizers": self.quantizers.state_dict(),
            **({} if self.depth is None else {"layers": self.depth.state_dict()}),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Take it back, after the tensors of a checkpoint were read. All ranks call together."""
        self.training_steps = saved["training_steps"]
        self.quantizers.load_state_dict(saved["quantizers"])
        self.masks.load_state_dict(saved["masks"])
        if self.depth is not None:
            self.depth.load_state_dict(saved.get("layers"), self.training_steps)

    def remove(self) -> None:
        """Take hooks and quantizers off the model."""
        self._watch.remove()
        if self.depth is not None:
            self.depth.remove()
        self.quantizers.remove()
        if self.distiller is not None:
            self.distiller.remove()


def removable(rule: CompressionRule) -> bool:
    """Whether its units can be taken out: everything that is coupled to them is known."""
    return bool(rule.families) and all(family.config is not False for family in rule.families)


def follow_layers(rule: CompressionRule, removal: Removal, names: Mapping[str, str], state: dict[str, Any]) -> bool:
    """Give a rule the names that its parameters have after layers left; whether any of them stays.

    Args:
        rule: changed in place.
        removal: of layers.
        names: of parameters, by their names before; without those that left.
        state: of `Masks.state_dict`; flags and scores of families that left are taken out of it.
    """
    families = [removal.renamed(family, names) for family in rule.families]
    stay = [at for at, family in enumerate(families) if family is not None]
    if rule.name in state["units"]:
        state["units"][rule.name] = [state["units"][rule.name][at] for at in stay]
    scores = state["scores"]["units"]
    if rule.name in scores and stay:
        parts = scores[rule.name].split([family.size for family in rule.families])
        scores[rule.name] = torch.cat([parts[at] for at in stay])
    rule.families = [family for family in families if family is not None]
    rule.weights = [names[name] for name in rule.weights if name in names]
    return bool(rule.families or rule.weights)


def describe(rule: CompressionRule, masks: Masks) -> list[str]:
    """The plan of a rule in words: what goes, from which tensors, when."""
    when = f"after step {rule.offset}" + (f" to {rule.end}" if rule.end is not None else "")
    if rule.weights:
        total = sum(masks.of(name).numel for name in rule.weights)
        gone = total - int(total * rule.ratio)
        return [f"{rule.name}: {gone:,} of {total:,} single weights in {len(rule.weights)} tensors become zero {when}"]
    made, kept = Removal(), 0
    for family in rule.families:
        width = family.size // family.blocks
        keep = (torch.arange(family.size) % width) < kept_of(width, rule.ratio)  # which units, will be seen
        kept += int(keep.sum())
        for slot in family.slots:
            made.cut_slot(slot, keep)
    units = sum(family.size for family in rule.families)
    shapes = {name: masks.of(name).shape for name in made.cuts}
    left = {name: shape.numel() - made.shape(name, shape).numel() for name, shape in shapes.items()}
    gone, matrices = sum(left.values()), sum(count for name, count in left.items() if len(shapes[name]) > 1)
    kind = rule.families[0].kind if rule.families else "units"
    # A convolution multiplies at each position of its output; of packed experts a token passes some only.
    work = f"up to {2 * matrices:,} FLOPs per {'position' if kind == 'channels' else 'token'}"
    if kind == "experts":  # a token passes as many as before
        work = f"up to {2 * sum(n for name, n in left.items() if len(shapes[name]) == 2):,} FLOPs per token"
    how = "leave the engine" if rule.physical and removable(rule) else "are masked"
    text = f"{rule.name}: {units - kept:,} of {units:,} {kind} in {len(rule.families)} layers {how} {when}"
    return [f"{text}: {gone:,} parameters of {len(shapes)} coupled tensors, {4 * gone / 2**20:.1f} MiB in fp32, {work}"]


class _InputNorms:
    """Adds up the squares of what enters the modules of activation-weighted rules."""

    def __init__(self, model: nn.Module, rules: list[CompressionRule]) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, tuple[int, int]] = {}  # by weight: how many, and their axis
        self._hooks: list[Any] = []
        homes = {id(param): name for name, param in model.named_parameters()}
        wanted = {name for rule in rules if rule.criterion == "activation" for name in rule.weights}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is None or homes[id(weight)] not in wanted or isinstance(module, nn.Embedding):
                continue
            name, axis = homes[id(weight)], 1 - out_axis(module)
            if getattr(module, "groups", 1) > 1:
                raise CompressionError(f"criterion activation of {name}: its outputs read other inputs by group")
            self._inputs[name] = getattr(weight, "ds_shape", weight.shape)[axis], axis
            self._hooks.append(module.register_forward_pre_hook(self._hook(name)))
        if blind := sorted(wanted - self._inputs.keys()):
            raise CompressionError(f"criterion activation of {blind[0]}: an embedding has no inputs; leave it out")

    def of_all_ranks(self, exchange: Exchange) -> dict[str, tuple[torch.Tensor, int]]:
        """(sums of squares [inputs], fp64, and the axis of inputs) by weight.

        All ranks call together, whatever modules each has used.
        """
        names = sorted(self._inputs)
        if not names:
            return {}
        sizes = [self._inputs[name][0] for name in names]
        none = (torch.zeros(size, dtype=torch.float64) for size in sizes)
        mine = [self.sums.get(name, zeros) for name, zeros in zip(names, none, strict=True)]
        parts = exchange.sum(torch.cat(mine), "norms of inputs").split(sizes)
        return {name: (part, self._inputs[name][1]) for name, part in zip(names, parts, strict=True)}

    def _hook(self, name: str) -> Any:
        def add(module: Any, inputs: tuple[Any, ...]) -> None:
            if module.training and inputs and isinstance(inputs[0], torch.Tensor):
                with torch.no_grad():
                    rows = inputs[0].detach().to(torch.float64)
                    if isinstance(module, CONV):  # channels stand before the places
                        rows = rows.movedim(1 - len(getattr(module.weight, "ds_shape", module.weight.shape)), -1)
                    found = rows.reshape(-1, rows.shape[-1]).square().sum(0).cpu()
                    self.sums[name] = self.sums.get(name, torch.zeros_like(found)) + found

        return add

    def followed(
        self, model: nn.Module, rules: list[CompressionRule], removal: Removal, names: Mapping[str, str]
    ) -> _InputNorms:
        """One for what is left of a model, with what was added up about it."""
        self.remove()
        made = _InputNorms(model, rules)
        modules = dict(model.named_modules())
        for old, total in self.sums.items():
            if old not in names:
                continue
            module = modules[names[old].removesuffix(".weight")]
            for axis, indices in removal.cuts.get(old, ()):
                if axis == 1 - out_axis(module) and indices.dim() == 1:
                    total = total[indices]
            made.sums[names[old]] = total
        return made

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
