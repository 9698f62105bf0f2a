"""Replacements of a module's `forward`, stacked and taken away in any order."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from deepspeed.foundation.compiler import CompiledForward
from deepspeed.foundation.replaced_forward import ReplacedForward, TrainingOnlyForward, withdraw


class Times(ReplacedForward):
    def __call__(self, x: torch.Tensor) -> Any:
        return 2 * self.inner(x)


class Layer(torch.nn.Module):
    def forward(self, hidden: torch.Tensor, scale: int = 1, *more: int, **others: Any) -> torch.Tensor:
        return hidden * scale


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_replacements_leave_in_any_order(order: tuple[int, ...]) -> None:
    layer, x = Layer(), torch.ones(2)
    stack: list[Any] = []
    compiled = lambda module: CompiledForward(module.forward, lambda inner: lambda x: 3 * inner(x))  # noqa: E731
    for kind in (compiled, Times, Times):  # what is compiled is the innermost
        layer.forward = kind(layer)
        stack.append(layer.forward)
    factors = [3, 2, 2]
    assert layer(x)[0] == 12 and copy.deepcopy(layer)(x)[0] == 1
    for number in order:
        withdraw(layer, stack[number])
        factors[number] = 1
        assert layer(x)[0] == factors[0] * factors[1] * factors[2]
    assert "forward" not in vars(layer)
    withdraw(layer, stack[0])  # it is not there any more


def test_a_forward_of_the_module_itself_comes_back() -> None:
    layer, x = Layer(), torch.ones(2)
    own = layer.forward = lambda x: 5 * x
    times = layer.forward = Times(layer)
    assert layer(x)[0] == 10
    withdraw(layer, times)
    assert layer.forward is own


def test_arguments_by_name_and_place() -> None:
    forward = TrainingOnlyForward(Layer())
    named = forward.named((torch.ones(1), 3), {"extra": 4})
    assert list(named) == ["hidden", "scale", "extra"] and forward.names == ["hidden", "scale"]
    assert forward.call(named, 2).item() == 3 and forward.call(named, 1).item() == 3
    assert list(forward.named((1, 2, 3), {})) == ["hidden", "scale", "argument 2"]
