"""Convolutional networks of six kinds, and modules as users write them: odd ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Vgg(nn.Module):
    """Plain: convolutions one after the other; the head reads positions, not means."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.two, self.pool = nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.MaxPool2d(2)
        self.head = nn.Linear(12 * 16, 5)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.one(x)))
        return self.head(self.pool(torch.relu(self.two(x))).flatten(1))


class Residual(nn.Module):
    """A sum, and a shortcut with a convolution of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.one, self.norm1 = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.two, self.norm2 = nn.Conv2d(12, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.short = nn.Conv2d(8, 16, 1)
        self.head = nn.Linear(16, 5)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.short(x) + self.norm2(self.two(torch.relu(self.norm1(self.one(x))))))
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """Concatenations: what was computed before is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.one, self.norm1 = nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(10)
        self.two = nn.Conv2d(10, 4, 3, padding=1)
        self.head = nn.Linear(14, 5)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm1(torch.cat([x, self.one(x)], 1)))
        x = torch.cat([x, torch.relu(self.two(x))], 1)
        return self.head(x.mean((2, 3)))


class Grouped(nn.Module):
    """Convolutions in groups: as many channels of each group stay."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16)
        self.two, self.norm2 = nn.Conv2d(16, 24, 3, padding=1, groups=4), nn.BatchNorm2d(24)
        self.three = nn.Conv2d(24, 8, 1)
        self.head = nn.Linear(8, 5)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.one(x)))
        x = torch.relu(self.norm2(self.two(x)))
        return self.head(torch.relu(self.three(x)).mean((2, 3)))


class Mobile(nn.Module):
    """Depthwise and pointwise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.norm1 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.point, self.norm2 = nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12)
        self.last = nn.Conv2d(12, 8, 1)
        self.head = nn.Linear(8, 5)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.norm1(self.deep(x)))
        x = torch.relu(self.norm2(self.point(x)))
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


class UNet(nn.Module):
    """Squeeze and excitation, a transposed convolution, and a skip over both; it gives a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 2, stride=2)
        self.squeeze, self.excite = nn.Conv2d(12, 4, 1), nn.Conv2d(4, 12, 1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.out = nn.Conv2d(14, 2, 1)
        self.example_input_array = torch.randn(2, 3, 8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.down(x))
        y = torch.relu(self.deep(x))
        y = y * torch.sigmoid(self.excite(torch.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return self.out(torch.cat([x, torch.relu(self.up(y))], 1))


# Per kind: the convolutions that are named, and the channels that are left of every module.
KINDS: dict[type[nn.Module], tuple[list[str], dict[str, int]]] = {
    Vgg: (["one", "two"], {"one": 4, "norm": 4, "two": 6, "head": 5}),
    Residual: (["stem", "one", "two"], {"stem": 4, "one": 6, "two": 8, "short": 8, "norm2": 8}),
    Dense: (["stem", "one", "two"], {"stem": 3, "one": 2, "norm1": 5, "two": 2}),
    Grouped: (["one", "two", "three"], {"one": 8, "two": 12, "norm2": 12, "three": 4}),
    Mobile: (["stem", "point", "last"], {"stem": 4, "deep": 4, "point": 6, "last": 4}),
    UNet: (["down", "deep", "squeeze"], {"down": 4, "deep": 6, "squeeze": 2, "excite": 6, "up": 6, "out": 2}),
}


def lively(model: Any) -> Any:
    """Norms with statistics and biases that hide nothing; in evaluation mode."""
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
    return model.eval()


# -- modules as users write them --------------------------------------------------------------------------------------


class Unused(nn.Module):
    """A Linear that forward never calls, beside rows that are pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.idle = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Called(Unused):
    """The same Linear twice in one forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) + torch.relu(self.up(-x)))


class Functional(Unused):
    """Weights that are read, modules that are not called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.up.weight, self.up.bias)
        return nn.functional.linear(torch.relu(hidden), self.down.weight, self.down.bias)


class Twins(Unused):
    """Two Linears with one weight; the second has a bias of its own, and nothing says what it feeds."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(6, 8)
        self.other.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) + torch.relu(self.other(x)))


class Loose(Unused):
    """A parameter outside of any Linear that goes with the rows, and is not named."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)) * self.scale)


class Own(nn.Linear):
    """A subclass of Linear with an argument and a parameter more."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(1) * 1.5)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        return super().forward(x) * self.gain * (2 if twice else 1)


class Subclassed(Unused):
    def __init__(self) -> None:
        super().__init__()
        self.up = Own(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x, twice=True)))


class Normed(Unused):
    """A norm between the rows and their reader: what is masked changes its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.relu(self.up(x))))


class Lifted(Unused):
    """An activation that is not zero at zero: rows alone would still speak, their partner's columns are masked too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.up(x)))
