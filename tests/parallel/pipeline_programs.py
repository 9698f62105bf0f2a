"""Random models, cut at random places and run by random schedules, beside the same model in one piece."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.comm import all_gather_object, all_reduce
from deepspeed.comm.collectives import collectives
from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.pipe.executor import Executor
from deepspeed.pipe.schedule import make_schedule
from deepspeed.pipe.schedule_simulator import simulate
from deepspeed.pipe.split_model import ModelSplit, find_layout, keep_stage
from deepspeed.zero.layout.placement import Relation, placement_of
from tests.parallel.pipeline_models import Plain

WORDS, WIDTH = 11, 4


@dataclass
class State:
    """What some blocks give each other."""

    hidden: torch.Tensor
    extra: Any
    count: int = 0


class Block(nn.Module):
    """One of some kinds; `form` is what it gives: a tensor, a tuple, a dict or a `State`."""

    def __init__(self, kind: str, form: str, draw: random.Random) -> None:
        super().__init__()
        self.kind, self.form, self.factor = kind, form, draw.choice([1, -1, 2])
        if kind in ("linear", "frozen", "narrow", "fickle"):
            self.linear = nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5)
            if kind == "frozen":
                self.linear.requires_grad_(False)
        elif kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs: Any, scale: torch.Tensor) -> Any:
        hidden, extra, count = opened(inputs)
        if self.kind in ("linear", "frozen"):
            hidden = hidden + self.linear(hidden) * self.factor
        elif self.kind == "narrow":  # shapes change: the last place goes to the others
            # what has travelled is contiguous, and kernels add in another order for what is not
            hidden = self.linear(hidden)[:, : max(1, hidden.shape[1] - 1)].clone(memory_format=torch.contiguous_format)
        elif self.kind == "fickle":  # a weight that is not always a factor of a product
            weight, odd = self.linear.weight, len(hidden) % 2
            hidden = hidden + (hidden * weight[0] if odd else torch.tanh(hidden @ weight) @ weight.t())
        elif self.kind == "norm":
            hidden = self.norm(hidden)
        elif self.kind == "inplace":
            hidden = hidden * 2
            hidden += scale
        elif self.kind == "early":  # the extra tensor comes from far before
            hidden = hidden if extra is None else hidden + extra.mean() * scale
            extra = hidden.detach() if extra is None else hidden
        if self.form == "tensor" and extra is None:
            return hidden
        if self.form == "dict":
            return {"hidden": hidden, "extra": extra, "count": count + 1}
        return State(hidden, extra, count + 1) if self.form == "state" else (hidden, extra, count + 1)


def opened(inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        return inputs, None, 0
    if isinstance(inputs, dict):
        return tuple(inputs.values())
    return inputs if isinstance(inputs, tuple) else (inputs.hidden, inputs.extra, inputs.count)


class Program(nn.Module):
    """Embedding, blocks, a head that is tied or not; the loss of next words."""

    def __init__(self, draw: random.Random, blocks: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        kinds = ["linear", "linear", "frozen", "norm", "inplace", "early", "narrow", "fickle", "nothing"]
        forms = ["tensor", "tuple", "dict", "state"]
        chosen = ["linear", *(draw.choice(kinds) for _ in range(blocks - 1))]  # a list without parameters is no model
        draw.shuffle(chosen)
        self.blocks = nn.ModuleList(Block(kind, draw.choice(forms), draw) for kind in chosen)
        self.tied = draw.random() < 0.5
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if self.tied:
            self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(())) if draw.random() < 0.3 else None

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(()) if self.scale is None else self.scale
        value: Any = self.table(ids)
        for block in self.blocks:
            value = block(value, scale)
        logits = self.head(opened(value)[0])
        return nn.functional.cross_entropy(logits.mean(1), labels)


def delays(seed: int) -> Any:
    """Sleeps now and then, on this rank's own draw."""
    draw = random.Random(seed)

    def delay(_label: str) -> None:
        if draw.random() < 0.2:
            time.sleep(draw.random() * 0.004)

    return delay


def cut_at_random(model: nn.Module, parts: int, batch: Any, draw: random.Random) -> ModelSplit:
    """A layout with bounds that nobody would choose."""
    layout = find_layout(model, parts, batch)
    count = layout.bounds[-1]
    layout.bounds = [0, *sorted(draw.sample(range(1, count), parts - 1)), count]
    return layout


def run_programs(first: int, count: int) -> list[tuple[int, str]]:
    """Seeds of programs that went wrong, with what was wrong."""
    axis = mesh_for({"pp": torch.distributed.get_world_size()}).axis("pp")
    collectives.PLANTED_DELAY = delays(first * 10 + axis.rank)
    try:
        return [(seed, wrong) for seed in range(first, first + count) if (wrong := run_program(seed, axis))]
    finally:
        collectives.PLANTED_DELAY = None


def run_program(seed: int, axis: Any) -> str:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    name = draw.choice(["gpipe", "1f1b", "interleaved", "zero_bubble", "zero_bubble"])
    chunks = 1 if name in ("1f1b", "zero_bubble") else draw.choice([1, 2, 3])
    micros = draw.randint(1, 3) * axis.size if name == "interleaved" else draw.randint(1, 7)
    parts = axis.size * chunks
    model = Program(draw, parts + draw.randint(0, 4))
    batches = []
    for _ in range(micros):
        samples, length = draw.randint(1, 3), draw.randint(2, 6)
        ids, labels = torch.randint(0, WORDS, (samples, length)), torch.randint(0, WORDS, (samples,))
        batches.append({"ids": ids, "labels": labels})
    layout = cut_at_random(model, parts, batches[0], draw)
    dense = copy.deepcopy(model)
    theirs = []
    for batch in batches:
        theirs.append(dense(**batch))
        if theirs[-1].requires_grad:
            theirs[-1].backward()
    schedule = make_schedule(name, axis.size, micros, chunks)
    simulate(schedule)
    views = keep_stage(model, layout, axis.size, axis.rank)
    found = Executor(axis, Plain(views, batches), ring=chunks > 1).run(schedule, True)
    return gather_wrong(axis, differences(model, dense, axis, found, theirs), seed)


def differences(model: nn.Module, dense: nn.Module, axis: Any, found: Any, theirs: Any) -> str:
    """What is not equal on this rank: bit by bit, but for sums over stages."""
    wanted, wrong = dict(dense.named_parameters()), ""
    if found and not all(torch.equal(a, b.detach()) for a, b in zip(found, theirs, strict=True)):
        wrong = f"losses {found} for {theirs}"
    shared = [name for name in wanted if name in ("table.weight", "scale")]  # a tied head is known as the table
    mine = dict(model.named_parameters())
    for name, param in mine.items():
        if placement_of(param).relations.get("pp") is not Relation.PARTIAL and name not in shared:
            wrong = wrong or unequal(name, param.grad, wanted[name].grad, 0.0)
    for name in shared:  # held by some stages: all take part in the sum
        param = mine.get(name)
        grad = torch.zeros_like(wanted[name]) if param is None or param.grad is None else param.grad.clone()
        all_reduce(grad, group=axis.group)
        theirs_here = wanted[name].grad
        wrong = wrong or unequal(name, grad, torch.zeros_like(grad) if theirs_here is None else theirs_here, 1e-6)
    return wrong


def unequal(name: str, ours: Any, theirs: Any, bar: float) -> str:
    if ours is None or theirs is None:
        empty = [t for t in (ours, theirs) if t is not None and bool(t.any())]
        return f"{name}: a gradient here or there alone" if empty else ""
    gap = float((ours - theirs).norm()) / max(1.0, float(theirs.norm()))
    return f"{name}: {gap}" if gap > bar or not torch.isfinite(ours).all() else ""


def gather_wrong(axis: Any, wrong: str, seed: int) -> str:
    everyone: list[Any] = [None] * axis.size
    all_gather_object(everyone, wrong, group=axis.group)
    return "; ".join(f"rank {at}: {one}" for at, one in enumerate(everyone) if one)
