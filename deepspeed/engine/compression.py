"""Compression of an engine's model (`compression_training`): the actions after each applied step.

When units are removed, masters and moments are gathered parameter by parameter and shrunk, and every rank stores an
equal part of the result until the new groups exist.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from deepspeed.checkpoint.ranks import Ranks
from deepspeed.comm.collectives.collectives import READ
from deepspeed.compression.basic_layer import plain_module
from deepspeed.compression.controller import CALLED, TEACHER, Compression
from deepspeed.compression.export import export
from deepspeed.compression.pruning.layer_selection import have_left, keep_layers
from deepspeed.compression.pruning.sharded_view import Exchange
from deepspeed.compression.pruning.structured_removal import Removal, reshape
from deepspeed.compression.pruning.transformers_groups import left_on, shapes_of
from deepspeed.engine.build import build
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.state_dict_io import WeightsIO
from deepspeed.engine.train_loop import TrainLoop
from deepspeed.errors import ArgumentError, CheckpointError, NotAvailableError, UsageError
from deepspeed.foundation.log import log_rank0
from deepspeed.zero.api.state_view import StateView
from deepspeed.zero.parameters.grouping import GroupingPlan, build_group
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup

_VALUE = "value"


@dataclass
class _Facts:
    """Optimizer group and metadata of the optimizer state of a parameter, equal on all ranks."""

    group: int = -1  # number of its optimizer group; -1: none
    # dtypes of state tensors with the parameter's shape, by key
    sliced: dict[str, torch.dtype] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)  # other state values


class StructuredPruning:
    """Structured removal of units (heads, channels, layers) from a running engine; all ranks create and run it.

    Args:
        removal: units to remove.
        agree: synchronizes all ranks, before slices that other ranks may still request are withdrawn.
    """

    def __init__(self, state: EngineState, removal: Removal, agree: Callable[[], Any]) -> None:
        self.state, self.removal, self._agree = state, removal, agree
        self._components = state.components
        self._view = state.view()
        self._new: StateView | None = None
        self._exchange = Exchange(state.axes.shard, state.device)
        self._agreed = False
        self._aside: dict[tuple[str, str], tuple[torch.Tensor, int]] = {}
        self._facts: dict[str, _Facts] = {}
        self._order: list[str] = []
        self._stay: set[int] = set()  # ids of the parameters that the model still has afterwards
        self._before: dict[int, list[str]] = {}  # names of all parameters before the removal, by id
        self._members = {id(member.param): member.name for member in self._view.members.values()}

    def run(self) -> None:
        """Set the remaining state aside, build shard groups of the new shapes, and restore the state."""
        state, components = self.state, self._components
        self._view.settle()
        if components.lifecycle is not None:
            components.lifecycle.settle()
            components.lifecycle.prefetcher.free_idle()
        self._gather_facts()
        for name, param in state.module.named_parameters(remove_duplicate=False):
            self._before.setdefault(id(param), []).append(name)
        for prefix, keep in self.removal.layers.items():
            keep_layers(state.module, prefix, keep)
        self._stay = {id(param) for param in state.module.parameters()}
        with torch.no_grad():
            for group in components.groups:
                self._put_aside(group)
        self._release()
        with torch.no_grad():
            for group in components.groups:
                self._cut(group)
            self._cut_plain()
        self.removal.follow(state.module)
        old = components.optimizer
        inner = None if old is None else old.optimizer
        state.components = build(state.module, inner, state.ds_config, state.axes, state.device, old)
        if state.compression is not None:
            state.compression.removed(self.removal, state.components.optimizer, self._renamed())
        with torch.no_grad():
            for group in state.components.groups:
                self._bring_back(group)
        state.view().all_gather_masters()

    # -- collection of the state --------------------------------------------------------------------------------------

    def _gather_facts(self) -> None:
        view, local_facts = self._view, {}
        numbers = view.group_numbers()
        for name, member in view.members.items():
            for fragment in view.fragments_of(member):
                facts = local_facts.setdefault(name, _Facts(numbers.get(id(fragment.leaf), -1)))
                for key, value in view.state_of(fragment).items():
                    if isinstance(value, torch.Tensor) and value.dim() and value.numel() == fragment.range.numel:
                        facts.sliced[key] = value.dtype
                    elif not isinstance(value, torch.Tensor) or not value.dim():
                        facts.rest[key] = value  # state tensors of other shapes are not preserved
        for rank_facts in Ranks(self.state.axes.shard).gather(local_facts):
            for name, facts in rank_facts.items():
                self._facts.setdefault(name, facts)
        self._order = view.optimizer_names()

    def _put_aside(self, group: ShardGroup) -> None:
        hold = self._view.hold_of(group)
        with hold() if hold is not None else contextlib.nullcontext():
            for member in group.members:
                if id(member.param) not in self._stay:
                    continue
                with group.updated.borrowed() as values:
                    self._keep(member, _VALUE, self._whole(member, values))
                for key, dtype in self._facts.get(member.name, _Facts()).sliced.items():
                    here = torch.zeros(group.high - group.low, dtype=dtype, device=group.device)
                    for fragment in self._view.fragments_of(member):
                        here[fragment.span] = self._view.state_of(fragment)[key].reshape(-1).to(here.device)
                    self._keep(member, key, self._whole(member, here))

    def _whole(self, member: ParamRecord, part: torch.Tensor) -> torch.Tensor:
        group = member.group
        if not group.policy.owns_a_shard:
            return part[member.offset : member.offset + member.numel].view(member.shape)
        sent = part.to(torch.uint8) if part.dtype is torch.bool else part
        whole = group.assemble(member, sent.to(group.device), READ, f"removal from {member.name}")
        return whole.to(part.dtype).view(member.shape)

    def _keep(self, member: ParamRecord, key: str, whole: torch.Tensor) -> None:
        flat = self.removal.select(member.name, whole).reshape(-1)
        axis, n = self._exchange.axis, flat.numel()
        low, high = n * axis.rank // axis.size, n * (axis.rank + 1) // axis.size
        self._aside[member.name, key] = (flat[low:high].clone(), n)

    # -- removal of the old groups ------------------------------------------------------------------------------------

    def _release(self) -> None:
        components = self._components
        for group in components.groups:
            if group.policy.gathers_before_use:
                group.fetch, fetch = None, group.fetch
                if fetch is not None:
                    if not self._agreed:
                        self._agree()
                        self._agreed = True
                    fetch.withdraw(group.channel)
        if components.lifecycle is not None:
            components.lifecycle.detach()
        if components.optimizer is not None:
            self._give_parameters_back(components.optimizer)
            components.optimizer.reducer.detach()
            components.optimizer.release_inner()
            for shard in components.optimizer.shards:
                shard.drop()
            components.optimizer.optimizer.state.clear()
        if components.caster is not None:
            components.caster.remove()

    def _give_parameters_back(self, optimizer: Any) -> None:
        """Replace shards in the groups of the inner optimizer by the model's parameters, in their original groups and
        order; parameters of removed layers are left out."""
        params = {name: member.param for name, member in self._view.members.items()}
        for number, group in enumerate(optimizer.param_groups):
            group_params = (params[name] for name in self._order if self._facts[name].group == number)
            group["params"] = [param for param in group_params if id(param) in self._stay]

    def _cut(self, group: ShardGroup) -> None:
        """Cut a group's parameters to their new shapes, and shard them again if they are gathered before use."""
        shard = group.policy.gathers_before_use
        group.wait_all_gather()
        group.dissolve()
        params = [member.param for member in group.members if id(member.param) in self._stay]
        for member in group.members:
            left = id(member.param) not in self._stay  # empty, so that remaining references need no memory
            values = member.param.data.flatten()[:0] if left else self.removal.select(member.name, member.param.data)
            reshape(member.param, values.clone())
        if shard and params:
            names = {member.param: member.name for member in group.members}
            build_group(group.ranks, group.policy, params, names, GroupingPlan(), (group.dtype, None))
        group.drop()

    def _cut_plain(self) -> None:
        for name, param in self.state.module.named_parameters():
            if name in self.removal.cuts and not is_managed(param) and name not in self._view.members:
                gradient, param.grad = param.grad, None  # preserved: no optimizer step clears it
                reshape(param, self.removal.select(name, param.data).clone())
                param.grad = None if gradient is None else self.removal.select(name, gradient).clone()
        self.removal.cut_buffers(self.state.module)

    def _renamed(self) -> dict[str, str]:
        """Return the new parameter names by the old ones, without removed parameters."""
        now = {id(param): name for name, param in self.state.module.named_parameters()}
        return {old: now[ident] for ident, names in self._before.items() if ident in now for old in names}

    def _was(self, member: ParamRecord) -> str:
        """Return the name of a member before layers were removed."""
        return self._members[id(member.param)]

    # -- restoration of the state -------------------------------------------------------------------------------------

    def _bring_back(self, group: ShardGroup) -> None:
        view = self._new = self._new or self.state.view()
        hold = view.hold_of(group)
        with hold(changed=True) if hold is not None else contextlib.nullcontext():
            for member in group.members:
                facts = self._facts.get(self._was(member), _Facts())
                for fragment in view.fragments_of(member):
                    view.set_state(fragment, view.prepare_state(fragment, facts.sliced, facts.rest))
                for key in (_VALUE, *facts.sliced):
                    self._write(view, member, key)

    def _write(self, view: StateView, member: ParamRecord, key: str) -> None:
        part, n = self._aside.pop((self._was(member), key))
        size = self._exchange.axis.size
        sent = part.to(torch.uint8) if part.dtype is torch.bool else part
        cuts = [n * rank // size for rank in range(size + 1)]
        flat = self._exchange.whole(sent, cuts, f"removal from {member.name}").to(part.dtype)
        if key == _VALUE:
            for other, start, stop in view.held_ranges(member.group):
                if other is member:
                    view.value(member, start, stop).values().copy_(flat[start:stop])
            return
        for fragment in view.fragments_of(member):
            start, stop = fragment.range.start, fragment.range.stop
            view.state(fragment, key, start, stop).values().copy_(flat[start:stop])


class CompressionHooks:
    """Compression of one engine: start, actions after each step, export, and removals as in a loaded checkpoint.

    Args:
        feeding: synchronizes the ranks.
        on_new_layout: called after units were removed.
        make: creates another engine from a model and a configuration, for the teacher.
    """

    def __init__(
        self,
        state: EngineState,
        weights: WeightsIO,
        feeding: TrainLoop,
        on_new_layout: Callable[[], None],
        make: Callable[..., Any],
    ) -> None:
        self._state, self._weights, self._feeding, self._make = state, weights, feeding, make
        self._on_new_layout = on_new_layout
        self._exported = False
        state.hooks.opened.append(self.replay)

    def start(self) -> None:
        """Start compression if the JSON or `init_compression` enables it. All ranks must call this.

        Raises:
            ArgumentError: the JSON and `init_compression` differ.
            NotAvailableError: ranks have slices of the model.
        """
        top = self._state.ds_config.top
        section, called = top.compression_training, left_on(self._state.module, CALLED)
        if called is None and TEACHER in vars(self._state.module):
            log_rank0("this model was the teacher of init_compression: compression_training does not apply to it")
            return
        if called is not None and not section.active:
            section = called
        elif called is not None and called != section:
            raise ArgumentError(
                "init_compression was called with another compression_training than initialize: pass both the same"
            )
        if section.active or top.quantize_training.enabled:
            if self._state.sliced:
                raise NotAvailableError(
                    "compression_training where ranks hold slices of the model is not available yet"
                )
            self._state.compression = Compression(
                self._state.module,
                section,
                top.quantize_training,
                self._state.axes,
                self._state.components.optimizer,
            )
            self._state.hooks.applied.append(self.after_applied_step)
            self._make_teacher()
            self._let_layers_leave(self._state.compression)

    def after_applied_step(self) -> None:
        """Advance compression after an applied optimizer step. All ranks must call this."""
        if self._state.compression is not None:
            ended = self._state.compression.step()
            if ended:
                self._shrink(self._state.compression.removal(ended))
            self._let_layers_leave(self._state.compression)
            self._export_when_due()

    def _let_layers_leave(self, compression: Compression) -> None:
        removal = compression.leaving()
        if removal is not None:
            self._shrink(removal)

    def set_teacher(self, teacher: Any) -> None:
        """Set the teacher for `compression_training.distillation`.

        Args:
            teacher: module or engine; called with the student's arguments except labels, in eval mode without autograd.

        Raises:
            UsageError: distillation is not enabled.
        """
        if self._state.compression is None or self._state.compression.distiller is None:
            raise UsageError("set_teacher needs compression_training.distillation.enabled")
        self._state.compression.distiller.set_teacher(teacher)

    def _make_teacher(self) -> None:
        """Create a teacher (stage 3) from a copy of the model if `distillation.teacher` is "before". Collective."""
        distiller = None if self._state.compression is None else self._state.compression.distiller
        if distiller is None or distiller.section.teacher != "before":
            return
        micro = self._state.ds_config.train_micro_batch_size_per_gpu
        block: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        precision = {
            name: {"enabled": True} for name in ("bf16", "fp16") if getattr(self._state.ds_config, name).enabled
        }
        twin = copy.deepcopy(self._state.module)
        for module in twin.modules():
            plain_module(module)
        teacher = self._make(twin, {"train_micro_batch_size_per_gpu": micro, "zero_optimization": block, **precision})
        distiller.set_teacher(teacher, teacher.destroy)

    def export_compressed(
        self, folder: str, weights: str | None = None, group_size: int | None = None
    ) -> dict[str, Any] | None:
        """Write the compressed model to a folder that Transformers can load. All ranks must call this.

        Args:
            folder: created if missing.
            weights: `float`, `int8`, `int4` or `w8a8`; None: the value in `compression_training.export`.
            group_size: inputs that share an int4 scale; None: the value in `compression_training.export`.

        Returns:
            On rank 0 a dict with `parameters` and `bytes` (numbers), `weights` and `class`; None on other ranks.

        Raises:
            CompressionError: on rank 0; `weights` is unknown, or the model cannot be exported.
            NotAvailableError: on rank 0; packed integers need the package compressed-tensors.
            CheckpointError: rank 0 failed.
        """
        section = self._state.ds_config.top.compression_training.export
        state, report = self._weights._consolidated_16bit_state_dict(), None
        with Ranks(self._state.axes.dp_sp_group).together(f"exporting to {folder}"):
            if state is not None:
                if self._state.compression is not None:
                    self._state.compression.quantizers.bake(state)
                report = export(
                    self._state.module, state, folder, weights or section.weights, group_size or section.group_size
                )
                log_rank0(f"exported to {folder}: {report['parameters']:,} parameters, {report['bytes']:,} bytes")
        return report

    def _export_when_due(self) -> None:
        section, compression = self._state.ds_config.top.compression_training.export, self._state.compression
        if section.folder is None or compression is None or self._exported:
            return
        if compression.ended and compression.training_steps >= section.after:
            self._exported = True
            self.export_compressed(section.folder)

    def _shrink(self, removal: Removal) -> None:
        """Remove units from the running engine. All ranks must call this."""
        before = sum(shape.numel() for shape in shapes_of(self._state.module).values())
        agree = functools.partial(self._feeding.agree, 0, "all ranks are ready for a removal")
        StructuredPruning(self._state, removal, agree).run()
        self._state.removals.append(removal)
        self._on_new_layout()
        if self._state.compression is not None:
            self._state.compression.resume()
        after = sum(shape.numel() for shape in shapes_of(self._state.module).values())
        log_rank0(f"removed {removal.text} …: {before:,} parameters are now {after:,}")

    def replay(self, saved: dict[str, Any]) -> None:
        """Remove the units that a checkpoint's model no longer has. All ranks must call this.

        Args:
            saved: compression state of the checkpoint.

        Raises:
            CheckpointError: the engine has more removals, or has kept other layers.
        """
        wanted = [Removal.from_json(saved_removal) for saved_removal in saved.get("removals", ())]
        done = self._state.removals
        if len(done) > len(wanted):
            raise CheckpointError(
                f"{len(done)} removal(s) were done on this engine and the checkpoint was saved after {len(wanted)}: "
                f"make the engine anew from the dense model, with a schedule_offset of 1 or more: what leaves at 0 has "
                f"left before a checkpoint can be loaded"
            )
        for before, removal in zip(done, wanted, strict=False):
            if before.layers != removal.layers:
                raise CheckpointError(
                    f"layers {before.layers or 'none'} stay in this engine, and {removal.layers or 'none'} in the "
                    f"checkpoint: name the same ones (compression_training.layer_reduction)"
                )
        for removal in wanted[len(done) :]:
            if not have_left(self._state.module, removal.layers):
                self._shrink(removal)
                continue
            done.append(removal)  # the script has built the small model itself
            if self._state.compression is not None:
                self._state.compression.left(removal)

    def stop(self) -> None:
        """Remove all compression hooks from the model."""
        if self._state.compression is not None:
            self._state.compression.remove()
            self._state.compression = None
