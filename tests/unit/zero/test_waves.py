"""A step of the user in several waves: who looks at steps sees one."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from deepspeed.errors import OptimizerError
from deepspeed.zero.optimizer import update


def optimizer_of(leaf: nn.Parameter) -> torch.optim.SGD:
    leaf.grad = torch.ones_like(leaf)
    return torch.optim.SGD([leaf], lr=1.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_hooks_run_once_and_what_they_set_holds_for_all_waves(count: int) -> None:
    leaf, calls = nn.Parameter(torch.zeros(2)), list[str]()
    optimizer = optimizer_of(leaf)

    def slower(one: Any, *_: Any) -> None:
        calls.append("own pre")
        one.param_groups[0]["lr"] = 0.25

    optimizer.register_step_pre_hook(slower)
    optimizer.register_step_post_hook(lambda *_: calls.append("own post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: calls.append("pre")),
        register_optimizer_step_post_hook(lambda *_: calls.append("post")),
    ]
    try:
        update.update(optimizer, [update.UpdateStep([], [], []) for _ in range(count)], 1.0)
    finally:
        for handle in handles:
            handle.remove()
    assert calls == ["pre", "own pre", "own post", "post"]
    assert leaf.tolist() == [-0.25 * count] * 2  # each of these waves has all leaves
    assert optimizer.param_groups[0]["lr"] == 0.25 and len(optimizer._optimizer_step_pre_hooks) == 1


def test_what_looks_at_steps_is_seen_and_a_scheduler_is_none_of_it() -> None:
    def plain() -> torch.optim.SGD:
        return optimizer_of(nn.Parameter(torch.zeros(2)))

    scheduled, hooked, after, wrapped, both = (plain() for _ in range(5))
    LambdaLR(scheduled, lambda _: 1.0)
    hooked.register_step_pre_hook(lambda *_: None)
    after.register_step_post_hook(lambda *_: None)
    step = wrapped.step
    wrapped.step = lambda closure=None: step(closure)
    both.step = MethodType(lambda self, closure=None: type(self).step(self, closure), both)
    LambdaLR(both, lambda _: 1.0)
    assert [update._is_watched(one) for one in (plain(), scheduled)] == [False, False]
    assert all(update._is_watched(one) for one in (hooked, after, wrapped, both))
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert update._is_watched(plain())
    handle.remove()


def wrapped(leaf: nn.Parameter, calls: list[str], times: int) -> torch.optim.SGD:
    """An optimizer whose step somebody has put another one around, which calls it so often."""
    optimizer = optimizer_of(leaf)
    own = optimizer.step

    def step(closure: Any = None) -> None:
        calls.append("begin")
        for _ in range(times):
            own(closure)
        calls.append("end")

    optimizer.step = step  # type: ignore[method-assign]
    optimizer.register_step_pre_hook(lambda one, *_: one.param_groups[0].update(lr=0.25))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    return optimizer


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_step_around_the_optimizers_own_runs_once(count: int) -> None:
    leaf, calls, sent = nn.Parameter(torch.zeros(2)), list[str](), list[Any]()
    optimizer = wrapped(leaf, calls, 1)
    for _ in range(2):
        update.update(optimizer, [update.UpdateStep([], [], []) for _ in range(count)], 1.0, sent.append)
    assert calls == ["begin", "after", "end"] * 2 and len(sent) == 2 * count
    assert leaf.tolist() == [-0.5 * count] * 2  # each of these waves has all leaves
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 1


def test_a_step_around_the_optimizers_own_may_leave_it_out_and_not_repeat_it() -> None:
    leaf, calls, sent = nn.Parameter(torch.zeros(2)), list[str](), list[Any]()
    update.update(wrapped(leaf, calls, 0), [update.UpdateStep([], [], []) for _ in range(2)], 1.0, sent.append)
    assert leaf.tolist() == [0.0, 0.0] and len(sent) == 2 and calls == ["begin", "end"]
    with pytest.raises(OptimizerError, match="several times"):
        update.update(wrapped(leaf, calls, 2), [update.UpdateStep([], [], []) for _ in range(2)], 1.0)
