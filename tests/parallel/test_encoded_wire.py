"""Encoded gradients and weights at every stage: replicas equal to the bit, values within the codec's bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness.pool import WorkerPool
from tests.parallel.tiny import STAGES, Tiny, loss_of, masters, micro_step, rows, start, tiny

Workers = Callable[[int], WorkerPool]
LIMIT = {"int8": 127, "int4": 7}


def equal_everywhere(tensors: dict[str, torch.Tensor], at: Any) -> None:
    """All ranks have the same bits."""
    for name, tensor in tensors.items():
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.contiguous())
        assert all(torch.equal(copies[0].view(torch.uint8), copy.view(torch.uint8)) for copy in copies), (at, name)


def values_in_forward(engine: Any) -> dict[str, torch.Tensor]:
    """Parameters as a forward sees them."""
    seen: dict[str, torch.Tensor] = {}
    names = {id(param): name for name, param in engine.module.named_parameters()}

    def note(module: nn.Module, _inputs: Any) -> None:
        for param in module.parameters(recurse=False):
            seen[names[id(param)]] = param.detach().float().clone()

    hooks = [module.register_forward_pre_hook(note) for module in engine.module.modules()]
    with torch.no_grad():
        engine(rows(99, 0).to(next(iter(engine.module.parameters())).dtype))
    for hook in hooks:
        hook.remove()
    return seen


def local_gradients(model: nn.Module, values: dict[str, torch.Tensor], step: int) -> list[dict[str, torch.Tensor]]:
    """Gradients of each rank's rows at these values, in one plain process."""
    gradients = []
    for rank in range(dist.get_world_size()):
        twin = Tiny()
        twin.load_state_dict(values)
        loss_of(twin, rows(step, rank)).backward()
        gradients.append({name: param.grad.clone() for name, param in twin.named_parameters() if param.grad is not None})
    return gradients


def cell(stage: int, codec: str, precision: str, accumulation: int) -> None:
    wire: dict[str, Any] = {"gradients_within_host": codec, "error_memory": False}
    if stage:
        wire["weights_within_host"] = codec
    settings: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    zero = {"stage3_param_persistence_threshold": 0}
    with start(stage, wire=wire, accumulation=accumulation, zero=zero, **settings) as engine:
        at, ranks = (stage, codec, precision, accumulation), dist.get_world_size()
        for step in range(3):
            before = values_in_forward(engine)
            equal_everywhere(before, at)
            exact = masters(engine)
            equal_everywhere(exact, at)
            if stage and step:
                changed = 0
                for name, value in before.items():
                    bound = exact[name].abs().max() / LIMIT[codec] / 2 * 1.01 + (0.005 if precision == "bf16" else 0)
                    assert (value - exact[name]).abs().max() <= bound, (at, name)
                    rounded = exact[name].to(torch.bfloat16).float() if precision == "bf16" else exact[name]
                    changed += not torch.equal(value, rounded)
                assert changed > 4, (at, "weights were not encoded")
            for micro in range(accumulation):
                engine.backward(loss_of(engine, rows(10 * step + micro, dist.get_rank())))
                if micro + 1 < accumulation:
                    engine.step()
            if precision == "fp32":
                every = [local_gradients(tiny(), before, 10 * step + micro) for micro in range(accumulation)]
                for name, param in engine.module.named_parameters():
                    total = sum(g[name] for micro in every for g in micro) / ranks / accumulation
                    room = sum(float(g[name].abs().max()) for micro in every for g in micro) / ranks / accumulation
                    room += room * 2 if stage == 0 else 0  # the sum is encoded again
                    gap = (param.grad - total).abs().max()
                    assert gap <= room / LIMIT[codec] / 2 * 1.01 + 1e-6, (at, step, name, float(gap))
            engine.step()


def cells(stages: tuple[int, ...], codecs: tuple[str, ...]) -> None:
    for stage in stages:
        for codec in codecs:
            cell(stage, codec, "fp32", 1)
        cell(stage, codecs[0], "bf16", 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_within_the_bound_and_equal_on_all_ranks(workers: Workers, ranks: int) -> None:
    workers(ranks).run(cells, STAGES, ("int8", "int4"))
