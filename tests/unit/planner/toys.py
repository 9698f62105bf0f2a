"""What plans over axes are made for: rows of a feed-forward on a machine that is not there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.simulator.machine import Machine

RATES = [[64, 1e10], [1024, 5e10]]
MACHINE = Machine(4, 1 << 30, {"fp32": RATES, "bf16": RATES}, 1e10, 1e-6, 1e9, shared=True)
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
WIDTH, TOKENS, LAYERS = 64, 32, 2


class Feed(nn.Module):
    """The block of a decoder that is cut by its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Some of them."""

    depth = LAYERS

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Feed() for _ in range(self.depth))
        self.example_input_array = torch.zeros(1, 3, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def rows(count: int) -> torch.Tensor:
    return torch.zeros(count, TOKENS, WIDTH)


class FeedExperts(nn.Module):
    """Eight feed-forward blocks, of which each token chooses one."""

    num_experts = 8

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = type(self).num_experts
        self.up = nn.Parameter(torch.randn(self.num_experts, 4 * WIDTH, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(self.num_experts, WIDTH, 4 * WIDTH) / 16)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in index.unique().tolist():
            token, choice = (index == expert).nonzero(as_tuple=True)
            rows = torch.relu(hidden[token] @ self.up[expert].t()) @ self.down[expert].t()
            out = out.index_add(0, token, rows * weights[token, choice].unsqueeze(1))
        return out


class Mixture(nn.Module):
    """A router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, FeedExperts.num_experts), FeedExperts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(1, -1)
        return x + self.experts(tokens, index, weights).view_as(x)
