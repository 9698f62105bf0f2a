"""What cannot be cut is refused by its reason before anything moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.errors import PipelineError
from deepspeed.pipe.split_model import find_layout


class _Own(torch.autograd.Function):
    """Runs blocks as reversible networks do: with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:  # type: ignore[override]
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class Net(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.own:
            return _Own.apply(x, self.blocks)
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_inside_a_function_of_the_models_own_are_refused() -> None:
    given = {"x": torch.ones(2, 4)}
    assert find_layout(Net(False), 2, given).bounds == [0, 1, 2]
    with pytest.raises(PipelineError, match=r"'blocks' run where autograd records nothing"):
        find_layout(Net(True), 2, given)
    assert find_layout(Net(True).requires_grad_(False), 2, given).bounds == [0, 1, 2], "nothing goes back through them"


def test_looking_for_the_order_keeps_no_graph_and_the_mode_that_was() -> None:
    model, seen = Net(False), []
    model.blocks[1].register_forward_hook(lambda _m, args, made: seen.append((args[0].grad_fn, made.grad_fn)))
    with torch.no_grad():
        find_layout(model, 2, {"x": torch.ones(2, 4)})
        assert not torch.is_grad_enabled()
    assert seen and all(pair == (None, None) for pair in seen)
