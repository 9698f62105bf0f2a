"""The ZeRO optimizer: runs any torch optimizer on this rank's shards."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Parameter

from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis, tag_of
from deepspeed.errors import OptimizerError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.optim.grad_norm import clip_factor
from deepspeed.optim.nested import groups_of, join_states, nested_optimizers
from deepspeed.optim.separability import MethodTraits, UpdateTraits
from deepspeed.zero.gradients.grad_norm import explain_overflow, global_norm, known_norm
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.optimizer.optimizer_shard import (
    Fragment,
    OptimizerShard,
    count_update,
    cut_state,
    make_room_for_state,
    whole_state,
)
from deepspeed.zero.optimizer.optimizer_state import OptimizerState, adopt, follow
from deepspeed.zero.optimizer.program_attributes import ProgramAttributes
from deepspeed.zero.optimizer.published_methods import PublishedMethods
from deepspeed.zero.optimizer.update import StepGuard, publish, update, waves_of
from deepspeed.zero.out_of_memory import raise_if_exhausted
from deepspeed.zero.parameters.deferred_all_gather_hooks import DeferredAllGatherHooks
from deepspeed.zero.parameters.module_hooks import ModuleHooks
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord, Pruner
from deepspeed.zero.parameters.shard_group import edited, group_of, meet_before_change

if TYPE_CHECKING:
    from deepspeed.zero.parameters.shard_group import ShardGroup


class TrainingEngine(Protocol):
    """The engine of an optimizer: what clients ask an optimizer for, and it does."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any:
        """Run `loss` backward."""
        ...

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None:
        """Move what `include` names, all of it for None."""
        ...

    def reload_states(self, non_blocking: bool) -> None:
        """Bring it back."""
        ...

    def full_hp_param(self, param: Parameter, optim_state_key: str | None) -> torch.Tensor | None:
        """The master of a parameter, or a tensor of its optimizer state."""
        ...


class OptimizerSurface(ProgramAttributes):
    """What an optimizer over slices can be asked."""

    optimizer: torch.optim.Optimizer  # over the leaves
    fragments: dict[int, list[Fragment]]
    groups: Sequence[ShardGroup]
    bit16_groups: list[list[Parameter]]  # the model's parameters that each group of the optimizer updates
    traits: UpdateTraits  # of the optimizer
    engine: TrainingEngine | None = None  # that it is attached to

    @property
    def state(self) -> OptimizerState:
        """The inner optimizer's state; see [Note: state by parameter]."""
        return adopt(self)

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value
        adopt(self)

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """See `bit16_groups`."""
        return self.bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's slice of each flat group that is updated: 1-D, in the dtype of the master.

        What rests in memory is given as it lies there, what rests on a disk as a copy. A write is found by nobody:
        `safe_set_full_fp32_param` sets masters.
        """
        return [_whole(group) for group in self.groups if group.under_leaves is not None]

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move training state from the device to host memory, as `engine.offload_states` does.

        Args:
            include: kinds of state; None: all of them.
            device: "cpu".
            pin_memory: into page-locked memory.
            non_blocking: accepted; see the engine's.
        """
        self._attached().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved, as `engine.reload_states` does.

        Args:
            non_blocking: do not wait until the copies are over.
        """
        self._attached().reload_states(non_blocking)

    def get_full_hp_param(self, param: Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The master of a parameter, or a tensor of its optimizer state. All ranks call together.

        Args:
            param: of the engine's model.
            optim_state_key: None: the master; or `exp_avg`, `momentum_buffer`, …

        Returns:
            float32, of the global shape; None for a parameter that is not updated, and before the first step for state.
        """
        return self._attached().full_hp_param(param, optim_state_key)

    def _attached(self) -> TrainingEngine:
        if self.engine is None:
            raise UsageError("this optimizer is not attached to an engine")
        return self.engine

    def _rank_state(self, **state: Any) -> RankState:
        rank_state = RankState(state)
        rank_state.of = weakref.ref(self)
        return rank_state


class RankState(dict[str, Any]):
    """A rank's optimizer state, in which clients also look for its masters.

    `state["fp32_flat_groups"]` and `state["single_partition_of_fp32_groups"]` give the masters of this moment. They are
    among no keys and neither saved nor copied with it: the engine's checkpoint has them.

    Attributes:
        of: the optimizer that has the masters; a state that somebody keeps does not keep it.
    """

    of: Callable[[], OptimizerSurface | None] = staticmethod(lambda: None)

    def __missing__(self, key: str) -> list[torch.Tensor]:
        optimizer = self.of()
        if optimizer is not None and key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            return optimizer.single_partition_of_fp32_groups
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _whole(group: ShardGroup) -> torch.Tensor:
    stored = group.updated
    if stored.memory is not None:
        return stored.memory.detach()
    with stored.borrowed() as lent:
        return lent.detach().clone()


def share_counters(optimizer: torch.optim.Optimizer, axis: Axis, state: OptimizerState) -> None:
    """Counters that a step leaves in a group come from the first rank that updates parameters of it. All ranks call.

    Some optimizers count only where a group has parameters, and a rank may own none of it.

    Args:
        optimizer: the inner one.
        axis: the ranks that share out its parameters.
        state: of the optimizer; a rank that has no parameter learns from the others what it holds.
    """
    own = [
        {key: value for key, value in group.items() if key != "params"} if group["params"] else None
        for group in groups_of(optimizer)
    ]
    told = all_gather_objects(axis, (own, state.outline()))
    by_rank = [groups for groups, _ in told]
    state.of_others = next((outline for _, outline in told if outline), {})
    for number, group in enumerate(groups_of(optimizer)):
        values = next((groups[number] for groups in by_rank if groups[number] is not None), {})
        group.update({key: value for key, value in values.items() if not isinstance(value, torch.Tensor)})
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                group[key] = value.to(group[key].device) if isinstance(group.get(key), torch.Tensor) else value


def numbers_of(group: dict[str, Any]) -> Iterator[float]:
    """The numbers in a group of an optimizer; NaN, which is no number, as one that nobody sets."""
    for key, value in group.items():
        for each in value if isinstance(value, (tuple, list)) and key != "params" else (value,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.numel() == 1:
                each = each.item()
            if isinstance(each, (int, float)):
                yield -(2.0**-40) if each != each else float(each)


_HOOK_TABLES = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


@dataclass(frozen=True)
class StepSettings:
    """What happens between gradients and update.

    Args:
        clip: largest global norm (`gradient_clipping`), 0 for none.
        refuse_unused: a parameter without a gradient is an error (`ignore_unused_parameters: false`).
        norm: whether the norm is formed at all (`compute_grad_norm`).
        check: skip the step when a gradient is not finite.
        master: dtype of master copies, where they are wider than the parameters.
    """

    clip: float = 0.0
    refuse_unused: bool = False
    norm: bool = True
    check: bool = False
    master: torch.dtype = torch.float32


class ZeroOptimizer(OptimizerSurface):
    """A torch optimizer over the slices of this rank.

    Args:
        inner: the client's or the JSON's optimizer; its group dicts are kept, their `params` replaced.
        reducer: where gradients come from.
        settings: clipping and checks.
        scaler: loss scaler; None when losses are not scaled.
        lifecycle: gathers and frees sharded groups; None when all parameters stay whole.
        late: lets new values arrive after a step; None: they are there when it returns.
        traits: how the inner optimizer's update may be split; None: in every way.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        reducer: Reducer,
        settings: StepSettings,
        scaler: Any = None,
        lifecycle: ModuleHooks | None = None,
        late: DeferredAllGatherHooks | None = None,
        traits: UpdateTraits | None = None,
    ) -> None:
        self.optimizer, self.settings, self.scaler = inner, settings, scaler
        self.traits = UpdateTraits(known=True) if traits is None else traits
        self.overflow = False
        self.skip_reason: str | None = None
        self._global_grad_norm: float | None = None
        self.inspect: Callable[[float | None, list[list[float]]], None] | None = None  # between norm and update
        self.piggyback_values: list[float] = []  # numbers that ride on the step's exchange, and everybody's
        self.gathered_piggyback_values: list[list[float]] = []
        self._late: DeferredAllGatherHooks | None = None
        self.attach(reducer, lifecycle, late)

    def attach(
        self, reducer: Reducer, lifecycle: ModuleHooks | None, late: DeferredAllGatherHooks | None = None
    ) -> None:
        """Take the parameters in the inner optimizer's groups over, from these groups of slices.

        Args:
            reducer: where gradients come from.
            lifecycle: gathers and frees sharded groups; None when all parameters stay whole.
            late: lets new values arrive after a step.
        """
        if self._late is not None:
            self._late.detach()
        self.reducer, self._late = reducer, late
        if lifecycle is not None:
            self.parameter_offload = lifecycle
        self._channel, self._rounds = reducer.axes.dp_sp_group.channel(), 0
        self._norm_channel, self._norms = reducer.axes.model_replica_group.channel(), 0
        self.window = reducer.window
        self.window.rates = self._rates
        self.masks: Pruner | None = None
        self.bit16_groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.groups = [bucket.group for bucket in reducer.buckets]  # those under this optimizer
        self._gathered = [group for group in self.groups if group.policy.gathers_before_use]
        self._whole = [group for group in self.groups if not group.policy.gathers_before_use]
        foreign = not self.traits.known
        self.shards = [OptimizerShard(bucket, self.optimizer, foreign) for bucket in reducer.buckets]
        self._shard_of = {id(shard.group): shard for shard in self.shards}
        self.fragments: dict[int, list[Fragment]] = {}
        self._stepping, self._updated = False, False
        every = [self.optimizer, *nested_optimizers(self.optimizer).values()] if foreign else [self.optimizer]
        for each in every:  # some classes leave torch's constructor out
            for table in _HOOK_TABLES:
                vars(each).setdefault(table, OrderedDict())
        if foreign:
            join_states(self.optimizer)
        self._guards = [each.register_step_pre_hook(StepGuard(self._check_called_by_engine)) for each in every]
        follow(self)
        self._split_groups()
        for group in self._whole:
            group.aliases.track_writes()  # nobody else has anything over the memory yet
        reducer.squares.buckets = [shard.bucket for shard in self.shards if shard.members]
        adopt(self)
        for shard in self.shards:
            shard.store_state()
        self._methods = PublishedMethods(self.optimizer, self.traits, self)
        self._writes = self._leaf_writes

    def _split_groups(self) -> None:
        """Put leaves over this rank's parts in the place of the model's parameters, in all groups of the optimizer."""
        leaves_of: dict[int, list[Parameter]] = {}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not is_managed(param):
                    raise OptimizerError("the optimizer holds a parameter that is not in the model and was not managed")
                if id(param) in leaves_of:
                    raise OptimizerError(f"parameter '{param._ds_member.name}' appears in several optimizer groups")
                state = self.optimizer.state.pop(param, None)
                member = param._ds_member
                fragments = self.fragments[member.uid] = self.shard_of(member).add(member)
                member.owner = self
                leaves_of[id(param)] = [fragment.leaf for fragment in fragments]
                for fragment in fragments if state else ():
                    self.optimizer.state[fragment.leaf] = cut_state(state, fragment)
        every = self.optimizer.param_groups if self.traits.known else groups_of(self.optimizer)
        for param in (param for group in every for param in group["params"]):
            if id(param) not in leaves_of and param.requires_grad:
                raise OptimizerError(
                    f"{type(self.optimizer).__name__} holds an optimizer "
                    f"({', '.join(nested_optimizers(self.optimizer))}) with a parameter of shape {tuple(param.shape)} "
                    f"that is in none of its own param_groups, so it would not be trained: list it there too"
                )
        for group in every:
            group["params"] = [leaf for param in group["params"] for leaf in leaves_of.get(id(param), ())]
        self._leaves = sum(len(group["params"]) for group in self.optimizer.param_groups)

    # -- the inner optimizer --------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Public methods that the inner optimizer has besides torch's, as `eval` and `train` of schedule-free ones."""
        inner = self.__dict__.get("optimizer")
        if inner is not None and not name.startswith("_") and callable(getattr(type(inner), name, None)):
            return getattr(inner, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def run_method(self, call: Callable[[], Any], traits: MethodTraits) -> Any:
        """Call a method of the inner optimizer that writes parameters or state. All ranks call together.

        Args:
            call: the method, bound.
            traits: one that reads gradients is run as `step` is: at the end of a window, with clipping.

        Returns:
            What it returned.
        """
        if self._stepping:  # by the optimizer itself
            return call()
        if traits.reads_gradients:
            if self.scaler is not None:
                raise OptimizerError(
                    f"{type(self.optimizer).__name__} updates parameters in several steps, one of which a loss scale "
                    f"may skip: train it in bf16 or fp32"
                )
            returned: list[Any] = []
            self._step(lambda: returned.append(call()))
            return returned[0] if returned else None
        meet_before_change(self.groups)
        self._take_over_edits()
        self._stepping = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(adopt(self).by_leaf())
                for shard in self.shards:
                    stack.enter_context(shard.at_hand(changed=True))
                result = call()
                for shard in self.shards:
                    shard.adopt_replaced()
                publish(self.groups)
        finally:
            self._stepping = False
        self._show_new_values()
        count_update([member for shard in self.shards for member in shard.members])
        return result

    def shard_of(self, member: ParamRecord) -> OptimizerShard:
        """The leaves and the state of a member's group."""
        return self._shard_of[id(member.group)]

    def activate(self, member: ParamRecord) -> None:
        """A frozen parameter was unfrozen: listen to its gradients, update its master copy from now on."""
        member.group.thaw(self.settings.master)
        self.shard_of(member).point()
        self.reducer.listen(member)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: the very dicts the client made."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """Factor on the loss (1 when losses are not scaled)."""
        return self.window.loss_scale

    cur_scale = loss_scale

    @property
    def clip_grad(self) -> float:
        """The clipping limit, 0 for none."""
        return self.settings.clip

    def _rates(self) -> list[float]:
        """Hyperparameters as this rank has them: one that a rank sets alone would update its slices by another rule."""
        return [number for group in self.optimizer.param_groups for number in numbers_of(group)]

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update: agree, norm, check, clip, update, publish.

        Args:
            closure: evaluated first, as torch optimizers do.

        Returns:
            What the closure returned.
        """
        if self.traits.how.closure:
            steps = ", ".join(f"engine.optimizer.{name}()" for name in self.traits.methods)
            raise UsageError(
                f"{type(self.optimizer).__name__}.step() computes gradients anew inside of the step, which an engine "
                f"cannot do: call {steps} instead of engine.step(), each after a backward pass of its own"
            )
        loss = closure() if closure is not None else None
        self._step(None)
        return loss

    def _step(self, call: Callable[[], Any] | None) -> None:
        if self.lifecycle is not None:
            self.lifecycle.settle()
        self.window.leaf_writes = self._leaf_writes - self._writes
        self.reducer.replaced.settle()
        agreed = self.reducer.finish(self.window.update)
        self._refuse_leaf_writes()
        if self.masks is not None:
            self.masks.on_gradients()
        if self.settings.refuse_unused:
            unused = self._unused_names()
            if unused:
                self._end_window()
                raise UsageError(
                    f"no rank had a gradient for {', '.join(unused[:8])}{' …' if len(unused) > 8 else ''}, and "
                    f"zero_optimization.ignore_unused_parameters is false; freeze them or drop the key"
                )
        rescale = self.window.rescale(agreed)
        wanted = self.settings.norm or self.settings.check or self.settings.clip > 0
        # What pruning has masked since is not what was read, and numbers that ride along ask for the exchange.
        total = None if self.masks is not None or self.piggyback_values else known_norm(self.reducer, agreed)
        if total is None and (wanted or self.piggyback_values):
            self._norms += 1
            tag = tag_of(self._norm_channel, SMALL, self._norms)
            buckets = self.reducer.squares.buckets if wanted else []
            total, self.gathered_piggyback_values = global_norm(
                buckets, self.settings.clip > 0, self.reducer, tag, self.piggyback_values
            )
        norm = total * abs(rescale) if wanted and total is not None else None
        if self.scaler is not None and norm is not None and math.isnan(norm):
            norm = math.inf  # under a loss scale what is not finite is too large; inf - inf on the way makes it NaN
        self._global_grad_norm = norm
        if self.inspect is not None:
            self.inspect(norm, self.gathered_piggyback_values)
        self.overflow = self.settings.check and norm is not None and not math.isfinite(norm)
        self.skip_reason = explain_overflow(self.reducer, (self._tag(), self._tag())) if self.overflow else None
        if not self.overflow:
            self._apply(rescale * (clip_factor(norm, self.settings.clip) if norm is not None else 1.0), call)
        self._end_window()
        if self.scaler is not None:
            self.scaler.update(self.overflow)

    @property
    def _leaf_writes(self) -> int:
        return sum(shard.writes for shard in self.shards)

    def _refuse_leaf_writes(self) -> None:
        """The same on all ranks: they have compared the number."""
        if self.window.leaf_writes:
            self._writes, self.window.leaf_writes = self._leaf_writes, 0
            self._end_window()
            raise UsageError(
                "parameters in the groups of the optimizer were written to outside of step(): they are this rank's "
                "masters, and the model has computed with other values since; change the model's parameters instead, "
                "or use deepspeed.utils.safe_set_full_fp32_param"
            )

    @property
    def lifecycle(self) -> ModuleHooks | None:
        """Gathers and frees sharded groups, when there are any."""
        return getattr(self, "parameter_offload", None)

    def _unused_names(self) -> list[str]:
        """Trainable parameters that no rank had a gradient for; valid after `finish`."""
        return [
            member.name
            for shard in self.shards
            for member in shard.members
            if member.param.requires_grad and not self.reducer.touched(shard.bucket, member)
        ]

    def _tag(self) -> int:
        self._rounds += 1
        return tag_of(self._channel, SMALL, self._rounds)

    def _check_called_by_engine(self) -> None:
        """Before each step of the inner optimizer: it must come from here, over the fragments made at the start."""
        if not self._stepping:
            raise UsageError(
                "step() of the optimizer passed to initialize would find no gradients; call engine.step(), or step() "
                "of the optimizer that initialize returned"
            )

    def _warn_of_hooks(self) -> None:
        """A user's hook before the inner step sees the gradient shards of this rank."""
        hooks = [hook for hook in self.optimizer._optimizer_step_pre_hooks.values() if not isinstance(hook, StepGuard)]
        if hooks and any(group.policy.owns_a_slice and group.axis.size > 1 for group in self.groups):
            warn_once(
                f"a pre-step hook of {type(self.optimizer).__name__} sees the gradients of this rank's shards alone: a "
                f"norm over them is not the global one; set gradient_clipping, or read engine.get_global_grad_norm()",
                key=id(self.optimizer),
            )

    def _take_over_edits(self) -> None:
        """What the user has changed in the model's parameters becomes the masters'."""
        for group in self._whole:
            group.wait()
        changed = [member for group in self._whole for member in edited(group)]
        for member in changed:
            member.tell_holder()
            member.step_aside()  # read all before any is written: two may have been exchanged
        for member in changed:
            self.import_edits(member)

    def _apply(self, factor: float, call: Callable[[], Any] | None) -> None:
        self._take_over_edits()
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._leaves:
            raise OptimizerError(
                "parameters were added to, or taken from, the optimizer's groups after initialize, which shares out "
                "gradients and state by them; pass all groups to initialize, and freeze with requires_grad"
            )
        state = adopt(self)
        if not self._updated:
            make_room_for_state(self.optimizer, self.shards)
            self._warn_of_hooks()
        self._updated = True
        self._stepping = True
        try:
            late = self._late is not None and self._late.allowed  # here; the order is that of all ranks
            at_once = not self.traits.in_parts
            waves = waves_of(self.shards, self.reducer, self.optimizer, self._late is not None, at_once)
            updated = None if self.masks is None else self.masks.on_update
            with state.by_leaf():
                handles = update(self.optimizer, waves, factor, updated, late, call)
        except (RuntimeError, MemoryError, OSError) as error:
            raise_if_exhausted("parameters were updated", error)
            raise
        finally:
            self._stepping = False
        for handle in handles:
            handle.wait()
        self._show_new_values()
        for wave in waves:
            count_update(wave.members)
            state.note_updated(wave.members)

    def _show_new_values(self) -> None:
        """Ranks that ask for the new slices get them; counters of groups without parameters follow the others."""
        self._writes = self._leaf_writes
        self.share_counters()
        for group in self._gathered:
            group.advance()
        for group in self._gathered:
            group.refresh()

    def share_counters(self) -> None:
        """Have ranks without parameters of a group know what others count and hold, where that differs."""
        if not self.traits.counts_alone or not self.traits.by_parameter:
            share_counters(self.optimizer, self.reducer.axes.dp_sp_group, adopt(self))

    def import_edits(self, member: ParamRecord) -> None:
        """A parameter changed in place by the user since the last step (weight clipping) updates its master."""
        if member.group.policy.gathers_before_use:
            return
        group = group_of(member)
        if member.param.data_ptr() != group.views[member.index].data_ptr() and group.aliases.outlived():
            group.move_out()
            group.aliases.track_writes()
            self.shard_of(member).point()
        member.tell_holder()
        member.rejoin()
        if member.exposed or member.param._version != member.version:
            # A master follows what is written past the version, for as long as somebody may hold a `.data`.
            member.version, member.exposed = (
                member.param._version,
                group.master is not None and group.aliases.track_writes(),
            )
            group.import_edits(member)

    def _end_window(self) -> None:
        self.reducer.clear()
        self.window.restart()

    # -- what clients call ----------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw the gradients of the window away. All ranks call together."""
        self.reducer.drop()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any:
        """Run `loss` backward through the engine."""
        return self._attached().backward(loss, retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the inner optimizer's over its fragments, the loss scaler's; see `RankState`."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return self._rank_state(optimizer=whole_state(self.optimizer, self.shards), loss_scaler=scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, on the same rank and topology."""
        self.optimizer.load_state_dict(state["optimizer"])
        adopt(self)
        for shard in self.shards:
            shard.store_state()
        if self.scaler is not None and state.get("loss_scaler") is not None:
            self.scaler.load_state_dict(state["loss_scaler"])

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are not in use."""
        if self.lifecycle is not None:
            self.lifecycle.keeper.free_idle()

    def release_inner(self) -> None:
        """Give the inner optimizer its own methods back, and take the hooks off."""
        self._methods.remove()
        for guard in self._guards:
            guard.remove()

    def destroy(self) -> None:
        """Stop listening to gradients and let the state go."""
        self.reducer.detach()
        if self._late is not None:
            self._late.detach()
        self.window.rates = list
        self.release_inner()
        for shard in self.shards:
            shard.drop()
        self.shards, self.fragments, self._shard_of, self.bit16_groups = [], {}, {}, []
        self.groups, self._gathered, self._whole, self.reducer.squares.buckets = [], [], [], []
        self.optimizer.state.clear()
        self.engine = None
