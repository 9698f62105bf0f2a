"""What compression costs while training: masks, fake quantization, and a model after a removal; two ranks.

Sides take turns, step by step: dense, masked, `torch.nn.utils.prune`, fake-quantized, torchao's QAT where it is
installed, after a removal, and the small model born so. Prints paired ratios with their intervals, bytes of masks per
element, state after a removal over that of the born one, and the peak of a global threshold in groups.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import time
from collections.abc import Callable
from typing import Any

import torch
from common import (
    GPT,
    Shape,
    World,
    batch_of,
    median_interval,
    print_table,
    serve,
    start_world,
    whole_bytes,
    write_json,
)
from torch import nn

SIDES = ["dense", "masked", "torch prune", "fake 8 bits", "torchao", "removed", "born small"]
PAIRS = [
    ("masked", "dense", 1.03),
    ("torch prune", "dense", None),
    ("fake 8 bits", "dense", None),
    ("fake 8 bits", "torchao", 1.05),
    ("removed", "born small", 1.03),
]
LINEARS = ["qkv", "out", "up", "down"]


def technique(name: str, params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any) -> Any:
    """One block of the JSON."""
    group = {"params": params, "modules": modules} | ({"related_modules": related} if related else {})
    return {name: {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}}


def blocks(shape: Shape) -> dict[str, dict[str, Any]]:
    """`compression_training` by side. torchao has a scale per row at least; ours has as many scales as `width` rows."""
    half = {"dense_ratio": 0.5}
    bits = {"start_bits": 8, "target_bits": 8, "quantization_period": 0}
    once = {"method": "l1", "schedule_offset": 1}
    return {
        "masked": technique("sparse_pruning", half, LINEARS, **once),
        "global": technique("sparse_pruning", half, LINEARS, scope="global", **{**once, "schedule_offset": 1000}),
        "fake 8 bits": technique(
            "weight_quantization", bits, LINEARS, quantize_weight_in_forward=True, quantize_groups=shape.width
        ),
        "removed": technique("row_pruning", half, ["up"], [["down"]], **once),
    }


def model_of(side: str, shape: Shape) -> nn.Module:
    """The model of a side, before its engine."""
    torch.manual_seed(0)
    model = GPT(shape)
    chosen = [module for name, module in model.named_modules() if name.rpartition(".")[2] in LINEARS]
    if side == "born small":
        for block in model.blocks:
            block.up, block.down = nn.Linear(shape.width, 2 * shape.width), nn.Linear(2 * shape.width, shape.width)
    elif side == "torch prune":
        from torch.nn.utils import prune

        for module in chosen:
            prune.l1_unstructured(module, "weight", 0.5)
    elif side == "torchao":
        from torchao.quantization import quantize_
        from torchao.quantization.granularity import PerAxis
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

        weights = IntxFakeQuantizeConfig(torch.int8, granularity=PerAxis(0), is_symmetric=True)
        wanted = {id(module) for module in chosen}
        quantize_(model, QATConfig(weight_config=weights, step="prepare"), lambda m, _: id(m) in wanted)
    return model


def make_handler(shape: dict[str, int], stage: int) -> Callable[..., Any]:
    """Engines of all sides in one rank, stepped one by one."""
    import deepspeed

    sizes = Shape(**shape)
    rank, _ = start_world()
    engines: dict[str, Any] = {}

    def engine_of(side: str) -> Any:
        if side not in engines:
            model = model_of(side, sizes)
            config = {
                "train_micro_batch_size_per_gpu": sizes.batch,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            }
            if side in blocks(sizes):
                config["compression_training"] = blocks(sizes)[side]
            engines[side] = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            for warm in range(3):  # masks are formed, and units leave, after the first
                step(side, warm)
        return engines[side]

    def step(side: str, number: int) -> float:
        engine = engine_of(side)
        windows = batch_of(sizes, number, rank)
        torch.distributed.barrier()
        started = time.perf_counter()
        engine.backward(engine(windows))
        engine.step()
        return time.perf_counter() - started

    def facts(side: str) -> dict[str, float]:
        engine = engine_of(side)
        inner = engine.optimizer.optimizer
        state = sum(
            value.numel() * value.element_size()
            for one in inner.state.values()
            for value in one.values()
            if isinstance(value, torch.Tensor)
        )
        made: dict[str, float] = {"state": state + whole_bytes(engine.module)}
        if engine.compression_scheduler is not None:
            masks = engine.compression_scheduler.masks
            made |= {"masks": masks.nbytes(), "masked": sum(masks.of(n).numel for r in masks.rules for n in r.names())}
        return made

    def peak() -> dict[str, float]:
        engine = engine_of("global")
        masks, largest = engine.compression_scheduler.masks, 0
        now = 0
        masks._form(masks.rules[0], 0.5)
        masks.kept.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            masks._form(masks.rules[0], 0.5)
        events: Any = profile.profiler.kineto_results.events()
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            now += event.nbytes()
            largest = max(largest, now)
        groups = {id(masks.of(n).member.group): masks.of(n).member.group for r in masks.rules for n in r.names()}
        group = max(sum(member.numel for member in one.members) * 4 for one in groups.values())
        return {"peak": largest, "group": group, "masks": masks.nbytes()}

    def handle(side: str = "", number: int = 0, what: str = "step") -> Any:
        return {"step": lambda: step(side, number), "facts": lambda: facts(side), "peak": peak}[what]()

    return handle


def measure(world: World, sides: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank, by side and round; sides take turns in random order."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    order = random.Random(0)
    for number in range(rounds):
        for side in order.sample(sides, len(sides)):
            seconds[side].append(max(world.ask(side=side, number=number)))
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help="used by this script alone")
    parser.add_argument("--toy", action="store_true", help="two narrow layers: a dry run")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    if given.worker:
        serve(make_handler)
        return
    shape = vars(Shape(2, 64, 256, 32, 2) if given.toy else Shape())
    sides = [side for side in SIDES if side != "torchao" or importlib.util.find_spec("torchao")]
    world = World("compress_cost.py", given.ranks, {"shape": shape, "stage": given.stage})
    try:
        seconds = measure(world, sides, given.rounds)
        facts = {side: world.ask(side=side, what="facts") for side in ("masked", "removed", "born small")}
        peaks = world.ask(what="peak")
    finally:
        world.close()
    rows, content = [], {"stage": given.stage, "ranks": given.ranks, "seconds": seconds, "facts": facts, "peaks": peaks}
    for one, other, bar in PAIRS:
        if one in seconds and other in seconds:
            ratio = median_interval([a / b for a, b in zip(seconds[one], seconds[other], strict=True)])
            rows.append([f"step: {one} / {other}", str(ratio), "-" if bar is None else f"<= {bar}"])
    if "torchao" not in seconds:
        rows.append(["step: fake 8 bits / torchao", "torchao is not installed", "<= 1.05"])
    each = sum(fact["masks"] for fact in facts["masked"]) / facts["masked"][0]["masked"]
    rows.append(["bytes of masks per element, all ranks", f"{each:.4f}", "<= 0.125"])
    state = sum(f["state"] for f in facts["removed"]) / sum(f["state"] for f in facts["born small"])
    rows.append(["state: removed / born small", f"{state:.4f}", "<= 1.03"])
    most = max((fact["peak"] - fact["masks"]) / fact["group"] for fact in peaks)
    rows.append(["global threshold: peak in groups", f"{most:.2f}", "<= 1"])
    print_table(["what", "found", "bar"], rows)
    if not given.toy:
        print(f"written: {write_json('compress_cost.json', content)}")


if __name__ == "__main__":
    main()
