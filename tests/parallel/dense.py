"""One process that trains the dense model on every rank's samples, and how far an engine of slices is from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import Mesh
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from deepspeed.zero.layout.placement import placement_of

LossOf = Callable[[Any, int, int], torch.Tensor]  # model, micro-step, data-parallel rank


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def share_of(param: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What this rank has of a global tensor."""
    for cut in placement_of(param).cuts:
        assert all(start >= 0 for start, _ in cut.segments)
        whole = torch.cat([whole.narrow(cut.dim, start, length) for start, length in cut.segments], cut.dim)
    return whole


class Dense:
    """The model as it was, on one process."""

    def __init__(self, model: nn.Module, optimizer: Any, ranks: int, accumulation: int = 1, clip: float = 0.0) -> None:
        self.model, self.ranks, self.accumulation, self.clip = copy.deepcopy(model), ranks, accumulation, clip
        self.optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad])
        self.norm = 0.0

    def window(self, first: int, loss_of: LossOf) -> list[float]:
        """One update; the mean loss of all ranks in each micro-step."""
        self.optimizer.zero_grad()
        found = []
        for step in range(first, first + self.accumulation):
            losses = [loss_of(self.model, step, rank) for rank in range(self.ranks)]
            (torch.stack(losses).sum() / (self.ranks * self.accumulation)).backward()
            found.append(float(torch.stack(losses).mean()))
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.norm = float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        return found

    def step(self) -> None:
        self.optimizer.step()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


def apart(engine: Any, whole: dict[str, torch.Tensor], read: Callable[[Any], Any]) -> float:
    """The largest difference over the largest norm of what is compared."""
    params = dict(engine.module.named_parameters())
    largest = max((float(t.norm()) for t in whole.values()), default=1.0)
    worst = 0.0
    for name, wanted in whole.items():
        ours = read(params[name])
        assert ours is not None, name
        worst = max(worst, float((ours.float() - wanted.float()).norm()))
    return worst / largest


def compared(
    engine: Any, dense: Dense, mesh: Mesh, loss_of: LossOf, windows: int
) -> Iterator[tuple[float, float, float, float]]:
    """Trains both; gives the relative distances of losses, gradients, norms and parameters of each window."""
    at = mesh.coordinates
    rank, steps = at["dp_replicate"] * mesh.size("dp_shard") + at["dp_shard"], dense.accumulation
    for window in range(windows):
        theirs = dense.window(window * steps, loss_of)
        losses, gradients = [], 0.0
        for micro in range(steps):
            loss = loss_of(engine, window * steps + micro, rank)
            engine.backward(loss)
            if micro == steps - 1:
                gradients = apart(engine, dense.gradients() if not dense.clip else {}, safe_get_full_grad)
            engine.step()
            every = loss.detach().clone()
            torch.distributed.all_reduce(every)
            losses.append(float(every) / mesh.world)
        dense.step()
        gap = max(abs(a - b) / abs(b) for a, b in zip(losses, theirs, strict=True))
        norm = abs(float(engine.get_global_grad_norm()) - dense.norm) / dense.norm
        trained = {name: p for name, p in dense.parameters().items() if dense.model.get_parameter(name).requires_grad}
        yield gap, gradients, norm, apart(engine, trained, safe_get_full_fp32_param)
