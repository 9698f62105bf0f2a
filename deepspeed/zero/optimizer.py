"""The optimizer users hold: any torch optimizer, run on this rank's fragments of the parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed.comm.collectives import SMALL, tag_of
from deepspeed.errors import OptimizerError, UsageError
from deepspeed.optim.clip import clip_factor
from deepspeed.zero.exhaustion import suggests_offload
from deepspeed.zero.fragment import Fragment, count_update, cut_state
from deepspeed.zero.late_publish import LatePublish
from deepspeed.zero.lifecycle import Lifecycle
from deepspeed.zero.member import Member
from deepspeed.zero.norm import explain_overflow, global_norm, known_norm
from deepspeed.zero.optimizer_shard import OptimizerShard, make_room_for_state, whole_state
from deepspeed.zero.optimizer_surface import OptimizerSurface, numbers_of
from deepspeed.zero.param import is_managed
from deepspeed.zero.reducer import Reducer
from deepspeed.zero.roles import Pruner
from deepspeed.zero.shard_group import edited, group_of
from deepspeed.zero.waves import StepGuard, update, waves_of


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
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        reducer: Reducer,
        settings: StepSettings,
        scaler: Any = None,
        lifecycle: Lifecycle | None = None,
        late: LatePublish | None = None,
    ) -> None:
        self.optimizer, self.settings, self.scaler = inner, settings, scaler
        self.overflow = False
        self.skip_reason: str | None = None
        self._global_grad_norm: float | None = None
        self.inspect: Callable[[float | None, list[list[float]]], None] | None = None  # between norm and update
        self.along: list[float] = []  # numbers that ride on the step's exchange, and everybody's
        self.alongside: list[list[float]] = []
        self._scale_loss: Callable[[torch.Tensor, bool], Any] | None = None
        self._late: LatePublish | None = None
        self.attach(reducer, lifecycle, late)

    def attach(self, reducer: Reducer, lifecycle: Lifecycle | None, late: LatePublish | None = None) -> None:
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
        self._channel, self._rounds = reducer.axes.same_slice.channel(), 0
        self._norm_channel, self._norms = reducer.axes.one_copy.channel(), 0
        self.window = reducer.window
        self.window.rates = self._rates
        self.masks: Pruner | None = None
        self.bit16_groups = [list(group["params"]) for group in self.optimizer.param_groups]
        self.groups = [bucket.group for bucket in reducer.buckets]  # those under this optimizer
        self._gathered = [group for group in self.groups if group.policy.gathers_before_use]
        self._whole = [group for group in self.groups if not group.policy.gathers_before_use]
        self.shards = [OptimizerShard(bucket, self.optimizer) for bucket in reducer.buckets]
        self._shard_of = {id(shard.group): shard for shard in self.shards}
        self.fragments: dict[int, list[Fragment]] = {}
        self._leaves, self._stepping, self._updated = 0, False, False
        self._guard = self.optimizer.register_step_pre_hook(StepGuard(self._refuse_strangers))
        seen: set[int] = set()
        for group in self.optimizer.param_groups:
            leaves: list[Parameter] = []
            for param in group["params"]:
                if not is_managed(param):
                    raise OptimizerError("the optimizer holds a parameter that is not in the model and was not managed")
                if id(param) in seen:
                    raise OptimizerError(f"parameter '{param._ds_member.name}' appears in several optimizer groups")
                seen.add(id(param))
                state = self.optimizer.state.pop(param, None)
                member = param._ds_member
                fragments = self.fragments[member.uid] = self.shard_of(member).add(member)
                member.owner = self
                for fragment in fragments:
                    leaves.append(fragment.leaf)
                    if state:
                        self.optimizer.state[fragment.leaf] = cut_state(state, fragment)
            group["params"] = leaves
            self._leaves += len(leaves)
        for group in self._whole:
            group.aliases.noisy()  # nobody else has anything over the memory yet
        reducer.squares.buckets = [shard.bucket for shard in self.shards if shard.members]
        for shard in self.shards:
            shard.store_state()

    # -- the inner optimizer --------------------------------------------------------------------------------------

    def shard_of(self, member: Member) -> OptimizerShard:
        """The leaves and the state of a member's group."""
        return self._shard_of[id(member.group)]

    def activate(self, member: Member) -> None:
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
    def state(self) -> Any:
        """The inner optimizer's state, keyed by the fragments."""
        return self.optimizer.state

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
        loss = closure() if closure is not None else None
        if self.lifecycle is not None:
            self.lifecycle.settle()
        agreed = self.reducer.finish(self.window.update)
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
        total = None if self.masks is not None or self.along else known_norm(self.reducer, agreed)
        if total is None and (wanted or self.along):
            self._norms += 1
            tag = tag_of(self._norm_channel, SMALL, self._norms)
            buckets = self.reducer.squares.buckets if wanted else []
            total, self.alongside = global_norm(buckets, self.settings.clip > 0, self.reducer, tag, self.along)
        norm = total * abs(rescale) if wanted and total is not None else None
        if self.scaler is not None and norm is not None and math.isnan(norm):
            norm = math.inf  # under a loss scale what is not finite is too large; inf - inf on the way makes it NaN
        self._global_grad_norm = norm
        if self.inspect is not None:
            self.inspect(norm, self.alongside)
        self.overflow = self.settings.check and norm is not None and not math.isfinite(norm)
        self.skip_reason = explain_overflow(self.reducer, (self._tag(), self._tag())) if self.overflow else None
        if not self.overflow:
            self._apply(rescale * (clip_factor(norm, self.settings.clip) if norm is not None else 1.0))
        self._end_window()
        if self.scaler is not None:
            self.scaler.update(self.overflow)
        return loss

    @property
    def lifecycle(self) -> Lifecycle | None:
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

    def _refuse_strangers(self) -> None:
        """Before each step of the inner optimizer: it must come from here, over the fragments made at the start."""
        if not self._stepping:
            raise UsageError(
                "step() of the optimizer passed to initialize would find no gradients; call engine.step(), or step() "
                "of the optimizer that initialize returned"
            )

    def _apply(self, factor: float) -> None:
        for group in self._whole:
            group.land()
        changed = [member for group in self._whole for member in edited(group)]
        for member in changed:
            member.tell_holder()
            member.step_aside()  # read all before any is written: two may have been exchanged
        for member in changed:
            self.import_edits(member)
        if sum(len(group["params"]) for group in self.optimizer.param_groups) != self._leaves:
            raise OptimizerError(
                "parameters were added to, or taken from, the optimizer's groups after initialize, which shares out "
                "gradients and state by them; pass all groups to initialize, and freeze with requires_grad"
            )
        if not self._updated:
            make_room_for_state(self.optimizer, self.shards)
        self._updated = True
        self._stepping = True
        try:
            with suggests_offload("parameters were updated"):
                late = self._late is not None and self._late.allowed  # here; the order is that of all ranks
                waves = waves_of(self.shards, self.reducer, self.optimizer, self._late is not None)
                updated = None if self.masks is None else self.masks.on_update
                handles = update(self.optimizer, waves, factor, updated, late)
        finally:
            self._stepping = False
        for handle in handles:
            handle.wait()
        for group in self._gathered:
            group.advance()
        for group in self._gathered:
            group.refresh()
        for wave in waves:
            count_update(wave.members)

    def import_edits(self, member: Member) -> None:
        """A parameter changed in place by the user since the last step (weight clipping) updates its master."""
        if member.group.policy.gathers_before_use:
            return
        group = group_of(member)
        if member.param.data_ptr() != group.views[member.index].data_ptr() and group.aliases.outlived():
            group.move_out()
            group.aliases.noisy()
            self.shard_of(member).point()
        member.tell_holder()
        member.rejoin()
        if member.exposed or member.param._version != member.version:
            # A master follows what is written past the version, for as long as somebody may hold a `.data`.
            member.version, member.exposed = member.param._version, group.master is not None and group.aliases.noisy()
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
        if self._scale_loss is None:
            raise UsageError("this optimizer is not attached to an engine")
        return self._scale_loss(loss, retain_graph)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: the inner optimizer's over its fragments, the loss scaler's; see `RankState`."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return self._rank_state(optimizer=whole_state(self.optimizer, self.shards), loss_scaler=scaler)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, on the same rank and topology."""
        self.optimizer.load_state_dict(state["optimizer"])
        for shard in self.shards:
            shard.store_state()
        if self.scaler is not None and state.get("loss_scaler") is not None:
            self.scaler.load_state_dict(state["loss_scaler"])

    def empty_partition_cache(self) -> None:
        """Free gathered parameters that are not in use."""
        if self.lifecycle is not None:
            self.lifecycle.keeper.free_idle()

    def destroy(self) -> None:
        """Stop listening to gradients and let the state go."""
        self.reducer.detach()
        if self._late is not None:
            self._late.detach()
        self.window.rates = list
        self._guard.remove()
        for shard in self.shards:
            shard.drop()
        self.shards, self.fragments, self._shard_of, self.bit16_groups = [], {}, {}, []
        self.groups, self._gathered, self._whole, self.reducer.squares.buckets = [], [], [], []
        self.optimizer.state.clear()
        self._scale_loss = None
