"""Parameters of every odd kind train as in plain PyTorch, at every stage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.tiny import STAGES, rows, sgd, start


class Odd(nn.Module):
    """Parameters of every odd kind, one part of them at a time."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        if kind == "empty, 0-dim":
            self.none, self.one = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.0))
        elif kind == "integer":
            self.ids = nn.Parameter(torch.arange(5), requires_grad=False)
            self.flags = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
        elif kind == "strides":
            self.conv = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
            self.turned = nn.Parameter(torch.randn(4, 3).t())
        elif kind == "two names":
            self.again = nn.Linear(6, 6)
            self.again.weight = self.alias = self.a.weight
        elif kind == "sparse":
            self.table = nn.Embedding(10, 6, sparse=True)
        elif kind == "hooks":
            self.a.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
            self.a.register_forward_hook(lambda m, _i, out: out + m.weight.sum())
            self.b.register_full_backward_hook(lambda _m, grads, _o: tuple(None if g is None else g * 2 for g in grads))
            self.b.register_full_backward_pre_hook(lambda _m, grads: (grads[0] * 3,))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sparse":
            return self.b(self.table((x.abs() * 3).long().clamp(max=9)))
        h = self.a(x).tanh()
        if self.kind == "empty, 0-dim":
            return self.b(h) * self.one + self.none.sum()
        if self.kind == "integer":
            return self.b(h) * self.ids.sum() * self.flags.sum()
        if self.kind == "strides":
            return self.b(h) @ self.turned + self.conv(x.view(-1, 1, 2, 3)).mean()
        if self.kind == "two names":
            return self.b(self.again(h) @ self.alias)
        return self.b(h)


KINDS = ("empty, 0-dim", "integer", "strides", "two names", "sparse", "hooks", "float64")


def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A loss that differentiates through the gradient of its inputs, which are leaves."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum() + model(x).square().mean()


def odd(stage: int) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for kind in (*KINDS, "gradient penalty"):
        torch.manual_seed(0)
        model = Odd(kind)
        loss_fn = penalty if kind == "gradient penalty" else lambda m, x: m(x).square().mean()
        dtype = torch.float64 if kind == "float64" else torch.float32
        model.to(dtype)
        twin = copy.deepcopy(model)
        plain = sgd([p for p in twin.parameters() if p.requires_grad])
        with start(stage, model) as engine:
            for step in range(3):
                engine.backward(loss_fn(engine, rows(step, rank).to(dtype)))
                engine.step()
                plain.zero_grad()
                for other in range(ranks):
                    (loss_fn(twin, rows(step, other).to(dtype)) / ranks).backward()
                for param in twin.parameters():
                    if param.grad is not None:
                        param.grad = param.grad.to_dense()
                plain.step()
            for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                ours = ours.detach().clone()
                assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (kind, name)
                gap = (ours - theirs).abs().max() if ours.is_floating_point() and len(ours.view(-1)) else 0
                assert ours.is_floating_point() or torch.equal(ours, theirs), (kind, name)
                assert gap <= 1e-6, (kind, name, gap)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_odd_parameters_equal_plain_torch(workers: Any, stage: int) -> None:
    workers(2).run(odd, stage)
