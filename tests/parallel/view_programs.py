"""Random programs over views of parameters: drawn, and run side by side on an engine and on plain torch."""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.errors import ShardedParameterError
from deepspeed.zero import GatheredParameters
from tests.parity.configs import config, two_groups

WIDTH = 4
LIMITS = ("nothing", "two groups", "default")
TIERS = ("device", "cpu", "nvme")
NAMES = ("blocks.0.weight", "blocks.1.weight", "table", "out.weight", "blocks.0.bias")
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "transposed": lambda p: p.t() if p.dim() == 2 else p.view(1, -1),
    "row": lambda p: p[0],
    "slice": lambda p: p[1:, ...],
    "flat": lambda p: p.view(-1),
    "data of a row": lambda p: p.data[1],
    "detached transpose": lambda p: p.detach().transpose(0, -1),
    "expanded": lambda p: p.expand(2, *p.shape),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
}
ACTIONS = (
    *("collect",) * 4, *("forward",) * 3, *("train",) * 4, "evaluate", "save", "read", "drop", "write", "late backward",
    "use", "edit",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """One program: everything in it follows from its number."""

    number: int

    @property
    def cell(self) -> tuple[str, str, bool]:
        """(limits, tier, born under zero.Init), all combinations in turn."""
        left, limits = divmod(self.number, len(LIMITS))
        born, tier = divmod(left % (2 * len(TIERS)), len(TIERS))
        return LIMITS[limits], TIERS[tier], bool(born)


class Block(nn.Module):
    """Linear, whose module hands a view of its weight to whoever listens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.listener: Callable[[nn.Module], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.listener is not None:
            self.listener(self)
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias)) @ self.weight.t()


class Model(nn.Module):
    """Blocks, a table of its own that goes into its output as a view, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return self.out(x * self.table[1]), self.table.t()


def entries(program: Program, model: nn.Module) -> dict[str, Any]:
    """The program's `zero_optimization` entries."""
    limits, tier, _ = program.cell
    made: dict[str, Any] = {"stage3_param_persistence_threshold": 0}
    if limits != "default":
        count = two_groups(model) if limits == "two groups" else 0
        keys = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
        made |= dict.fromkeys(keys, count)
    if tier == "cpu":
        made["offload_param"] = {"device": "cpu"}
    if tier == "nvme":
        folder = tempfile.gettempdir() + "/deepspeed-tests"
        made["offload_param"] = {"device": "nvme", "max_in_cpu": 0, "nvme_path": folder}
    return made


class Side:
    """An engine, or plain torch, with what its program holds."""

    def __init__(self, model: Any, engine: Any = None) -> None:
        self.model, self.engine = model, engine
        self.held: list[tuple[str, torch.Tensor]] = []
        self.loss: torch.Tensor | None = None
        self.plain = torch.optim.SGD(model.parameters(), lr=0.125) if engine is None else None
        self.said: str | None = None  # the error that ended it

    def named(self, name: str) -> torch.Tensor:
        return dict(self.model.named_parameters())[name]

    def gathered(self, name: str, edit: bool = False) -> Any:
        return GatheredParameters(
            self.named(name) if self.engine is not None else [], modifier_rank=0 if edit else None
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.model if self.engine is None else self.engine)(x)

    def backward(self, loss: torch.Tensor) -> None:
        if self.engine is None:
            loss.backward()
        else:
            self.engine.backward(loss)

    def step(self) -> None:
        if self.engine is not None:
            self.engine.step()
        elif self.plain is not None:
            self.plain.step()
            self.plain.zero_grad()


class Run:
    """One program on one side."""

    def __init__(self, program: Program, side: Side, folder: str) -> None:
        self.side, self.folder, self.draw = side, folder, random.Random(program.number)
        self.notes: list[tuple[str, list[torch.Tensor]]] = []
        self.seed = program.number

    def play(self) -> list[tuple[str, list[torch.Tensor]]]:
        """Run it: what was seen after each action; the last one names an error that ended it."""
        for place in range(self.draw.randint(5, 9)):
            action, name = self.draw.choice(ACTIONS), self.draw.choice(NAMES)
            kind, number = self.draw.choice(tuple(VIEWS)), self.draw.random()
            try:
                seen = self._do(action, name, kind, number)
            except (ShardedParameterError, RuntimeError) as error:
                self.notes.append((f"raised in {action}: {type(error).__name__}: {error}", []))
                return self.notes
            held = [view.detach().clone() for _, view in self.side.held]
            self.notes.append((f"{place} {action} {name} {kind}", [*seen, *held]))
        return self.notes

    def _input(self) -> torch.Tensor:
        return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(self.seed + len(self.notes)))

    def _do(self, action: str, name: str, kind: str, number: float) -> list[torch.Tensor]:
        return getattr(self, "_" + action.replace(" ", "_"))(name, kind, number) or []

    def _collect(self, name: str, kind: str, number: float) -> None:
        with self.side.gathered(name):
            self.side.held.append((kind, VIEWS[kind](self.side.named(name))))

    def _forward(self, name: str, kind: str, number: float) -> list[torch.Tensor]:
        """A forward whose block, or whose output, gives a view; its graph stays for a late backward."""
        block = self.side.model.blocks[int(number * 2)]
        block.listener = lambda module: self.side.held.append((kind, VIEWS[kind](module.weight)))
        out, table = self.side.forward(self._input())
        block.listener = None
        self.side.loss = out.square().sum() + (table * 0.5).sum()
        if number > 0.5:
            self.side.held.append(("output", table))
        return [out.detach().clone()]

    def _late_backward(self, name: str, kind: str, number: float) -> list[torch.Tensor]:
        if self.side.loss is None:
            return []
        loss, self.side.loss = self.side.loss, None
        self.side.backward(loss)
        self.side.step()
        return [loss.detach()]

    def _train(self, name: str, kind: str, number: float) -> list[torch.Tensor]:
        out, table = self.side.forward(self._input())
        loss = out.square().sum() + (table * table).sum() * 0.1
        self.side.backward(loss)
        self.side.step()
        return [loss.detach()]

    def _evaluate(self, name: str, kind: str, number: float) -> list[torch.Tensor]:
        with torch.no_grad():
            return [t.clone() for t in self.side.forward(self._input())]

    def _save(self, name: str, kind: str, number: float) -> None:
        if self.side.engine is not None:
            self.side.engine.save_checkpoint(self.folder, tag="views")

    def _read(self, name: str, kind: str, number: float) -> list[torch.Tensor]:
        return [self.side.named(name).detach().clone()]

    def _drop(self, name: str, kind: str, number: float) -> None:
        if self.side.held:
            self.side.held.pop(int(number * len(self.side.held)))

    def _write(self, name: str, kind: str, number: float) -> None:
        """Through a view that was taken as data, so that plain torch lets it: kept, or an error later."""
        views = [view for kind, view in self.side.held if not view.requires_grad and kind != "numpy"]
        if views and number < 0.5:
            views[int(number * 2 * len(views))].mul_(0.5)

    def _edit(self, name: str, kind: str, number: float) -> None:
        with self.side.gathered(name, edit=True), torch.no_grad():
            self.side.named(name).add_(number)

    def _use(self, name: str, kind: str, number: float) -> list[torch.Tensor]:
        """What is held takes part in a computation of its own, with a backward where it has one."""
        total = sum((view.detach() * 2).sum() for _, view in self.side.held)
        return [torch.as_tensor(total)]


def engine_for(program: Program) -> tuple[nn.Module, Any]:
    """The plain model of a program, and a new engine over its twin."""
    _, _, born = program.cell
    torch.manual_seed(program.number)
    plain = Model()
    settings = config(3, plain, sharded=False, zero=entries(program, plain))
    model = copy.deepcopy(plain)
    if born:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Model()
        with GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                ours.copy_(theirs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return plain, engine


def misses(program: Program, ours: list[Any], theirs: list[Any]) -> str | None:
    """What is wrong with one side's notes, in words."""
    for (what, seen), (known, wanted) in zip(ours, theirs, strict=False):
        if what.startswith("raised"):
            if any(f"'{name}'" in what or name in what for name in NAMES) and "ShardedParameterError" in what:
                return None
            if "modified by an inplace operation" in what and "modified by an inplace operation" in known:
                return None
            return f"program {program.number} {program.cell}: {what}"
        if known.startswith("raised"):
            return f"program {program.number} {program.cell}: plain torch {known}, ours went on"
        for one, other in zip(seen, wanted, strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True):
                return f"program {program.number} {program.cell}: after {what}: {one} is not {other}"
    return None


def run_programs(numbers: list[int], folder: str) -> tuple[list[str], int]:
    """Run programs on this rank.

    Args:
        numbers: of the programs.
        folder: for checkpoints; the same on all ranks.

    Returns:
        What was wrong, and how many ended with an error by name.
    """
    wrong, refused = [], 0
    for program in map(Program, numbers):
        plain, engine = engine_for(program)
        theirs = Run(program, Side(plain), folder).play()
        side = Side(engine.module, engine)
        ours = Run(program, side, folder).play()
        refused += ours[-1][0].startswith("raised")
        found = misses(program, ours, theirs)
        wrong += [found] if found else []
        before = [view.detach().clone() for _, view in side.held]
        try:
            engine.destroy()
        except ShardedParameterError:
            engine.destroy()
        for old, (_, view) in zip(before, side.held, strict=True):
            if not torch.equal(old.nan_to_num(), view.detach().nan_to_num()):
                wrong.append(f"program {program.number} {program.cell}: destroy changed a view")
        if len(wrong) > 5:
            break
    return wrong, refused
