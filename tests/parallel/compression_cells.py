"""Cells of compression's table of same numbers: a technique under an engine, and beside it one plain process."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from tests.parity.cells import TIERS, masters, published, tier_of
from tests.parity.configs import config
from tests.parity.reference import DTYPES, Reference, largest_difference

STEPS, HEADS, RATIO = 5, 4, 0.5
RATES = {"sgd": 0.2, "adamw": 1e-2}
TECHNIQUES = (
    "weights", "global", "rows", "heads", "channels", "ramp", "movement", "taylor rows", "taylor heads",
    "fake 8", "fake 3", "activations",
)  # fmt: skip
PLACES = [(stage, tier) for stage in range(4) for tier in ("device", "cpu") if stage or tier == "device"]


@dataclass(frozen=True)
class Cell:
    """One run; `optimizer` is `sgd` or `adamw`, `tier` a key of `TIERS`."""

    technique: str
    stage: int
    tier: str
    ranks: int
    precision: str
    accumulation: int
    optimizer: str

    @property
    def offset(self) -> int:
        """Applied steps before the first mask: none where it is formed from equal weights."""
        return 0 if self.technique in ("global", "rows") else 1 if self.precision == "bf16" else 2


def product() -> list[Cell]:
    axes = itertools.product(TECHNIQUES, PLACES, (1, 2, 3), ("fp32", "bf16"), (1, 3), ("sgd", "adamw"))
    return [Cell(name, *place, *rest) for name, place, *rest in axes]


@cache
def pairwise() -> list[Cell]:
    """Few of the cells, in which every two settings that occur together in one of them do so again."""
    cells = product()
    left = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while left:
        best = max(cells, key=lambda cell: len(left & _pairs(cell)))
        chosen.append(best)
        left -= _pairs(best)
    return chosen


@cache
def _pairs(cell: Cell) -> frozenset[Any]:
    return frozenset(itertools.combinations(vars(cell).items(), 2))


# -- the model --------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions, attention and an FFN; no cut over ranks is even."""

    def __init__(self, linear: Any = nn.Linear) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(2, 6, 3, padding=1), nn.Conv1d(6, 4, 3, padding=1)
        self.query, self.key, self.value = (linear(4, 2 * HEADS) for _ in range(3))
        self.out = linear(2 * HEADS, 4)
        self.up, self.down = linear(4, 10), linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.conv1.weight.dtype)
        x = self.conv2(torch.tanh(self.conv1(x))).transpose(1, 2)
        split = [one(x).unflatten(-1, (HEADS, 2)).transpose(1, 2) for one in (self.query, self.key, self.value)]
        weights = torch.softmax(split[0] @ split[1].transpose(-1, -2), -1)
        x = x + self.out((weights @ split[2]).transpose(1, 2).flatten(-2))
        return self.down(torch.tanh(self.up(x)))


def net(linear: Any = nn.Linear) -> Net:
    torch.manual_seed(3)
    return Net(linear)


def loss_of(model: Any, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return model(torch.randn(2, 2, 5, generator=generator)).float().square().mean()


def optimizer_of(name: str) -> Any:
    if name == "sgd":
        return lambda params: torch.optim.SGD(params, lr=RATES[name], momentum=0.9, weight_decay=0.01)
    return lambda params: torch.optim.AdamW(params, lr=RATES[name], eps=1e-4)


# -- the plain process ------------------------------------------------------------------------------------------------

LINEARS = ("query", "key", "value", "out", "up", "down")
# per kind of unit: the scored tensor, units, and (tensor, axis, elements per unit) of all that is coupled
UNITS: dict[str, tuple[str, int, list[tuple[str, int, int]]]] = {
    "rows": ("up.weight", 10, [("up.weight", 0, 1), ("up.bias", 0, 1), ("down.weight", 1, 1)]),
    "heads": (
        "out.weight",
        HEADS,
        [("out.weight", 1, 2), *((f"{n}.{p}", 0, 2) for n in ("query", "key", "value") for p in ("weight", "bias"))],
    ),
    "channels": ("conv1.weight", 6, [("conv1.weight", 0, 1), ("conv1.bias", 0, 1), ("conv2.weight", 1, 1)]),
}


def fake(values: torch.Tensor, bits: int, dims: Any = None) -> torch.Tensor:
    """Symmetric levels, written down once more; a scale over `dims`, else one."""
    wide = values.detach().float()
    largest = wide.abs().max() if dims is None else wide.abs().amax(dims, keepdim=True)
    scale = (2 * largest / 2**bits).clamp(min=torch.finfo(torch.float32).tiny)
    return ((wide / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * scale).to(values.dtype)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return seen

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def quantized_linear(bits: int, of: str) -> type[nn.Linear]:
    class Quantized(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            weight = self.weight
            if of == "weight":
                weight = Through.apply(weight, fake(weight, bits))
            else:
                input = Through.apply(input, fake(input, bits, -1))  # noqa: A001
            return functional.linear(input, weight, self.bias)

    return Quantized


def largest(scores: torch.Tensor, ratio: float) -> torch.Tensor:
    """Flags of the largest share; the lower index first among equals."""
    flat = scores.reshape(-1)
    flags = torch.zeros(flat.numel())
    flags[torch.sort(flat, descending=True, stable=True).indices[: -int(-round(flat.numel() * ratio, 6) // 1)]] = 1
    return flags.view_as(scores)


class Masked(Reference):
    """One plain process with float masks; masters stay dense while a later mask may revive what an earlier dropped."""

    def __init__(self, cell: Cell) -> None:
        bits = {"fake 8": (8, "weight"), "fake 3": (3, "weight"), "activations": (8, "input")}.get(cell.technique)
        model = net(nn.Linear if bits is None else quantized_linear(*bits))
        super().__init__(model, optimizer_of(cell.optimizer), cell.ranks, cell.accumulation, cell.precision)
        self.cell, self.steps = cell, 0
        self.params = dict(self.master.named_parameters())
        self.hard: dict[str, torch.Tensor] = {}
        self.veil: dict[str, torch.Tensor] = {}
        self.scores: dict[str, torch.Tensor] = {}
        self.first: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            self.form()

    def _apply(self, gradients: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self.grow(gradients)
            for name, flags in self.hard.items():
                gradients[name] = gradients[name] * flags
            super()._apply(gradients)
            for name, flags in self.hard.items():
                self.params[name].mul_(flags)
            self.steps += 1
            self.form()
        self.first = self.first or self.parameters()

    def grow(self, gradients: dict[str, torch.Tensor]) -> None:
        technique = self.cell.technique
        if technique == "movement":
            for name in LINEARS:
                key = f"{name}.weight"
                moved = -RATES[self.cell.optimizer] * gradients[key] * self.params[key]
                self.scores[key] = self.scores.get(key, torch.zeros_like(moved)) + moved
        if technique.startswith("taylor"):
            _, units, slots = UNITS[technique.split()[1]]
            grown = torch.zeros(units, dtype=torch.float64)
            for key, axis, size in slots:
                moved = -gradients[key].double() * self.params[key].double()
                grown += moved.transpose(0, axis).reshape(units, -1).sum(1) if size else moved
            self.scores["units"] = self.scores.get("units", torch.zeros(units)) + grown.square()

    def form(self) -> None:
        """Masks that are due after this step."""
        kind, offset, at = self.cell.technique, self.cell.offset, self.steps
        if kind in ("ramp", "movement"):
            if not offset <= at <= 4 or at == 0:
                self.publish()
                return
            done = (at - offset) / (4 - offset)
            ratio = 1 - (1 - RATIO) * (1 - (1 - done) ** 3)
            self.veil = {f"{n}.weight": self.of_weights(f"{n}.weight", ratio) for n in LINEARS}
            self.hard = dict(self.veil) if at == 4 else {}
        elif at == offset and not kind.startswith(("fake", "act")):
            self.hard = self.veil = self.once(kind)
        else:
            self.publish()
            return
        for name, flags in self.hard.items():
            self.params[name].mul_(flags)
            for value in self.optimizer.state[self.params[name]].values():
                if isinstance(value, torch.Tensor) and value.shape == flags.shape:
                    value.mul_(flags)
        self.publish()

    def of_weights(self, name: str, ratio: float) -> torch.Tensor:
        return largest(self.scores[name] if self.cell.technique == "movement" else self.params[name].abs(), ratio)

    def once(self, kind: str) -> dict[str, torch.Tensor]:
        names = [f"{name}.weight" for name in LINEARS]
        if kind == "weights":
            return {name: self.of_weights(name, RATIO) for name in names}
        if kind == "global":
            flat = torch.cat([self.params[name].abs().view(-1) for name in names])
            parts = largest(flat, RATIO).split([self.params[name].numel() for name in names])
            return {name: part.view_as(self.params[name]) for name, part in zip(names, parts, strict=True)}
        scored, units, slots = UNITS[kind.split()[-1]]
        size, axis = next((size, axis) for name, axis, size in slots if name == scored)
        score = self.scores.get("units")
        if score is None:
            score = self.params[scored].double().abs().transpose(0, axis).reshape(units, -1).sum(1)
        keep, made = largest(score, RATIO), {}
        for name, axis, size in slots:
            wide = keep.repeat_interleave(size)
            shape = [-1 if at == axis else 1 for at in range(self.params[name].dim())]
            made[name] = wide.view(shape).expand_as(self.params[name])
        return made

    def publish(self) -> None:
        for replica in self.copies:
            for name, param in replica.named_parameters():
                param.copy_(self.params[name] * self.veil[name] if name in self.veil else self.params[name])


@cache
def plain(technique: str, ranks: int, precision: str, accumulation: int, optimizer: str) -> tuple[Masked, list[float]]:
    """The trained twin, and every rank's losses, rank after rank within a micro-step."""
    twin = Masked(Cell(technique, 0, "device", ranks, precision, accumulation, optimizer))
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            for rank, replica in enumerate(twin.copies):
                loss = loss_of(replica, step, micro, rank)
                twin.backward(rank, loss)
                losses.append(loss.item())
        twin.step()
    return twin, losses


# -- the engine -------------------------------------------------------------------------------------------------------


def section_of(cell: Cell) -> dict[str, Any]:
    """`compression_training` of a cell."""
    kind = cell.technique
    if kind.startswith("fake"):
        bits = int(kind.split()[1])
        group: dict[str, Any] = {"params": {"start_bits": bits, "target_bits": bits, "quantization_period": 0}}
        return _technique("weight_quantization", group, list(LINEARS), quantize_weight_in_forward=True)
    if kind == "activations":
        return _technique("activation_quantization", {"params": {"bits": 8}}, list(LINEARS), schedule_offset=0)
    shared: dict[str, Any] = {"schedule_offset": cell.offset, "method": "l1"}
    group = {"params": {"dense_ratio": RATIO}}
    if kind in ("ramp", "movement"):
        shared |= {"schedule_offset_end": 4, "schedule": "cubic", "method": "topk" if kind == "movement" else "l1"}
    if kind in ("weights", "global", "ramp", "movement"):
        scope = "global" if kind == "global" else "layer"
        return _technique("sparse_pruning", group, list(LINEARS), scope=scope, **shared)
    shared |= {"physical": False, **({"criterion": "taylor"} if kind.startswith("taylor") else {})}
    named = {
        "rows": ("row_pruning", ["up"], [["down"]]),
        "heads": ("head_pruning", ["^out$"], [["query", "key", "value"]]),
        "channels": ("channel_pruning", ["conv1"], [["conv2"]]),
    }
    technique, modules, related = named[kind.split()[-1]]
    if technique == "head_pruning":
        shared["num_heads"] = HEADS
    return _technique(technique, {**group, "related_modules": related}, modules, **shared)


def _technique(name: str, group: dict[str, Any], modules: list[str], **shared: Any) -> dict[str, Any]:
    return {
        name: {
            "shared_parameters": {"enabled": True, **shared},
            "different_groups": {"g": {**group, "modules": modules}},
        }
    }


def missed(cell: Cell) -> list[str]:
    """What a cell misses of the bars, in words. All ranks call together."""
    import deepspeed

    model = net()
    settings = config(cell.stage, model, cell.precision, cell.accumulation, zero=tier_of(cell.tier))
    optimizer = optimizer_of(cell.optimizer)(list(model.parameters()))
    losses, first = [], None
    with deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=optimizer,
        config=settings | {"compression_training": section_of(cell)},
    )[0] as engine:
        for step in range(STEPS):
            for micro in range(cell.accumulation):
                loss = loss_of(engine, step, micro, dist.get_rank())
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            first = first or masters(engine)
        last, seen = masters(engine), published(engine)
    told: list[Any] = [None] * cell.ranks
    dist.gather_object(losses, told if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return []  # all ranks saw the same tensors; one of them replays the plain process
    every = [loss for together in zip(*told, strict=True) for loss in together]
    return list(_compared(cell, every, first or {}, last, seen))


def _compared(
    cell: Cell, losses: list[float], first: dict[str, Any], last: dict[str, Any], seen: dict[str, Any]
) -> Iterable[str]:
    twin, theirs = plain(cell.technique, cell.ranks, cell.precision, cell.accumulation, cell.optimizer)
    wanted = twin.parameters()
    apart = max(abs(a - b) for a, b in zip(losses, theirs, strict=True)) / (sum(theirs) / len(theirs))
    quantized, exact = cell.technique.startswith(("fake", "act")), cell.precision == "fp32"
    # A rounding to a level turns one ulp of difference into a whole level; AdamW makes it larger.
    bar = (1e-3 if quantized else 1e-5) if exact else (2e-2 if quantized else 1e-2)
    if apart > bar:
        yield f"losses {apart:.3g} > {bar:g}"
    if not quantized:
        other = sum(int(((last[name] == 0) != (value == 0)).sum()) for name, value in wanted.items())
        if other:
            yield f"{other} bits of masks differ"
        for name, flags in twin.veil.items():
            if not torch.equal(seen[name] == 0, flags == 0):
                yield f"forward sees other zeros in {name}"
    after_one = largest_difference(first, twin.first)
    if after_one > 1e-6 and not (quantized and cell.optimizer == "adamw"):
        yield f"masters after one step {after_one:.3g} > 1e-06"
    if exact and not quantized and (gap := largest_difference(last, wanted)) > 1e-6:
        yield f"masters {gap:.3g} > 1e-06"
    if exact and quantized and cell.optimizer == "sgd" and cell.ranks <= 2 and cell.accumulation == 1:
        different = [name for name, value in wanted.items() if not torch.equal(last[name], value)]
        if different:
            yield f"not bit-equal: {different}"
    dtype = DTYPES[cell.precision]
    wrong = [n for n, v in seen.items() if n not in twin.veil and not torch.equal(v, last[n].to(dtype))]
    if wrong:
        yield f"published is not the master: {wrong}"


def run_cells(cells: list[Cell]) -> list[str]:
    """One line per cell that misses a bar."""
    assert all(cell.tier in TIERS for cell in cells)
    found = [(cell, missed(cell)) for cell in cells]
    return [f"{cell}: {'; '.join(words)}" for cell, words in found if words]
