"""Simulated model parallelism: plain modules that hold a slice, whose gradients are known, and their dense twin.

The loss is linear in every parameter, with coefficients drawn by (name, step, sample, part): each rank computes a part
of a gradient that is known as a whole. On small integers all sums are exact, so their order cannot be seen.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import Mesh
from deepspeed.zero.layout.placement import Cut, Placement, Relation, place

WIDTH, VOCABULARY, INNER = 6, 10, 12
TIED = "embed.weight"


@dataclass(frozen=True)
class Kind:
    """How a global tensor is shared out over `tp`."""

    shape: tuple[int, ...]
    how: str = "equal"  # equal, partial, cut, fused
    dim: int = 0
    frozen: bool = False


BLOCK = {
    "column": Kind((INNER, WIDTH), "cut", 0),
    "row": Kind((WIDTH, INNER), "cut", 1),
    "fused": Kind((3 * INNER, WIDTH), "fused", 0),
    "heads": Kind((4, WIDTH), "partial"),
    "norm": Kind((WIDTH,), "equal"),
    "frozen": Kind((WIDTH,), "equal", frozen=True),
}


def kinds(blocks: int, tied: bool) -> dict[str, Kind]:
    """Every global tensor by name."""
    found = {f"blocks.{i}.{name}": kind for i in range(blocks) for name, kind in BLOCK.items()}
    return {TIED: Kind((VOCABULARY, WIDTH), "cut", 0), **found} if tied else found


def segments(size: int, parts: int, index: int) -> tuple[tuple[int, int], ...]:
    """An equal share of a dim, padded at its end where it does not divide."""
    step = -(-size // parts)
    low, high = min(step * index, size), min(step * (index + 1), size)
    return (*([(low, high - low)] if high > low else []), *([(-1, step - high + low)] if high - low < step else []))


def cut_of(kind: Kind, tp: int, index: int) -> Cut | None:
    """What slice `index` of `tp` has."""
    if tp == 1 or kind.how not in ("cut", "fused"):
        return None
    if kind.how == "cut":
        return Cut(kind.dim, kind.shape[kind.dim], segments(kind.shape[kind.dim], tp, index))
    third = kind.shape[kind.dim] // 3
    share = segments(third, tp, index)
    return Cut(kind.dim, 3 * third, tuple((start + i * third, n) for i in range(3) for start, n in share))


def local(kind: Kind, whole: torch.Tensor, tp: int, index: int) -> torch.Tensor:
    """This slice's tensor of a global one; padding is zero."""
    cut = cut_of(kind, tp, index)
    if cut is None:
        return whole.clone()
    shape = list(whole.shape)
    pieces = []
    for start, length in cut.segments:
        shape[cut.dim] = length
        pieces.append(whole.narrow(cut.dim, start, length) if start >= 0 else whole.new_zeros(shape))
    return torch.cat(pieces, cut.dim)


def drawn(shape: tuple[int, ...], *key: Any, exact: bool) -> torch.Tensor:
    """Small integers, or normal numbers, that belong to a key."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    if exact:
        return torch.randint(-3, 4, shape, generator=generator).float()
    return torch.randn(shape, generator=generator)


def stage_of(name: str, blocks: int, stages: int, empty: bool) -> set[int]:
    """The stages that hold a tensor."""
    if name == TIED:
        return {0, stages - 1}
    return {0} if empty else {int(name.split(".")[1]) * stages // blocks}


class Slices(nn.Module):
    """One rank's share of the model: a block per global block, and the tied weight at both ends."""

    def __init__(self, mesh: Mesh, blocks: int, tied: bool, empty: bool, exact: bool) -> None:
        super().__init__()
        self.tp, self.exact = mesh.size("tp"), exact
        self.at, stages = mesh.coordinates, mesh.size("pp")
        self.kinds = kinds(blocks, tied)
        for name, kind in self.kinds.items():
            if self.at["pp"] not in stage_of(name, blocks, stages, empty):
                continue
            whole = drawn(kind.shape, name, "value", exact=exact)
            param = nn.Parameter(local(kind, whole, self.tp, self.at["tp"]), requires_grad=not kind.frozen)
            relations = {"tp": Relation.PARTIAL} if kind.how == "partial" else {}
            if name == TIED and stages > 1:
                relations["pp"] = Relation.PARTIAL
            cut = cut_of(kind, self.tp, self.at["tp"])
            if cut is not None:
                relations["tp"] = Relation.SHARD
            place(param, Placement((cut,) if cut is not None else (), relations))
            self._hold(name, param)

    def _hold(self, name: str, param: nn.Parameter) -> None:
        home: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in home._modules:
                home.add_module(part, nn.ModuleList() if part == "blocks" else Share())
            child = home._modules[part]
            assert child is not None
            home = child
        home.register_parameter(last, param)

    def forward(self, step: int, sample: int) -> torch.Tensor:
        """The part of the loss that this rank computes."""
        losses = [torch.zeros((), requires_grad=True)]
        for home, module in self.named_modules():
            if isinstance(module, Share):
                losses.append(module(self, home, step, sample))
        return torch.stack(losses).sum()

    def coefficient(self, name: str, step: int, sample: int) -> torch.Tensor:
        """The gradient of a local tensor by this rank's part of a sample."""
        kind = self.kinds[name]
        parts = (self.at["sp"], self.at["pp"] if name == TIED else 0, self.at["tp"] if kind.how == "partial" else 0)
        gradient = local(kind, drawn(kind.shape, name, step, sample, *parts, exact=self.exact), self.tp, self.at["tp"])
        cut = cut_of(kind, self.tp, self.at["tp"])
        if cut is not None and cut.padding:  # padding has no gradient, whatever a layer computes for it
            at = 0
            for start, length in cut.segments:
                if start < 0:
                    gradient.narrow(cut.dim, at, length).fill_(99.0)
                at += length
        return gradient


class Share(nn.Module):
    """Parameters of one block."""

    def forward(self, model: Slices, home: str, step: int, sample: int) -> torch.Tensor:
        found = torch.zeros(())
        for name, param in self._parameters.items():
            if param is not None:
                found = found + (param.float() * model.coefficient(f"{home}.{name}", step, sample)).sum()
        return found


class Twin:
    """The dense model on one process, stepped by torch.

    Args:
        mesh: whose shares are summed.
    """

    def __init__(self, mesh: Mesh, blocks: int, tied: bool, exact: bool, clip: float, optimizer: Any) -> None:
        self.mesh, self.exact, self.clip = mesh, exact, clip
        self.kinds = kinds(blocks, tied)
        self.params = {
            name: nn.Parameter(drawn(kind.shape, name, "value", exact=exact), requires_grad=not kind.frozen)
            for name, kind in self.kinds.items()
        }
        self.optimizer = optimizer([p for p in self.params.values() if p.requires_grad])
        self.norm = 0.0

    def _parts(self, name: str) -> Iterator[tuple[int, int, int]]:
        kind, mesh = self.kinds[name], self.mesh
        ends = sorted({0, mesh.size("pp") - 1}) if name == TIED else [0]
        partial = range(mesh.size("tp")) if kind.how == "partial" else [0]
        return itertools.product(range(mesh.size("sp")), ends, partial)

    def window(self, steps: list[int]) -> None:
        """One update after the micro-batches `steps`."""
        ranks = self.mesh.size("dp_replicate", "dp_shard")
        for name, param in self.params.items():
            if param.requires_grad:
                total = torch.zeros(param.shape, dtype=torch.float64)
                for step, sample, parts in itertools.product(steps, range(ranks), self._parts(name)):
                    total += drawn(self.kinds[name].shape, name, step, sample, *parts, exact=self.exact).double()
                param.grad = (total / (ranks * len(steps))).float()
        squares = [p.grad.double().square().sum() for p in self.params.values() if p.grad is not None]
        self.norm = float(torch.stack(squares).sum().sqrt())
        if self.clip and self.norm > self.clip:
            for param in self.params.values():
                if param.grad is not None:
                    param.grad.mul_(self.clip / (self.norm + 1e-6))
        self.optimizer.step()


def share_of(mesh: Mesh, name: str, whole: torch.Tensor, all_kinds: dict[str, Kind]) -> torch.Tensor:
    """What this rank's copy of a global tensor is."""
    return local(all_kinds[name], whole, mesh.size("tp"), mesh.coordinates["tp"])
