"""Random programs of which every rank makes its own calls, and what one process says must come of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.parallel.tiny import loss_of, rows, tiny

LR = 0.1
MEAN, SUM, ITEMS = 1, 2, 4
Call = tuple[Any, ...]


class Thrown(Exception):
    """An error of the user's own, which the program catches."""


def micro(number: int, how: str = "mean") -> list[Call]:
    """Forward, backward and step."""
    return [("backward", number, how), ("step",)]


def program(draw: random.Random, ranks: int) -> list[list[Call]]:
    """The calls of each rank: a sound program, and on some ranks a few changes that may or may not matter."""
    steps, number, how = draw.choice((1, 2, 3)), 0, draw.choice(("mean", "mean", "items", "sum"))
    common: list[Call] = [("batch", steps)]
    for _ in range(draw.randrange(2, 4)):
        for _ in range(steps):
            number += 1
            common += micro(number, how)
        common += draw.choice(([], [], [("zero",)], [("flush",)], [("lr", draw.choice((0.1, 0.05)))]))
    if draw.random() < 0.4 and steps > 1:  # a window that is not full; the flush at the end applies it
        common += micro(number + 1, how)
    programs = [[*common] for _ in range(ranks)]
    for _ in range(draw.choice((0, 1, 1, 1, 2))):
        _change(draw, draw.choice(programs) if draw.random() < 0.8 else None, programs)
    return [[*calls, ("flush",)] for calls in programs]


CHANGES: dict[str, list[Call]] = {
    "boundary on": [("boundary", True)],
    "boundary off": [("boundary", False)],
    "zero": [("zero",)],
    "flush": [("flush",)],
    "batch": [("batch", 2)],
    "lr": [("lr", 0.01)],
    "read": [("read",)],
    "reduce": [("reduce",)],
    "micro": micro(50),
    "items": micro(51, "items"),
    "inside": [("inside", 52)],
    "held": [("held", 53), ("step",)],
}
REPLACED = ("skip", "throw", "throw early", "bare", "both", "items", "mean", "sum", "held", "nothing")


def _change(draw: random.Random, one: list[Call] | None, every: list[list[Call]]) -> None:
    """Change one rank's program, or with None all of them alike."""
    at = draw.randrange(1, min(len(calls) for calls in every))
    kind, added = draw.choice(REPLACED), CHANGES[draw.choice(list(CHANGES))]
    replaces = draw.random() < 0.6
    for calls in [one] if one is not None else every:
        backward = [place for place in range(len(calls)) if calls[place][0] == "backward" and place >= min(at, 2)]
        if replaces and backward:
            _, number, _ = calls[backward[0]]
            held = ("held", number)
            calls[backward[0] : backward[0] + 1] = (
                [] if kind == "skip" else [held] if kind == "held" else [("backward", number, kind)]
            )
            if kind == "nothing":
                del calls[backward[0] : backward[0] + 2]
        else:
            calls[at:at] = added


def losses(model: Any, x: torch.Tensor, how: str) -> list[torch.Tensor]:
    """What a micro-batch of this kind runs backward; "both" has two losses, "throw" one whose backward fails midway."""
    if how == "items":
        return [model(x).square().mean(-1).sum()]
    if how == "both":
        made = model(x)
        return [made.square().mean(), made.abs().mean()]
    return [loss_of(model, x)]


def throwing(module: nn.Module, early: bool) -> Any:
    """A hook that fails in the backward of the model's middle, or in its forward."""

    def fail(*_: Any) -> None:
        raise Thrown

    def hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
        if early:
            fail()
        if output.requires_grad:
            output.register_hook(fail)

    return module.get_submodule("layers.1").register_forward_hook(hook)


# -- the reference ----------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """What the engine of one rank would know."""

    number: int
    ranks: int
    stage: int
    model: nn.Module
    seen: int = 0
    steps: int = 1
    forced: bool | None = None
    ways: int = 0
    items: float = 0.0
    dirty: bool = False
    deferred: bool = False
    lr: float = LR
    gradient: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def boundary(self) -> bool:
        return (self.seen + 1) % self.steps == 0 if self.forced is None else self.forced

    def look(self, holding: bool = False) -> None:
        self.deferred |= holding or not self.boundary

    def count(self, way: int) -> None:
        """Raises where the engine raises."""
        both = self.ways | way
        if both & ITEMS and both != ITEMS:
            raise Refused
        self.ways |= way

    def drop(self) -> None:
        self.ways, self.items, self.dirty, self.deferred = 0, 0.0, False, self.steps > 1
        self.gradient = {}
        self.look()

    def meet(self, what: str, detail: int = 0) -> tuple[Any, ...]:
        rate = self.lr if what in ("step", "flush") else None
        return (what, detail, self.seen, self.steps, rate)

    def backward(self, number: int, how: str) -> None:
        handle = throwing(self.model, how == "throw early") if how.startswith("throw") else None
        x = rows(number, self.number)
        self.dirty = True
        try:
            found = losses(self.model, x, how)
            for index, loss in enumerate(found):
                bare = how == "bare" or index == 1
                way = {"items": ITEMS, "sum": SUM}.get(how, MEAN)
                if not bare:
                    self.count(way)
                    self.items += len(x) if way == ITEMS else 0
                factor = {ITEMS: 1.0, SUM: 1.0 / self.ranks}.get(way, 1.0 / (self.ranks * self.steps))
                self._run(loss, factor, retain=index + 1 < len(found))
                self.ways |= way if not bare else MEAN
        except Thrown:
            pass
        finally:
            if handle is not None:
                handle.remove()

    def _run(self, loss: torch.Tensor, factor: float, retain: bool) -> None:
        self.model.zero_grad()
        try:
            loss.backward(retain_graph=retain)
        finally:
            for name, param in self.model.named_parameters():
                if param.grad is not None:
                    self.gradient[name] = self.gradient.get(name, torch.zeros_like(param)) + factor * param.grad


class Refused(Exception):
    """The engine of this rank raises by itself."""


def follow(rank: Rank, calls: list[Call]) -> Iterator[tuple[Any, ...]]:
    """Run a rank's calls; yields where it meets the others."""
    for what, *details in calls:
        if what in ("backward", "held"):
            rank.look(what == "held")
            rank.backward(details[0], "mean" if what == "held" else details[1])
        elif what == "step":
            boundary = rank.boundary
            rank.seen += 1
            if boundary:
                yield rank.meet("step")
            else:
                rank.look()
        elif what in ("flush", "reduce") or (what == "read" and _read_meets(rank)):
            yield rank.meet(what, int(what == "read"))
        elif what == "zero":
            if rank.dirty:
                yield rank.meet("zero")
            rank.drop()
        else:
            _set(rank, what, *details)


def _read_meets(rank: Rank) -> bool:
    return rank.dirty and not (rank.deferred and rank.stage < 2 and not rank.boundary)


def _set(rank: Rank, what: str, value: Any = None) -> None:
    """Calls that change what this rank alone knows."""
    if what == "inside" or (what == "batch" and rank.seen):
        raise Refused
    if what == "boundary":
        rank.forced = value
    elif what == "batch":
        rank.steps, rank.deferred = value, value > 1
    elif what == "lr":
        rank.lr = value
    rank.look()


def expected(stage: int, programs: list[list[Call]]) -> dict[str, torch.Tensor] | str:
    """What all ranks end with; else "refused" where they meet and disagree, "apart" where one is left alone."""
    model = tiny()
    ranks = [Rank(number, len(programs), stage, copy.deepcopy(model)) for number in range(len(programs))]
    running = [follow(rank, calls) for rank, calls in zip(ranks, programs, strict=True)]
    while True:
        try:
            met = [next(one, None) for one in running]
        except Refused:
            return "apart"
        if all(meeting is None for meeting in met):
            return {name: param.detach() for name, param in model.named_parameters()}
        if None in met:
            return "apart"
        if any(meeting != met[0] for meeting in met) or not _agree(met[0], ranks):
            return "refused"
        what = met[0][0]  # type: ignore[index]
        if what == "step" or (what == "flush" and ranks[0].seen):
            _update(what, model, ranks)


def _agree(meeting: tuple[Any, ...], ranks: list[Rank]) -> bool:
    ways = 0
    for rank in ranks:
        ways |= rank.ways
    mixed = ways & ITEMS and ways != ITEMS
    return not mixed and not (meeting[0] == "flush" and ways == MEAN | SUM)


def _update(what: str, model: nn.Module, ranks: list[Rank]) -> None:
    ways, items, first = ranks[0].ways, sum(rank.items for rank in ranks), ranks[0]
    for rank in ranks[1:]:
        ways |= rank.ways
    rescale = first.steps / first.seen if what == "flush" and not ways & SUM else 1.0
    if ways & ITEMS:
        rescale = 1.0 / items if items else 1.0
    with torch.no_grad():
        for name, param in model.named_parameters():
            for rank in ranks:
                if name in rank.gradient:
                    param -= first.lr * rescale * rank.gradient[name]
    for rank in ranks:
        rank.seen = 0
        rank.drop()
        rank.model.load_state_dict(model.state_dict())
