"""Toys of Transformers in stages: losses and raw gradients beside the whole model."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch

from tests import zoo
from tests.parallel.tensor_models import batch, build

ENCODERS = [f"{name}ForMaskedLM" for name in ("Bert", "Roberta", "Electra", "DistilBert", "DebertaV2")]
MICROS = 2


def chosen() -> list[str]:
    """Every causal LM, and some encoders."""
    return sorted([name for name, kind in zoo.names().items() if kind == "causal LM"] + ENCODERS)


class Plain:
    """Runs parts without an engine: gradients stay where autograd puts them."""

    costs: tuple[float, ...] = ()  # not known

    def __init__(self, parts: list[Any], batches: list[Any]) -> None:
        self.parts, self.batches = parts, batches

    def words(self, chunk: int) -> str:
        return self.parts[chunk].words

    def forward(self, chunk: int, micro: int, received: Any) -> Any:
        part = self.parts[chunk]
        made = part.run(received, self.batches[micro])
        return part.loss(made, self.batches[micro]) if part.last else made

    def backward(self, micro: int, roots: list[Any], gradients: list[Any] | None, run: Any) -> None:
        if gradients is None:
            run(roots)
            return
        pairs = [pair for pair in zip(roots, gradients, strict=True) if pair[1] is not None]
        if pairs:
            run([root for root, _ in pairs], [given for _, given in pairs])

    def weights(self, micro: int, run: Any) -> None:
        run()


def toy(name: str, stages: int) -> tuple[Any, str]:
    """A toy with a block for each stage, or None and why."""
    return build(name, layers=max(2, stages), mixed=False)


def stage_and_compare(name: str, stages: int) -> dict[str, Any]:
    """One row of the table, by a rank of a group."""
    model, why = toy(name, stages)
    return {"verdict": "no toy", "why": why} if model is None else stage_toy(model, stages)


def stage_toy(model: Any, stages: int) -> dict[str, Any]:
    """Cut a toy into stages, by a rank of a group, and compare it with itself."""
    from deepspeed.comm.process_groups.mesh import mesh_for
    from deepspeed.errors import DeepSpeedError
    from deepspeed.foundation.equivalence import example_inputs
    from deepspeed.pipe.split_model import find_layout, keep_stage

    warnings.simplefilter("ignore")
    for module in model.modules():  # Phimoe's routers draw; a stage and the whole model draw at other times
        for name_of in {"router_jitter_noise", "input_jitter_noise"} & set(vars(module)):
            setattr(module, name_of, 0.0)
    axis = mesh_for({"pp": stages}).axis("pp")
    try:
        layout = find_layout(model, stages, example_inputs(model))
    except DeepSpeedError as error:
        return {"verdict": "refused", "why": f"{type(error).__name__}: {error}"[:300]}
    dense = copy.deepcopy(model).train()
    parts = keep_stage(model.train(), layout, stages, axis.rank)
    return {"where": layout.container, **compare(model, dense, parts, axis)}


def compare(model: Any, dense: Any, parts: list[Any], axis: Any) -> dict[str, Any]:
    """Losses and gradients of both, over two micro-batches."""
    from deepspeed.comm import all_gather_object, all_reduce
    from deepspeed.pipe.executor import Executor
    from deepspeed.pipe.schedule import make_schedule
    from deepspeed.zero.layout.placement import Relation, placement_of

    batches = [batch(dense, step) for step in range(MICROS)]
    theirs = [dense(**one).loss for one in batches]
    functools.reduce(torch.add, theirs).backward()
    found = Executor(axis, Plain(parts, batches), ring=False).run(make_schedule("1f1b", axis.size, MICROS), True)
    wanted = {n: p.grad for n, p in dense.named_parameters() if p.grad is not None}
    largest, gap, held = max(float(g.norm()) for g in wanted.values()), 0.0, set()
    for n, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad.clone()
        if placement_of(p).relations.get("pp") is Relation.PARTIAL:
            if axis.size > 2:  # held by some: nothing else may be summed over all
                continue
            all_reduce(grad, group=axis.group)
        held.add(n)
        gap = max(gap, float((grad - wanted.get(n, torch.zeros_like(grad))).norm()) / largest)
    loss = max((abs(float(a) - float(b)) / abs(float(b)) for a, b in zip(found, theirs, strict=False)), default=0.0)
    everyone: list[Any] = [None] * axis.size
    all_gather_object(everyone, (loss, gap, held), group=axis.group)
    loss, gap = max(row[0] for row in everyone), max(row[1] for row in everyone)
    missing = set(wanted) - set().union(*(row[2] for row in everyone)) if axis.size == 2 else set()
    equal = loss <= 1e-6 and gap <= 1e-6 and not missing
    why = f"no stage has {sorted(missing)[0]}" if missing else ""
    return {"verdict": "equal" if equal else "WRONG", "loss": loss, "gradient": gap, "why": why}
