"""Which modules of experts can be divided, by their structure and by a trial."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.moe.calls import Choices
from deepspeed.moe.structure import ExpertStructure, find_experts, run_pairs, tried


class Packed(nn.Module):
    """Linear experts; `after` is applied to the sum over choices."""

    def __init__(self, count: int = 4, width: int = 6, after: Any = None) -> None:
        super().__init__()
        self.num_experts, self.after = count, after
        self.up = nn.Parameter(torch.randn(count, width, width))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.einsum("th,tkhw->tkw", hidden, self.up[index])
        total = (out * weights.unsqueeze(-1)).sum(1)
        return total if self.after is None else self.after(total)


class Children(nn.ModuleList):
    """Experts that are modules of their own."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__(nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)) for width in widths)
        self.num_experts = len(widths)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            row, choice = (index == expert).nonzero(as_tuple=True)
            out = out.index_add(0, row, self[expert](hidden[row]) * weights[row, choice, None])
        return out


def why_not(module: nn.Module, ep: int = 2) -> str:
    return tried(module, next(find_experts(module))[2], ep)[1]


@pytest.mark.parametrize("ep", [2, 16, 64])
def test_any_number_of_ranks(ep: int) -> None:
    assert why_not(Packed(64), ep) == ""


def test_experts_of_transformers_on_as_many_ranks() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    torch.manual_seed(0)
    experts = MixtralExperts(MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=32))
    for param in experts.parameters():
        nn.init.normal_(param)
    assert why_not(experts, 32) == ""


def test_parameters_of_zeros_hide_nothing() -> None:
    module = Packed(after=torch.tanh)
    assert "differ from the whole" in why_not(module)
    nn.init.zeros_(module.up)
    assert "differ from the whole" in why_not(module)
    linear = Packed()
    nn.init.zeros_(linear.up)
    assert why_not(linear) == ""


def test_what_cannot_be_divided_is_refused() -> None:
    replaced = Packed()
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    assert "replaced on the object" in why_not(replaced)
    packed = Packed()
    packed.register_buffer("scale", torch.ones(4))
    assert "'scale'" in why_not(packed)
    children = Children([8, 8])
    children[1].register_buffer("scale", torch.ones(1))
    assert "'1.scale'" in why_not(children)
    assert "different shapes" in why_not(Children([8, 12]))
    assert why_not(Children([8, 8])) == ""


def squared(module: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for expert in index.unique().tolist():
        row, choice = torch.where(index == expert)
        inner = hidden[row] @ module.up[expert]
        out = out.index_add(0, row, inner * inner.sigmoid() * inner * weights[row, choice, None])
    return out


def test_rows_that_pad_overflow_in_no_expert() -> None:
    """In fp16, a large row suits an expert with small weights, and would overflow in the other."""
    module = Packed(2, 4).half()
    with torch.no_grad():
        module.up[0], module.up[1] = 100.0, 1e-3
    hidden = torch.ones(2, 4, dtype=torch.float16)
    hidden[0], hidden[1] = 200.0, 0.01
    hidden.requires_grad_()
    index, weights = torch.tensor([[1], [0]]), torch.ones(2, 1, dtype=torch.float16)
    forward = functools.partial(squared, module)
    run_pairs(ExpertStructure((2,), ("up",), (), (Choices(),)), forward, hidden, index, weights, 1).sum().backward()
    of_rows, of_weights = hidden.grad, module.up.grad
    hidden.grad = module.up.grad = None
    forward(hidden, index, weights).sum().backward()
    assert hidden.grad is not None and of_rows is not None and hidden.grad.isfinite().all()
    assert of_rows.isfinite().all() and of_weights is not None and of_weights.isfinite().all()
