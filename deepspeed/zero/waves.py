"""The update in waves: groups that rest on the device together, the others one by one, so that movement overlaps it.

[Note: waves] One step of the user is one or several steps of the inner optimizer, each of which sees gradients on some
leaves only. Every parameter is in one wave, step hooks run once, and every wave starts from the hyperparameters that
were there before the first. While a group is updated, the next one is read ahead, the last one is written behind, and
its parameters are already on their way to the other ranks.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deepspeed.comm.collectives import Handle
from deepspeed.ops.host_step import Fold, HostOptimizer
from deepspeed.storage.resident import RESIDENT
from deepspeed.zero.holding import Holding
from deepspeed.zero.parts import Part
from deepspeed.zero.reducer import Reducer
from deepspeed.zero.shard_group import ShardGroup


class Wave:
    """Groups that are updated by one step of the inner optimizer.

    Args:
        holdings: their leaves and state.
        touched: the parts that have a gradient.
    """

    def __init__(self, holdings: list[Holding], touched: list[Part]) -> None:
        self.holdings, self.touched = holdings, touched

    def ahead(self) -> None:
        """The wave is next."""
        for holding in self.holdings:
            holding.ahead()
            holding.bucket.total.ahead()

    @contextlib.contextmanager
    def prepared(self, optimizer: torch.optim.Optimizer, factor: float) -> Iterator[bool]:
        """Inside, state is at hand and the optimizer knows the gradient of every touched leaf.

        Args:
            optimizer: the inner one.
            factor: of the gradients.

        Yields:
            Whether its step rounds the masters too.
        """
        with contextlib.ExitStack() as stack:
            totals: dict[int, torch.Tensor] = {}
            for holding in self.holdings:
                stack.enter_context(holding.at_hand(changed=True))
                totals[id(holding.bucket)] = stack.enter_context(holding.bucket.total.borrowed())
            gradients = {part: totals[id(part.bucket)][part.span].view(part.leaf.shape) for part in self.touched}
            if isinstance(optimizer, HostOptimizer) and all(t.device.type == "cpu" for t in totals.values()):
                rounds = self._fold(optimizer, gradients, factor, stack)
            else:
                rounds = False
                for total in totals.values() if factor != 1.0 else ():
                    total.mul_(factor)
                for part, gradient in gradients.items():
                    part.leaf.grad = gradient.to(part.leaf.dtype)
            try:
                yield rounds
            finally:
                for part in self.touched:
                    part.leaf.grad = None

    def _fold(
        self,
        optimizer: HostOptimizer,
        gradients: dict[Part, torch.Tensor],
        factor: float,
        stack: contextlib.ExitStack,
    ) -> bool:
        """Let one pass over memory scale gradients, update, and round; see `HostOptimizer.folds`."""
        rounded: dict[int, torch.Tensor] = {}
        groups = [holding.group for holding in self.holdings if holding.group.master is not None]
        keeps = len(self.touched) < sum(len(holding.parts) for holding in self.holdings)  # some have no gradient
        for group in groups:
            on_host = group.values.memory is None or group.values.memory.device.type == "cpu"
            if on_host and group.dtype.itemsize < torch.float32.itemsize:
                rounded[id(group)] = stack.enter_context(group.values.borrowed(changed=True, read=keeps))
        folds = {}
        for part, gradient in gradients.items():
            out = rounded.get(id(part.member.group))
            folds[part.leaf] = Fold(gradient, None if out is None else out[part.span])
        optimizer.folds, optimizer.factor = folds, factor
        stack.callback(_unfold, optimizer)
        return len(rounded) == len(groups)


def waves_of(holdings: Sequence[Holding], reducer: Reducer) -> list[Wave]:
    """The waves of a step: only groups with a gradient on some rank take part. Valid after `finish`.

    Args:
        holdings: all groups.
        reducer: knows who had a gradient.
    """
    together, waves = Wave([], []), []
    for holding in holdings:
        bucket = holding.bucket
        marks = [bucket.filled and reducer.touched(bucket, member) for member in holding.group.members]
        if not any(marks):
            continue
        touched = [part for part in holding.parts if marks[part.member.index]]
        if holding.group.places.optimizer is RESIDENT:
            together.holdings.append(holding)
            together.touched += touched
        else:
            waves.append(Wave([holding], touched))
    return [together, *waves] if together.holdings or not waves else waves


def update(optimizer: torch.optim.Optimizer, waves: list[Wave], factor: float) -> list[Handle]:
    """Run the inner optimizer over all waves and send what it updated.

    Args:
        optimizer: any torch optimizer over the leaves.
        waves: at least one.
        factor: of all gradients.

    Returns:
        Messages under way.
    """
    handles: list[Handle] = []
    before = _hyperparameters(optimizer) if len(waves) > 1 else []
    for index, wave in enumerate(waves):
        if index + 1 < len(waves):
            waves[index + 1].ahead()
        with wave.prepared(optimizer, factor) as rounds:
            if index:
                _restore(optimizer, before)
            with _hooks(optimizer, first=index == 0, last=index == len(waves) - 1):
                optimizer.step()
            handles += start_publish([holding.group for holding in wave.holdings], rounds)
    return handles


def _unfold(optimizer: HostOptimizer) -> None:
    optimizer.folds, optimizer.factor = None, 1.0


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def _restore(optimizer: torch.optim.Optimizer, before: list[dict[str, Any]]) -> None:
    """Undo what a step has counted in its groups: the next wave belongs to the same step."""
    for group, values in zip(optimizer.param_groups, before, strict=True):
        for key in set(group) - set(values) - {"params"}:
            del group[key]
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and isinstance(group[key], torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


@contextlib.contextmanager
def _hooks(optimizer: torch.optim.Optimizer, first: bool, last: bool) -> Iterator[None]:
    """The user's step hooks run before the first wave and after the last."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    nothing: Any = OrderedDict()
    if not first:
        optimizer._optimizer_step_pre_hooks = nothing
    if not last:
        optimizer._optimizer_step_post_hooks = nothing
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks


def start_publish(groups: Sequence[ShardGroup], rounded: bool = False) -> list[Handle]:
    """Updated masters become parameters: round, unless that is done, and send to the ranks that hold copies."""
    handles = []
    for group in groups:
        if not rounded:
            group.round_masters()
        handle = group.start_publish()
        if handle is not None:
            handles.append(handle)
    return handles


def publish(groups: Sequence[ShardGroup]) -> None:
    """Masters become parameters everywhere."""
    for handle in start_publish(groups):
        handle.wait()
