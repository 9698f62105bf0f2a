"""ZeRO optimizer: runs a torch optimizer on this rank's shards of the master weights.

The optimizer that the user passed is called the inner optimizer. Its parameter groups contain leaves: one tensor per
parameter, a view of this rank's shard of the master weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import tag_of
from deepspeed.errors import OptimizerError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.optim.grad_norm import clip_factor
from deepspeed.optim.nested import groups_of, join_states, nested_optimizers
from deepspeed.optim.separability import MethodTraits, UpdateTraits
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.gradients.grad_norm import explain_overflow, global_norm, known_norm
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.optimizer.optimizer_shard import Fragment, OptimizerShard
from deepspeed.zero.optimizer.optimizer_state import adopt, follow
from deepspeed.zero.optimizer.optimizer_surface import OptimizerSurface
from deepspeed.zero.optimizer.update import StepGuard, all_gather_updated, update, waves_of
from deepspeed.zero.out_of_memory import raise_if_exhausted
from deepspeed.zero.parameters.module_hooks import DeferredAllGatherHooks, ModuleHooks
from deepspeed.zero.parameters.parameter import is_managed
from deepspeed.zero.parameters.record import ParamRecord, Pruner
from deepspeed.zero.parameters.shard_group import group_of, meet_before_change

_HOOK_TABLES = tuple(
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


@dataclass(frozen=True)
class StepSettings:
    """Settings of `ZeroOptimizer.step`.

    Args:
        clip: maximum global L2 norm of the gradients (`gradient_clipping`); 0: no clipping.
        refuse_unused: raise if no rank has a gradient for a trained parameter (`ignore_unused_parameters: false`).
        norm: compute the global gradient norm in each step (`compute_grad_norm`).
        check: skip the update if a gradient is not finite.
        master: dtype of the master weights of parameters with a narrower dtype.
    """

    clip: float = 0.0
    refuse_unused: bool = False
    norm: bool = True
    check: bool = False
    master: torch.dtype = torch.float32


class ZeroOptimizer(OptimizerSurface):
    """Sharded optimizer: one torch optimizer on this rank's shards, then an all-gather of the updated parameters.

    Args:
        inner: optimizer over the model's parameters. Its group dicts stay in use, with `params` replaced by leaves.
        reducer: reducer that provides the gradient sums.
        settings: clipping and checks.
        scaler: loss scaler; None if losses are not scaled.
        lifecycle: hooks that gather and free sharded parameters; None below stage 3.
        late: hooks that wait for the all-gather of updated parameters in the next forward; None: `step` waits for it.
        traits: allowed ways to split the inner optimizer's update; None: any split.

    Raises:
        OptimizerError: the inner optimizer, or one nested in it, has a parameter outside of the model, or one twice.
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
        self._inspect: Callable[[float | None, list[list[float]]], None] | None = None
        self.piggyback_values: list[float] = []  # numbers to all-gather in the same message as the gradient norm
        self.gathered_piggyback_values: list[list[float]] = []
        self.optional_values: list[float] = []  # likewise, but they do not cause a message by themselves
        self.gathered_optional_values: list[list[float]] = []
        self._late: DeferredAllGatherHooks | None = None
        self.attach(reducer, lifecycle, late)

    def attach(
        self, reducer: Reducer, lifecycle: ModuleHooks | None, late: DeferredAllGatherHooks | None = None
    ) -> None:
        """Connect the optimizer to a reducer: replace the parameters in its groups by leaves over this rank's shards.

        Args:
            reducer: see the class.
            lifecycle: see the class; None keeps the present hooks.
            late: see the class.

        Raises:
            OptimizerError: as for the class.
        """
        if self._late is not None:
            self._late.detach()
        self.reducer, self._late = reducer, late
        if lifecycle is not None:
            self.parameter_offload = lifecycle
        self._channel, self._rounds = reducer.axes.dp_sp_group.channel(), 0
        self._norm_channel, self._norms = reducer.axes.model_replica_group.channel(), 0
        self.window = reducer.window
        self.window.set_rates(self._rates)
        self.masks: Pruner | None = None
        self.bit16_groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.groups = [bucket.group for bucket in reducer.buckets]  # parameter groups that are sharded together
        self._gathered = [group for group in self.groups if group.policy.gathers_before_use]
        self._whole = [group for group in self.groups if not group.policy.gathers_before_use]
        foreign = not self.traits.known
        self.shards = [OptimizerShard(bucket, self.optimizer, foreign) for bucket in reducer.buckets]
        self._shard_of = {id(shard.group): shard for shard in self.shards}
        self.fragments: dict[int, list[Fragment]] = {}
        self._stepping, self._updated = False, False
        every = [self.optimizer, *nested_optimizers(self.optimizer).values()] if foreign else [self.optimizer]
        for each in every:  # some classes do not call torch's constructor
            for table in _HOOK_TABLES:
                vars(each).setdefault(table, OrderedDict())
        if foreign:
            join_states(self.optimizer)
        self._guards = [each.register_step_pre_hook(StepGuard(self._check_called_by_engine)) for each in every]
        follow(self)
        self._split_groups()
        for group in self._whole:
            group.buffer_views.track_writes()  # no other tensor shares the memory yet
        reducer.squares.buckets = [shard.bucket for shard in self.shards if shard.members]
        adopt(self)
        for shard in self.shards:
            shard.store_state()
        self._replace_methods()
        self._writes = self._leaf_writes

    def _split_groups(self) -> None:
        """Replace the model's parameters in all groups of the inner optimizer by leaves over this rank's shards."""
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
                    self.optimizer.state[fragment.leaf] = fragment.cut_state(state)
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
        """Return a public method of the inner optimizer's class, such as `eval` of schedule-free optimizers."""
        inner = self.__dict__.get("optimizer")
        if inner is not None and not name.startswith("_") and callable(getattr(type(inner), name, None)):
            return getattr(inner, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def _replace_methods(self) -> None:
        """Wrap methods of the inner optimizer, other than `step`, that write to parameters (`eval` of schedule-free).

        They write to leaves, that is, to this rank's master weights; the wrapper then all-gathers the new values.
        """
        self._replaced: dict[str, Any] = {}
        for name, traits in self.traits.methods.items():
            if name not in vars(self.optimizer):  # a method that the user has replaced is kept
                self._replaced[name] = vars(self.optimizer)[name] = self._wrapped_method(name, traits)

    def _wrapped_method(self, name: str, traits: MethodTraits) -> Callable[..., Any]:
        optimizer, own = self.optimizer, getattr(type(self.optimizer), name)

        @functools.wraps(own)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self.run_method(lambda: own(optimizer, *args, **kwargs), traits)

        return method

    def run_method(self, call: Callable[[], Any], traits: MethodTraits) -> Any:
        """Call a method of the inner optimizer that writes parameters or state. All ranks must call this.

        Args:
            call: the method, with its arguments bound.
            traits: effects of the method; one that uses gradients runs as a complete `step`.

        Returns:
            Result of the call; None if the update was skipped.

        Raises:
            OptimizerError: the method uses gradients, and losses are scaled.
        """
        if self._stepping:  # called by the optimizer itself
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
                all_gather_updated(self.groups)
        finally:
            self._stepping = False
        self._show_new_values()
        self._count_update([member for shard in self.shards for member in shard.members])
        return result

    def shard_of(self, member: ParamRecord) -> OptimizerShard:
        return self._shard_of[id(member.group)]

    def activate(self, member: ParamRecord) -> None:
        """Allocate master weights and gradient accumulator of an unfrozen parameter, and set the data of its leaf."""
        member.group.thaw(self.settings.master)
        self.shard_of(member).point()
        self.reducer.listen(member)

    def _rates(self) -> list[float]:
        """Return this rank's hyperparameters; ranks compare them, since all shards need the same update rule."""
        rates = []
        for key, value in (entry for group in self.optimizer.param_groups for entry in group.items()):
            for number in value if isinstance(value, (tuple, list)) and key != "params" else (value,):
                if isinstance(number, torch.Tensor) and number.device.type == "cpu" and number.numel() == 1:
                    number = number.item()
                if isinstance(number, (int, float)):  # NaN is replaced, since it does not compare equal to itself
                    rates.append(-(2.0**-40) if number != number else float(number))
        return rates

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one update. All ranks must call this.

        In this order: comparison of the state over ranks, gradient norm, check for non-finite gradients, clipping,
        update of the shards, all-gather of the parameters. If the check finds a non-finite gradient, the update is
        skipped and `overflow` is True.

        Args:
            closure: called first, as in torch optimizers.

        Returns:
            Result of the closure; None without one.

        Raises:
            UsageError: ranks have made different calls, a leaf was written to, a required gradient is missing, or the
                optimizer computes gradients within its step.
            OptimizerError: the inner optimizer's groups have gained or lost parameters.
            LossScaleError: gradients overflowed at the minimum loss scale.
            MemoryExhaustedError: the optimizer state or the update does not fit in memory.
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
        """Run one update with `call` (None: the inner optimizer's `step`); see `step`."""
        if self.lifecycle is not None:
            self.lifecycle.settle()
        self.window.leaf_writes = self._leaf_writes - self._writes
        self.reducer.replaced.settle()
        agreed = self.reducer.finish(self.window.update)
        self._refuse_leaf_writes()
        if self.masks is not None:
            self.masks.on_gradients()
        if self.settings.refuse_unused:
            members = [(shard.bucket, member) for shard in self.shards for member in shard.members]
            trained = [(bucket, member) for bucket, member in members if member.param.requires_grad]
            unused = [member.name for bucket, member in trained if not self.reducer.touched(bucket, member)]
            if unused:
                self._end_window()
                raise UsageError(
                    f"no rank had a gradient for {', '.join(unused[:8])}{' …' if len(unused) > 8 else ''}, and "
                    f"zero_optimization.ignore_unused_parameters is false; freeze them or drop the key"
                )
        rescale = self.window.rescale(agreed)
        wanted = self.settings.norm or self.settings.check or self.settings.clip > 0
        # A norm from before pruning masks is not valid, and piggyback values need the exchange in any case.
        total = None if self.masks is not None or self.piggyback_values else known_norm(self.reducer, agreed)
        if total is None and (wanted or self.piggyback_values):
            self._norms += 1
            tag = tag_of(self._norm_channel, SMALL, self._norms)
            buckets = self.reducer.squares.buckets if wanted else []
            count, along = len(self.piggyback_values), [*self.piggyback_values, *self.optional_values]
            reads = self.settings.check or self._inspect is not None  # the update depends on the value of the norm
            total, gathered = global_norm(buckets, self.settings.clip > 0, self.reducer, tag, along, reads)
            self.gathered_piggyback_values = [row[:count] for row in gathered]
            self.gathered_optional_values = [row[count:] for row in gathered if self.optional_values]
        norm = total * abs(rescale) if wanted and total is not None else None
        if self.scaler is not None and norm is not None and math.isnan(norm):
            norm = math.inf  # with a loss scale, NaN results from an overflow: inf - inf
        self._global_grad_norm = norm
        if self._inspect is not None:
            self._inspect(self._global_grad_norm, self.gathered_piggyback_values)
        self.overflow = self.settings.check and norm is not None and not math.isfinite(norm)
        self.skip_reason = explain_overflow(self.reducer, (self._tag(), self._tag())) if self.overflow else None
        if not self.overflow:
            self._apply(rescale * (clip_factor(norm, self.settings.clip) if norm is not None else 1.0), call)
        self._end_window()
        if self.scaler is not None:
            self.scaler.update(self.overflow)

    def inspect_norm(self, inspect: Callable[[float | None, list[list[float]]], None]) -> None:
        """Set a callback that each step calls between the gradient norm and the update.

        Args:
            inspect: called with the norm (None: not computed) and the `piggyback_values` of each rank.
        """
        self._inspect = inspect

    def set_masks(self, masks: Pruner) -> None:
        """Apply pruning masks to gradients and master weights in each update, until the next `attach`."""
        self.masks = masks

    @property
    def _leaf_writes(self) -> int:
        return sum(shard.writes for shard in self.shards)

    def _refuse_leaf_writes(self) -> None:
        """Raise UsageError for writes to leaves outside of `step`; on all ranks, since they have compared the count."""
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
        """Return the hooks that gather and free sharded parameters; None below stage 3."""
        return getattr(self, "parameter_offload", None)

    def _tag(self) -> int:
        self._rounds += 1
        return tag_of(self._channel, SMALL, self._rounds)

    def _check_called_by_engine(self) -> None:
        """Raise UsageError if the user calls the inner optimizer's `step` directly."""
        if not self._stepping:
            raise UsageError(
                "step() of the optimizer passed to initialize would find no gradients; call engine.step(), or step() "
                "of the optimizer that initialize returned"
            )

    def _make_room_for_state(self) -> None:
        """Empty the allocator's cache before the optimizer state is allocated in the first update.

        The state is long-lived, and in freed blocks of the first backward it would fragment the memory.
        """
        kinds = {shard.group.device.type for shard in self.shards if shard.group.tiers.optimizer is RESIDENT}
        if not self.optimizer.state and not kinds <= {"cpu", "meta"}:
            get_accelerator().empty_cache()

    def _warn_of_hooks(self) -> None:
        """Warn once if the user has set a step pre-hook, since it sees only this rank's gradient shards."""
        hooks = [hook for hook in self.optimizer._optimizer_step_pre_hooks.values() if not isinstance(hook, StepGuard)]
        if hooks and any(group.policy.owns_a_shard and group.axis.size > 1 for group in self.groups):
            warn_once(
                f"a pre-step hook of {type(self.optimizer).__name__} sees the gradients of this rank's shards alone: a "
                f"norm over them is not the global one; set gradient_clipping, or read engine.get_global_grad_norm()",
                key=id(self.optimizer),
            )

    def _take_over_edits(self) -> None:
        """Copy in-place changes that the user made to unsharded model parameters into the master weights."""
        for group in self._whole:
            group.wait()
        changed = [member for group in self._whole for member in group.edited_members()]
        for member in changed:
            member.warn_if_copied()
            member.copy_foreign_values()  # read all before writing any, since two may have been exchanged
        for member in changed:
            self.import_edits(member)

    def _apply(self, factor: float | torch.Tensor, call: Callable[[], Any] | None) -> None:
        """Update the shards with gradients times `factor`, and all-gather the parameters; see `update.update`."""
        self._take_over_edits()
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._leaves:
            raise OptimizerError(
                "parameters were added to, or taken from, the optimizer's groups after initialize, which shares out "
                "gradients and state by them; pass all groups to initialize, and freeze with requires_grad"
            )
        state = adopt(self)
        if not self._updated:
            self._make_room_for_state()
            self._warn_of_hooks()
        self._updated = True
        self._stepping = True
        try:
            late = self._late is not None and self._late.allowed  # on this rank; the order is the same on all ranks
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
            self._count_update(wave.members)
            state.note_updated(wave.members)

    @staticmethod
    def _count_update(members: Sequence[ParamRecord]) -> None:
        """Increment version counters, so that the backward of an earlier forward raises, as in torch."""
        increment_version([member.param for member in members])
        for member in members:
            member.version += 1

    def _show_new_values(self) -> None:
        """Make later all-gathers use the new shards, and share step counters over the ranks."""
        self._writes = self._leaf_writes
        self.share_counters()
        for group in self._gathered:
            group.advance()
        for group in self._gathered:
            group.refresh()

    def share_counters(self) -> None:
        """Share step counters and the names of state entries with ranks that update no parameter of a group.

        Collective: all ranks must call this. Does nothing if `traits` show that no rank needs the counters of others.
        """
        if self.traits.counts_alone and self.traits.by_parameter:
            return
        groups, state = groups_of(self.optimizer), adopt(self)
        own = [
            {key: value for key, value in group.items() if key != "params"} if group["params"] else None
            for group in groups
        ]
        everyone = all_gather_objects(self.reducer.axes.dp_sp_group, (own, state.outline()))
        state.of_others = next((outline for _, outline in everyone if outline), {})
        for number, group in enumerate(groups):  # counters are those of the first rank that updates its parameters
            values = next((counters[number] for counters, _ in everyone if counters[number] is not None), {})
            group.update({key: value for key, value in values.items() if not isinstance(value, torch.Tensor)})
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    group[key] = value.to(group[key].device) if isinstance(group.get(key), torch.Tensor) else value

    def import_edits(self, member: ParamRecord) -> None:
        """Copy the user's in-place changes of a parameter since the last step into its master weights.

        Does nothing for sharded parameters (stage 3), which can only be changed inside of `GatheredParameters`.
        """
        if member.group.policy.gathers_before_use:
            return
        group = group_of(member)
        if member.param.data_ptr() != group.views[member.index].data_ptr() and group.buffer_views.outlived():
            group.move_out()
            group.buffer_views.track_writes()
            self.shard_of(member).point()
        member.warn_if_copied()
        member.restore_view()
        if member.exposed or member.param._version != member.version:
            # Values are compared as long as a `.data` tensor may exist, since writes to it change no version counter.
            member.version, member.exposed = (
                member.param._version,
                group.master is not None and group.buffer_views.track_writes(),
            )
            group.import_edits(member)

    def _end_window(self) -> None:
        self.reducer.clear()
        self.window.restart()

    # -- methods for users ----------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard all gradients since the last update. All ranks must call this.

        Args:
            set_to_none: accepted without effect: `grad` is None afterwards.
        """
        self.reducer.drop()

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any:
        """Call `engine.backward`, and return its result.

        Args:
            loss: scalar loss, not multiplied by the loss scale.
            retain_graph: as in `torch.Tensor.backward`.

        Raises:
            UsageError: the optimizer does not belong to an engine.
        """
        return self._attached().backward(loss, retain_graph=retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer state.

        Returns:
            Dict with `optimizer` (`state_dict` of the inner optimizer, whose tensors are this rank's shards) and
            `loss_scaler` (None without one); see `RankState`.
        """
        scaler = None if self.scaler is None else self.scaler.state_dict()
        with contextlib.ExitStack() as stack:
            for shard in self.shards:
                stack.enter_context(shard.at_hand())
            state = self.optimizer.state_dict()
            if any(shard.moves for shard in self.shards):
                state = copy.deepcopy(state)  # the tensors are valid only within the context
        return self._rank_state(optimizer=state, loss_scaler=scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a result of `state_dict`.

        Args:
            state: state of the same rank, saved with the same number of ranks and the same sharding.
        """
        self.optimizer.load_state_dict(state["optimizer"])
        adopt(self)
        for shard in self.shards:
            shard.store_state()
        if self.scaler is not None and state.get("loss_scaler") is not None:
            self.scaler.load_state_dict(state["loss_scaler"])

    def empty_partition_cache(self) -> None:
        """Free the memory of gathered parameters that are not in use (stage 3)."""
        if self.lifecycle is not None:
            self.lifecycle.prefetcher.free_idle()

    def release_inner(self) -> None:
        """Restore the inner optimizer's methods and remove its hooks."""
        for name, replaced in self._replaced.items():
            if vars(self.optimizer).get(name) is replaced:
                del vars(self.optimizer)[name]
        self._replaced.clear()
        for guard in self._guards:
            guard.remove()

    def destroy(self) -> None:
        """Remove all hooks, and drop the optimizer state and the references to parameter groups."""
        self.reducer.detach()
        if self._late is not None:
            self._late.detach()
        self.window.set_rates(list)
        self.release_inner()
        for shard in self.shards:
            shard.drop()
        self.shards, self.fragments, self._shard_of, self.bit16_groups = [], {}, {}, []
        self.groups, self._gathered, self._whole, self.reducer.squares.buckets = [], [], [], []
        self.optimizer.state.clear()
        self.engine = None
