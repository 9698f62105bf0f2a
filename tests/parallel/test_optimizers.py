"""Every optimizer at every stage equals the dense one, and every schedule steps once per applied update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.parallel.tiny import WIDTH, Tiny, tiny

STEPS = 5
LR = 1e-2
REFUSED = {"LBFGS", "SparseAdam"}
MATRICES_ONLY = {"Muon"}  # torch's own refuses every other parameter
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
EPS = {"Adam": 1e-4, "AdamW": 1e-4, "LAMB": 1e-4}  # the default amplifies rounding in zero gradients
NAMED = ("Adam", "AdamW", "Lion", "Adagrad", "LAMB", "SGD", "Muon")


class Matrices(nn.Module):
    """Layers without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def model_for(name: str) -> nn.Module:
    torch.manual_seed(0)
    return Matrices() if name in MATRICES_ONLY else Tiny()


def params_of(name: str) -> dict[str, Any]:
    return {"lr": LR} | ({"eps": EPS[name]} if name in EPS else {})


def client(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A factory of the class of torch.optim."""
    return lambda parameters: CLASSES[name](parameters, **params_of(name))


def named(name: str) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """A factory of the class that a name in the JSON stands for."""
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import FusedLion
    from deepspeed.ops.muon import Muon

    kinds = {"Adam": FusedAdam, "AdamW": FusedAdam, "Lion": FusedLion, "LAMB": FusedLamb, "Muon": Muon}
    return lambda parameters: kinds.get(name, CLASSES.get(name))(parameters, **params_of(name))


def trained(stage: int, name: str, by_json: bool) -> dict[str, torch.Tensor]:
    """Masters after a few steps on this rank's engine."""
    model = Tiny() if False else (tiny() if by_json else model_for(name))
    how = {"optimizer": None, "extra": name} if by_json else {}
    raise NotImplementedError(how, model, stage)
