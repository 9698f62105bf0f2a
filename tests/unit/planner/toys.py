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
