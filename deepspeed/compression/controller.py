"""Compression during training: masks, quantizers and removals, scheduled by the number of applied optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.compression.distill import Distiller
from deepspeed.compression.fake_quantize import FakeQuantizers
from deepspeed.compression.pruning.dependency_groups import CONV, out_axis
from deepspeed.compression.pruning.distributed_topk import kept_of
from deepspeed.compression.pruning.layer_selection import REDUCED, Depth
from deepspeed.compression.pruning.masks import Masks
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.rules import CompressionRule, rules_of
from deepspeed.compression.pruning.sharded_view import Exchange
from deepspeed.compression.pruning.structured_removal import Removal
from deepspeed.compression.pruning.transformers_groups import left_on
from deepspeed.config.sections.compression import CompressionTraining, QuantizeTraining
from deepspeed.errors import CompressionError
from deepspeed.foundation.log import log_rank0
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.parameters.parallel_groups import ParallelGroups

CALLED = "_ds_compression"  # attribute of a model: the section that `init_compression` applied to it
TEACHER = "_ds_teacher"  # attribute of a model that was the teacher of `init_compression`


class Compression:
    """State of `compression_training` in an engine.

    Args:
        model: module of the engine, after the engine has sharded its parameters.
        section: `compression_training`.
        training: `quantize_training`.
        axes: process groups of the engine.
        optimizer: the engine's optimizer; masks are applied to its gradients and states. None without one.
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
        self.done: list[str] = []  # rules with removed units
        self._masks_before: dict[str, Any] | None = None
        self.plan = PruningPlan(model)
        self.rules = rules_of(model, section, self.plan, called=left_on(model, CALLED) is not None)
        self.masks = Masks(model, self.rules, axes.shard, optimizer)
        # Batch statistics are also summed over copies of the state, because each copy has other samples.
        self._all_samples = Exchange(axes.dp_sp_group, self.masks.exchange.device)
        self.quantizers = FakeQuantizers(model, section, training)
        self._input_norms = _InputNorms(model, self.rules)
        reduced = any(left_on(model, mark) is not None for mark in (CALLED, REDUCED))
        self.depth = Depth(model, section.layer_reduction) if section.layer_reduction.enabled and not reduced else None
        self.distiller = Distiller(model, section.distillation) if section.distillation.enabled else None
        copied = section.layer_reduction.teacher_layer if section.layer_reduction.enabled and reduced else None
        if self.distiller is not None and copied is not None:
            self.distiller.layers_left(copied, None)
        for rule in self.rules:
            log_rank0(self._describe(rule))
        if self.plan.unproven:
            log_rank0(
                f"related_modules of {', '.join(self.plan.unproven[:4])}: removed is masked, it is assumed; "
                f"nothing says what {type(self.model).__name__} takes (example_input_array) to try it"
            )
        self.quantizers.at_step(0)
        self._form_masks(0)

    def _describe(self, rule: CompressionRule) -> str:
        """Return a log line about a rule: its units or weights, their tensors and size, and the steps."""
        when = f"after step {rule.offset}" + (f" to {rule.end}" if rule.end is not None else "")
        if rule.weights:
            total = sum(self.masks.of(name).numel for name in rule.weights)
            zeros = total - int(total * rule.ratio)
            tensors = len(rule.weights)
            return f"{rule.name}: {zeros:,} of {total:,} single weights in {tensors} tensors become zero {when}"
        removal, kept_units = Removal(), 0
        for family in rule.families:
            width = family.size // family.blocks
            keep = (torch.arange(family.size) % width) < kept_of(width, rule.ratio)  # the units are not chosen yet
            kept_units += int(keep.sum())
            for slot in family.slots:
                removal.cut_slot(slot, keep)
        units = sum(family.size for family in rule.families)
        shapes = {name: self.masks.of(name).shape for name in removal.cuts}
        cut = {name: shape.numel() - removal.shape(name, shape).numel() for name, shape in shapes.items()}
        kind = rule.families[0].kind if rule.families else "units"
        # A convolution multiplies at each output position; the number of experts per token does not change.
        most = 2 if kind == "experts" else 5
        products = sum(count for name, count in cut.items() if 2 <= len(shapes[name]) <= most)
        work = f"up to {2 * products:,} FLOPs per {'position' if kind == 'channels' else 'token'}"
        how = "leave the engine" if rule.physical and rule.removable else "are masked"
        text = f"{rule.name}: {units - kept_units:,} of {units:,} {kind} in {len(rule.families)} layers {how} {when}"
        size = f"{sum(cut.values()):,} parameters of {len(shapes)} coupled tensors"
        return f"{text}: {size}, {4 * sum(cut.values()) / 2**20:.1f} MiB in fp32, {work}"

    def step(self) -> list[CompressionRule]:
        """Advance by one applied optimizer step; return the rules with units to remove now. Collective."""
        self.training_steps += 1
        self.quantizers.at_step(self.training_steps)
        return [rule for rule in self._form_masks(self.training_steps) if rule.physical and rule.removable]

    def leaving(self) -> Removal | None:
        """Return the removal of layers that is due at this step, or None; call it after `step`. Collective."""
        return None if self.depth is None else self.depth.after_step(self.training_steps, self._all_samples)

    def _form_masks(self, step: int) -> list[CompressionRule]:
        if any(rule.criterion == "activation" and rule.due(step) for rule in self.rules):
            self.masks.scores.inputs = self._input_norms.of_all_ranks(self._all_samples)
        ended = self.masks.after_step(step)
        if not any(r.criterion == "activation" and r.name not in self.masks.final for r in self.rules):
            self._input_norms.remove()
        return ended

    def removal(self, rules: list[CompressionRule]) -> Removal:
        """Return the removal of the units that the masks of these rules exclude."""
        chosen = [pair for rule in rules for pair in zip(rule.families, self.masks.units[rule.name], strict=True)]
        removal = self.plan.removal_of(chosen)
        removal.rules = [rule.name for rule in rules]
        return removal

    def removed(self, removal: Removal, optimizer: ZeroOptimizer | None, names: Mapping[str, str]) -> None:
        """Rebuild rules and masks after a removal, for the engine's new optimizer.

        Args:
            removal: the removed units or layers.
            optimizer: the engine's new optimizer.
            names: new names of the remaining parameters, by their old names.
        """
        state = self.masks.state_dict()
        ended = set(removal.rules)
        if not ended:  # checkpoint without these entries
            ended = {rule.name for rule in self.rules if rule.families and set(removal.cuts) >= set(rule.names())}
        rules = [rule for rule in self.rules if rule.name not in ended]
        if removal.layers:
            rules = [rule for rule in rules if self._rename_rule(rule, removal, names, state)]
        else:
            for rule in rules:
                rule.families = [removal.remap(family) for family in rule.families]
        self.left(removal)
        self._input_norms = self._input_norms.followed(self.model, rules, removal, names)
        self.done += [rule.name for rule in self.rules if rule not in rules]
        self.rules = rules
        self.plan = PruningPlan(self.model)
        self.masks = Masks(self.model, rules, self._axes.shard, optimizer)
        units = {rule.name: state["units"][rule.name] for rule in rules if rule.name in state["units"]}
        self._masks_before = {**state, "units": units}

    @staticmethod
    def _rename_rule(rule: CompressionRule, removal: Removal, names: Mapping[str, str], state: dict[str, Any]) -> bool:
        """Rename a rule's parameters after a removal of layers; return whether any parameter remains.

        Flags and scores of removed dependency groups are deleted from `state`, the state dict of the masks.
        """
        families = [removal.renamed(family, names) for family in rule.families]
        stay = [index for index, family in enumerate(families) if family is not None]
        if rule.name in state["units"]:
            state["units"][rule.name] = [state["units"][rule.name][index] for index in stay]
        scores = state["scores"]["units"]
        if rule.name in scores and stay:
            parts = scores[rule.name].split([family.size for family in rule.families])
            scores[rule.name] = torch.cat([parts[index] for index in stay])
        rule.families = [family for family in families if family is not None]
        rule.weights = [names[name] for name in rule.weights if name in names]
        return bool(rule.families or rule.weights)

    def left(self, removal: Removal) -> None:
        """Record that `removal` has removed layers, so that they are not removed again."""
        if self.depth is not None and self.depth.prefix in removal.layers:
            self.depth.left()
        if self.distiller is not None and len(removal.layers) == 1:
            (remaining,) = removal.layers.values()
            before = None if self.depth is None else self.depth.total
            self.distiller.layers_left(remaining, before if before != len(remaining) else None)

    def resume(self) -> None:
        """Restore the masks of the remaining rules after `removed`. Collective."""
        if self._masks_before is not None:
            self.masks.load_state_dict(self._masks_before)
            self._masks_before = None

    @property
    def ended(self) -> bool:
        if self.depth is not None and not self.depth.over:
            return False
        return all(rule.name in self.masks.final for rule in self.rules) and self.quantizers.ended

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which is equal on all ranks."""
        return {
            "training_steps": self.training_steps,
            "masks": self.masks.state_dict(),
            "quantizers": self.quantizers.state_dict(),
            **({} if self.depth is None else {"layers": self.depth.state_dict()}),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a `state_dict`; the model's weights must be loaded before. Collective."""
        self.training_steps = saved["training_steps"]
        self.quantizers.load_state_dict(saved["quantizers"])
        self.masks.load_state_dict(saved["masks"])
        if self.depth is not None:
            self.depth.load_state_dict(saved.get("layers"), self.training_steps)

    def remove(self) -> None:
        """Remove hooks and quantizers from the model."""
        self._input_norms.remove()
        if self.depth is not None:
            self.depth.remove()
        self.quantizers.remove()
        if self.distiller is not None:
            self.distiller.remove()


class _InputNorms:
    """Sums of squared inputs over tokens, recorded by hooks, for rules with the criterion `activation`.

    Raises:
        CompressionError: a rule selects an embedding or a grouped convolution.
    """

    def __init__(self, model: nn.Module, rules: list[CompressionRule]) -> None:
        self.sums: dict[str, torch.Tensor] = {}
        self._inputs: dict[str, tuple[int, int]] = {}  # by weight: number of inputs, and their axis
        self._hooks: list[Any] = []
        first_names = {id(param): name for name, param in model.named_parameters()}
        wanted = {name for rule in rules if rule.criterion == "activation" for name in rule.weights}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is None or first_names[id(weight)] not in wanted or isinstance(module, nn.Embedding):
                continue
            name, axis = first_names[id(weight)], 1 - out_axis(module)
            if getattr(module, "groups", 1) > 1:
                raise CompressionError(f"criterion activation of {name}: its outputs read other inputs by group")
            self._inputs[name] = getattr(weight, "ds_shape", weight.shape)[axis], axis
            self._hooks.append(module.register_forward_pre_hook(self._hook(name)))
        if blind := sorted(wanted - self._inputs.keys()):
            raise CompressionError(f"criterion activation of {blind[0]}: an embedding has no inputs; leave it out")

    def of_all_ranks(self, exchange: Exchange) -> dict[str, tuple[torch.Tensor, int]]:
        """Return {weight name: (fp64 sums of squares [inputs], input axis of the weight)}, summed over ranks.

        Collective; ranks may have used different modules.
        """
        names = sorted(self._inputs)
        if not names:
            return {}
        sizes = [self._inputs[name][0] for name in names]
        zeros = (torch.zeros(size, dtype=torch.float64) for size in sizes)
        sums = [self.sums.get(name, zero) for name, zero in zip(names, zeros, strict=True)]
        parts = exchange.sum(torch.cat(sums), "norms of inputs").split(sizes)
        return {name: (part, self._inputs[name][1]) for name, part in zip(names, parts, strict=True)}

    def _hook(self, name: str) -> Any:
        def add(module: Any, inputs: tuple[Any, ...]) -> None:
            if module.training and inputs and isinstance(inputs[0], torch.Tensor):
                with torch.no_grad():
                    rows = inputs[0].detach().to(torch.float64)
                    if isinstance(module, CONV):  # channel axis before positions
                        rows = rows.movedim(1 - len(getattr(module.weight, "ds_shape", module.weight.shape)), -1)
                    squares = rows.reshape(-1, rows.shape[-1]).square().sum(0).cpu()
                    self.sums[name] = self.sums.get(name, torch.zeros_like(squares)) + squares

        return add

    def followed(
        self, model: nn.Module, rules: list[CompressionRule], removal: Removal, names: Mapping[str, str]
    ) -> _InputNorms:
        """Remove these hooks, and return new ones after a removal, with the sums of the remaining inputs."""
        self.remove()
        norms = _InputNorms(model, rules)
        modules = dict(model.named_modules())
        for old, total in self.sums.items():
            if old not in names:
                continue
            module = modules[names[old].removesuffix(".weight")]
            for axis, indices in removal.cuts.get(old, ()):
                if axis == 1 - out_axis(module) and indices.dim() == 1:
                    total = total[indices]
            norms.sums[names[old]] = total
        return norms

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
