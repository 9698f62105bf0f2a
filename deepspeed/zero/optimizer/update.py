"""Runs the optimizer step in sub-groups so that offload transfers and all-gathers overlap it.

[Note: waves] One step of the user is one or several steps of the inner optimizer, each with gradients on some leaves
only (a sub-group, called wave in the code). Every parameter is in one wave, step hooks run once, and every wave starts
from the hyperparameters and counters that the first one had after the hooks. An optimizer whose update cannot be split
(`UpdateTraits.in_parts`) has one wave. A `step` that wraps the optimizer's own runs once too, with all waves inside.
While a group is updated, the next one is prefetched, the previous one is written back, and its all-gather is in flight.
If all-gathers run between devices, groups on the device are updated in a few waves too.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.optim.optimizer as torch_optimizer

from deepspeed.comm.collectives.collectives import Handle
from deepspeed.errors import OptimizerError
from deepspeed.foundation.malloc import own_pages
from deepspeed.foundation.spans import UPDATE, recorder
from deepspeed.ops import adam, lion
from deepspeed.ops.cpu_optimizer import Fold, HostOptimizer
from deepspeed.optim.nested import Counters
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.optimizer.optimizer_shard import Fragment, OptimizerShard
from deepspeed.zero.parameters.record import ParamRecord
from deepspeed.zero.parameters.shard_group import ShardGroup

# An update on a device is cut where there are at least so many elements of a rank for each piece: with fewer, launching
# the pieces takes longer than what they hide.
PIECE, PIECES = 1 << 23, 8
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")  # of torch.optim.optimizer
_BY_PARAMETER = (f"{torch.optim.__name__}.", adam.__name__, lion.__name__)


class StepGuard:
    """The engine's pre-step hook, which can raise; `_is_watched` does not count it."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self, *_: Any) -> None:
        self._check()


class UpdateStep:
    """Groups that one step of the inner optimizer updates, with the members and fragments that have a gradient."""

    def __init__(self, shards: list[OptimizerShard], members: list[ParamRecord], touched: list[Fragment]) -> None:
        self.shards, self.members, self.touched = shards, members, touched

    @property
    def moves(self) -> bool:
        return any(shard.moves for shard in self.shards)

    def prefetch(self) -> None:
        for shard in self.shards:
            shard.prefetch()
            shard.bucket.total.prefetch()

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Return a recorder span, named after the group if only one is updated."""
        if not recorder.on:
            return contextlib.nullcontext()
        alone = self.shards[0].group if len(self.shards) == 1 else None
        return recorder.span(UPDATE, "update", alone.name if alone is not None and alone.tiers.optimizer.moves else "")

    @contextlib.contextmanager
    def prepared(self, optimizer: torch.optim.Optimizer, factor: float) -> Iterator[bool]:
        """Load state and set the gradient of every touched leaf; yields whether the step also rounds the masters."""
        with contextlib.ExitStack() as stack:
            totals: dict[int, torch.Tensor] = {}
            for shard in self.shards:
                total = shard.bucket.total
                # What rests in memory is lent by nothing that has an end: contexts are for what moves.
                at_hand = shard.rests_at_hand
                if at_hand and total.memory is not None:
                    totals[id(shard.bucket)] = total.acquire()
                    continue
                if not at_hand:
                    stack.enter_context(shard.at_hand(changed=True))
                totals[id(shard.bucket)] = stack.enter_context(total.borrowed())
            if isinstance(optimizer, HostOptimizer) and all(t.device.type == "cpu" for t in totals.values()):
                rounds = self._fold(optimizer, totals, factor, stack)
            else:
                rounds = False
                for total in totals.values() if factor != 1.0 else ():
                    total.mul_(factor)
                for fragment in self.touched:
                    leaf, gradient = fragment.leaf, fragment.gradient(totals[id(fragment.bucket)])
                    leaf.grad = gradient if gradient.dtype == leaf.dtype else gradient.to(leaf.dtype)
            try:
                yield rounds
            finally:
                for fragment in self.touched:
                    fragment.leaf.grad = None

    def _fold(
        self,
        optimizer: HostOptimizer,
        totals: dict[int, torch.Tensor],
        factor: float,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Scale gradients, update and round in one pass over memory; see `HostOptimizer.folds`."""
        rounded: dict[int, torch.Tensor] = {}
        groups = [shard.group for shard in self.shards if shard.group.master is not None]
        keeps = len(self.touched) < sum(len(shard.fragments) for shard in self.shards)  # some have no gradient
        for group in groups:
            on_host = group.values.memory is None or group.values.memory.device.type == "cpu"
            if group.dtype.itemsize >= torch.float32.itemsize:
                continue
            if on_host:
                rounded[id(group)] = stack.enter_context(group.values.borrowed(changed=True, read=keeps))
            elif (staged := group.stage_rounded(keeps)) is not None:
                rounded[id(group)] = staged
                stack.callback(group.drop_staged)
        folds = {}
        for fragment in self.touched:
            gradient = fragment.gradient(totals[id(fragment.bucket)])
            out = rounded.get(id(fragment.member.group))
            folds[fragment.leaf] = Fold(gradient, None if out is None else out[fragment.span])
        optimizer.folds, optimizer.factor = folds, factor
        stack.callback(vars(optimizer).update, folds=None, factor=1.0)
        return len(rounded) == len(groups)


def waves_of(
    shards: Sequence[OptimizerShard],
    reducer: Reducer,
    optimizer: torch.optim.Optimizer,
    late: bool = False,
    at_once: bool = False,
) -> list[UpdateStep]:
    """Return the waves of a step, after `finish`: only groups with a gradient on some rank take part."""
    resting: list[UpdateStep] = []
    waves: list[UpdateStep] = []
    for shard in shards:
        bucket = shard.bucket
        marks = reducer.marks(bucket) if bucket.filled else None
        if marks is None or not any(marks):
            continue
        target = resting if shard.group.tiers.optimizer is RESIDENT else waves
        target.append(UpdateStep([shard], *shard.touched(marks)))
    if late:
        resting.reverse()
    if at_once:
        return _joined(resting + waves, 1) or [UpdateStep([], [], [])]
    # What rests on a device is cut, so that what is updated travels meanwhile. Only optimizers that are known to treat
    # each parameter by itself are run several times in a step unasked.
    pieces, groups = 1, [shard.group for wave in resting for shard in wave.shards]
    if type(optimizer).__module__.startswith(_BY_PARAMETER) and not _is_watched(optimizer):
        if all(group.overlaps_all_gather for group in groups):
            pieces = min(PIECES, max(1, sum(group.high - group.low for group in groups) // PIECE))
    return _joined(resting, pieces) + waves or [UpdateStep([], [], [])]


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks or a wrapped `step` observe the optimizer's steps and expect one with all gradients."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = [hook for table in (*own, *(getattr(torch_optimizer, name) for name in _GLOBAL)) for hook in table.values()]
    if not all(isinstance(hook, StepGuard) for hook in hooks):
        return True
    return _is_wrapped(optimizer)


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` is wrapped; the wrapper of torch's schedulers, which only counts steps, is ignored."""
    step = vars(optimizer).get("step")
    if step is None:
        return False
    counts = hasattr(step, "_wrapped_by_lr_sched")  # one of torch's schedulers notes that there was a step
    return not (counts and getattr(step, "__wrapped__", None) is type(optimizer).step)


def _joined(waves: list[UpdateStep], pieces: int) -> list[UpdateStep]:
    """Join the groups into at most `pieces` waves with similar numbers of elements."""
    sizes = [sum(shard.group.high - shard.group.low for shard in wave.shards) for wave in waves]
    total, before, steps = sum(sizes), 0, dict[int, UpdateStep]()
    for wave, size in zip(waves, sizes, strict=True):
        place = (2 * before + size) * pieces // (2 * total or 1)
        into = steps.setdefault(min(place, pieces - 1), UpdateStep([], [], []))
        before += size
        into.shards += wave.shards
        into.members += wave.members
        into.touched += wave.touched
    return list(steps.values())


def update(
    optimizer: torch.optim.Optimizer,
    waves: list[UpdateStep],
    factor: float,
    updated: Callable[[list[ShardGroup]], None] | None = None,
    late: bool = False,
    call: Callable[[], Any] | None = None,
) -> list[Handle]:
    """Run the inner optimizer over all waves and all-gather the updated values.

    Args:
        optimizer: any torch optimizer over the leaves.
        waves: at least one.
        factor: factor on all gradients.
        updated: called with the groups of a wave before their masters are all-gathered.
        late: new values may arrive after the step.
        call: function to run instead of `optimizer.step()`, for optimizers with other update methods (SAM).

    Returns:
        Pending messages that the step waits for.
    """
    handles: list[Handle] = []
    before = [Counters.of(optimizer)] if len(waves) > 1 else []

    def note(*_: Any) -> None:
        before[:] = [Counters.of(optimizer)]

    @contextlib.contextmanager
    def at_hand(index: int) -> Iterator[None]:
        """Prepare one wave for the optimizer's step inside, and all-gather its updated values."""
        wave = waves[index]
        if index + 1 < len(waves):
            waves[index + 1].prefetch()
        # What rests elsewhere is updated through blocks that live for one wave. Aligned blocks of the heap do not fit
        # into the holes that their likes leave: after some waves as much would be free as all of the state takes.
        with own_pages() if wave.moves else contextlib.nullcontext(), wave.prepared(optimizer, factor) as rounds:
            if index:
                before[0].restore()
            with wave.recorded():
                yield
            for shard in wave.shards:
                shard.adopt_replaced()
            groups = [shard.group for shard in wave.shards]
            if updated is not None:
                updated(groups)
            handles.extend(start_all_gather_updated(groups, rounds, late))

    if call is None and len(waves) > 1 and _is_wrapped(optimizer):
        _inside(optimizer, [functools.partial(at_hand, index) for index in range(len(waves))], note)
        return handles
    for index in range(len(waves)):
        with at_hand(index), _hooks(optimizer, index == 0, index == len(waves) - 1, note):
            (call or optimizer.step)()
    return handles


def _inside(
    optimizer: torch.optim.Optimizer, waves: list[Callable[[], contextlib.AbstractContextManager[None]]], note: Any
) -> None:
    """Call a wrapped `step` once and run all waves inside; the last one runs in the inner `step` that it calls."""
    places = list[str]()  # of the own step: "begun", "ended"

    def begins(*_: Any) -> None:  # the last hook of those before the step
        if "ended" in places:
            raise OptimizerError(
                f"the step that was put around that of {type(optimizer).__name__} calls it several times: that cannot "
                f"be had where the optimizer is offloaded, whose step is one of each group"
            )
        if places:  # a class whose step calls that of its base: torch runs hooks for both
            return
        places.append("begun")
        note()
        with contextlib.ExitStack() as silent:
            for when in ("pre", "post"):
                _silence(optimizer, when, silent)
            for wave in waves[:-1]:
                with wave():
                    type(optimizer).step(optimizer)
        last.enter_context(waves[-1]())

    with contextlib.ExitStack() as last, contextlib.ExitStack() as handles:
        handles.callback(optimizer.register_step_pre_hook(begins).remove)
        handles.callback(optimizer.register_step_post_hook(lambda *_: places.append("ended")).remove)
        optimizer.step()
    for wave in waves if not places else ():  # it has left the step out: what stands is sent as it is
        with wave():
            pass


@contextlib.contextmanager
def _hooks(optimizer: torch.optim.Optimizer, first: bool, last: bool, then: Callable[..., None]) -> Iterator[None]:
    """Run step hooks, of this optimizer and global ones, only before the first wave and after the last."""
    if first and last:
        yield
        return
    with contextlib.ExitStack() as stack:
        if first:
            handle = optimizer.register_step_pre_hook(then)  # the last of them: what hooks have set is there
            stack.callback(handle.remove)
        else:
            _silence(optimizer, "pre", stack)
        if not last:
            _silence(optimizer, "post", stack)
        yield


def _silence(optimizer: torch.optim.Optimizer, when: str, stack: contextlib.ExitStack) -> None:
    """Disable hooks of that kind until the stack ends."""
    stack.enter_context(mock.patch.object(optimizer, f"_optimizer_step_{when}_hooks", OrderedDict()))
    stack.enter_context(mock.patch.object(torch_optimizer, f"_global_optimizer_{when}_hooks", OrderedDict()))


def start_all_gather_updated(groups: Sequence[ShardGroup], rounded: bool = False, late: bool = False) -> list[Handle]:
    """Round updated masters unless done, and start their all-gathers; returns those that the step must wait for."""
    handles = []
    for group in groups:
        if not rounded:
            group.round_masters()
        else:
            group.deliver_staged()
            group.mask_values()
        # Asked before the all-gather, which holds views itself.
        arrives = late and group.overlaps_all_gather and not group.buffer_views.track_writes()
        handle = group.start_all_gather_updated()
        if handle is not None and arrives:
            group.arrive(handle)
        elif handle is not None:
            handles.append(handle)
    return handles


def all_gather_updated(groups: Sequence[ShardGroup]) -> None:
    """Round and all-gather the masters of these groups."""
    for handle in start_all_gather_updated(groups):
        handle.wait()
