"""Optimizer update in sub-groups of parameters, so that offload transfers and all-gathers overlap with it.

[Note: waves] One `engine.step` calls the inner optimizer's `step` once or several times, each time with the gradients
of some leaves only: a sub-group, called wave in the code. Each parameter is in one wave. Step hooks run once, and each
wave starts with the hyperparameters and counters that the first wave had after the hooks. If the update cannot be split
(`UpdateTraits.in_parts` is False), there is one wave. A wrapper around the optimizer's `step` is also called once, and
all waves run inside of it. While one wave is updated, the next one is prefetched, and the previous one is written back
and all-gathered. If all-gathers run between devices or hosts, groups in memory are also updated in several waves.
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

# Minimum number of a rank's elements per wave on a device, and maximum number of waves: for smaller waves, kernel
# launches take longer than the communication that they overlap with.
PIECE, PIECES = 1 << 23, 8
_GLOBAL = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")  # of torch.optim.optimizer
_BY_PARAMETER = (f"{torch.optim.__name__}.", adam.__name__, lion.__name__)


class StepGuard:
    """Pre-step hook of the engine, which `_is_watched` ignores.

    Args:
        check: called before each step of the inner optimizer; may raise.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self, *_: Any) -> None:
        self._check()


class UpdateStep:
    """Wave: parameter groups that one step of the inner optimizer updates; see [Note: waves].

    Args:
        shards: shards of the groups.
        members: parameters with a gradient on any rank.
        touched: fragments of these parameters on this rank.
    """

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
        """Return a profiler span for the update, named after the group of a wave with one group, offloaded to disk."""
        if not recorder.on:
            return contextlib.nullcontext()
        alone = self.shards[0].group if len(self.shards) == 1 else None
        return recorder.span(UPDATE, "update", alone.name if alone is not None and alone.tiers.optimizer.moves else "")

    @contextlib.contextmanager
    def prepared(self, optimizer: torch.optim.Optimizer, factor: float | torch.Tensor) -> Iterator[bool]:
        """Return a context in which the state is in memory and the leaves (or a CPU optimizer's folds) have gradients.

        Args:
            optimizer: inner optimizer.
            factor: factor on all gradients; a 0-d tensor if all are on a device.

        Yields:
            Whether the optimizer's step also rounds the master weights to the model's dtype.
        """
        with contextlib.ExitStack() as stack:
            totals: dict[int, torch.Tensor] = {}
            for shard in self.shards:
                total = shard.bucket.total
                # State in memory needs no context manager.
                at_hand = shard.rests_at_hand
                if at_hand and total.memory is not None:
                    totals[id(shard.bucket)] = total.acquire()
                    continue
                if not at_hand:
                    stack.enter_context(shard.at_hand(changed=True))
                totals[id(shard.bucket)] = stack.enter_context(total.borrowed())
            on_host = all(t.device.type == "cpu" for t in totals.values())
            if isinstance(optimizer, HostOptimizer) and not isinstance(factor, torch.Tensor) and on_host:
                rounds = self._fold(optimizer, totals, factor, stack)
            else:
                rounds = False
                sums = list(totals.values())
                if sums and isinstance(factor, torch.Tensor):
                    torch._foreach_mul_(sums, factor.to(sums[0].dtype))
                elif sums and factor != 1.0:
                    torch._foreach_mul_(sums, factor)
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
        """Set up the CPU optimizer to scale, update and round in one pass over memory; see `HostOptimizer.folds`.

        Returns whether the step rounds the master weights of all groups.
        """
        rounded: dict[int, torch.Tensor] = {}
        groups = [shard.group for shard in self.shards if shard.group.master is not None]
        keeps = len(self.touched) < sum(len(shard.fragments) for shard in self.shards)  # some leaves keep their values
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
    """Divide the groups that have a gradient on any rank into waves, after `Reducer.finish`.

    Args:
        shards: shards of all groups.
        reducer: reducer with the gradients.
        optimizer: inner optimizer.
        late: update groups on the device in reverse order, since all-gathers are awaited in the next forward.
        at_once: put all groups into one wave, because the update cannot be split.

    Returns:
        At least one wave, which may be empty.
    """
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
    # Groups on the device are split into waves, so that the all-gather of one overlaps with the update of the next,
    # but only for optimizer classes that are known to update each parameter separately.
    pieces, groups = 1, [shard.group for wave in resting for shard in wave.shards]
    if type(optimizer).__module__.startswith(_BY_PARAMETER) and not _is_watched(optimizer):
        if all(group.overlaps_all_gather for group in groups):
            pieces = min(PIECES, max(1, sum(group.high - group.low for group in groups) // PIECE))
    return _joined(resting, pieces) + waves or [UpdateStep([], [], [])]


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has step hooks or a wrapped `step`, which expect one step with all gradients."""
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    hooks = [hook for table in (*own, *(getattr(torch_optimizer, name) for name in _GLOBAL)) for hook in table.values()]
    if not all(isinstance(hook, StepGuard) for hook in hooks):
        return True
    return _is_wrapped(optimizer)


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` is wrapped by other code than torch's learning-rate schedulers."""
    step = vars(optimizer).get("step")
    if step is None:
        return False
    counts = hasattr(step, "_wrapped_by_lr_sched")  # torch's schedulers wrap `step` only to count calls
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
    factor: float | torch.Tensor,
    updated: Callable[[list[ShardGroup]], None] | None = None,
    late: bool = False,
    call: Callable[[], Any] | None = None,
) -> list[Handle]:
    """Run the inner optimizer over all waves and start the all-gathers of parameters. All ranks must call this.

    Args:
        optimizer: inner optimizer.
        waves: result of `waves_of`.
        factor: factor on all gradients.
        updated: called with the groups of a wave after their update, before the all-gather.
        late: leave all-gathers unfinished where the next forward can wait for them.
        call: function to run instead of `optimizer.step()`, for optimizers with other update methods (SAM).

    Returns:
        All-gathers for which the caller must wait.

    Raises:
        OptimizerError: a wrapper around `step` calls it several times.
    """
    handles: list[Handle] = []
    before = [Counters.of(optimizer)] if len(waves) > 1 else []

    def note(*_: Any) -> None:
        before[:] = [Counters.of(optimizer)]

    @contextlib.contextmanager
    def at_hand(index: int) -> Iterator[None]:
        """Return a context for the step of one wave; it starts the all-gather at its end."""
        wave = waves[index]
        if index + 1 < len(waves):
            waves[index + 1].prefetch()
        # Offloaded state is updated through aligned buffers that are freed after the wave. On the heap, a new aligned
        # buffer does not fit into the space of a freed one, and fragmentation would grow to the size of all the state.
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
    """Call a wrapped `step` once and run all waves inside; the last wave runs in the `step` that the wrapper calls."""
    places = list[str]()  # progress of the inner step: "begun", "ended"

    def begins(*_: Any) -> None:  # the last pre-step hook
        if "ended" in places:
            raise OptimizerError(
                f"the step that was put around that of {type(optimizer).__name__} calls it several times: that cannot "
                f"be had where the optimizer is offloaded, whose step is one of each group"
            )
        if places:  # a step that calls the step of its base class: torch runs hooks for both
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
    for wave in waves if not places else ():  # the wrapper did not call `step`: all-gather the unchanged values
        with wave():
            pass


@contextlib.contextmanager
def _hooks(optimizer: torch.optim.Optimizer, first: bool, last: bool, then: Callable[..., None]) -> Iterator[None]:
    """Return a context in which pre-step hooks run only for the first wave, and post-step hooks only for the last."""
    if first and last:
        yield
        return
    with contextlib.ExitStack() as stack:
        if first:
            handle = optimizer.register_step_pre_hook(then)  # runs last, after the user's hooks
            stack.callback(handle.remove)
        else:
            _silence(optimizer, "pre", stack)
        if not last:
            _silence(optimizer, "post", stack)
        yield


def _silence(optimizer: torch.optim.Optimizer, when: str, stack: contextlib.ExitStack) -> None:
    """Disable "pre" or "post" step hooks, of this optimizer and global ones, until the stack is closed."""
    stack.enter_context(mock.patch.object(optimizer, f"_optimizer_step_{when}_hooks", OrderedDict()))
    stack.enter_context(mock.patch.object(torch_optimizer, f"_global_optimizer_{when}_hooks", OrderedDict()))


def start_all_gather_updated(groups: Sequence[ShardGroup], rounded: bool = False, late: bool = False) -> list[Handle]:
    """Round master weights to the model's dtype and start the all-gathers (stages 1 and 2). All ranks must call this.

    Args:
        groups: updated groups.
        rounded: the optimizer has rounded the values already.
        late: leave an all-gather to the next forward where that is possible.

    Returns:
        All-gathers for which the caller must wait.
    """
    handles = []
    for group in groups:
        if not rounded:
            group.round_masters()
        else:
            group.deliver_staged()
            group.mask_values()
        # Checked before the all-gather, which creates views itself.
        arrives = late and group.overlaps_all_gather and not group.buffer_views.track_writes()
        handle = group.start_all_gather_updated()
        if handle is not None and arrives:
            group.arrive(handle)
        elif handle is not None:
            handles.append(handle)
    return handles


def all_gather_updated(groups: Sequence[ShardGroup]) -> None:
    """Round master weights to the model's dtype, all-gather (stages 1 and 2) and wait. All ranks must call this."""
    for handle in start_all_gather_updated(groups):
        handle.wait()
