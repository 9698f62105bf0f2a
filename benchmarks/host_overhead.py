"""What the host does for a step: decoders of many tiny layers on one rank, so that Python's work is nearly all of it.

    python -m benchmarks.host_overhead [--sides stage3 …] [--recompute] [--profile stage3]

Prints the median milliseconds of forward, backward and step of each side, and their ratio to plain PyTorch.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import os
import pstats
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import deepspeed
from benchmarks import simulated_models
from benchmarks.simulated_models import Decoder, llama, package_config
from deepspeed.foundation.log import logger

SHAPE = llama(24, 64, 2, 172, vocabulary=128)
SIDES = ["torch", "fsdp2", "stage0", "stage1", "stage2", "stage3", "stage3-free"]
PHASES = ["forward", "backward", "step"]
CLIP = 1.0


@dataclass
class Side:
    """One way to train: the three calls of a step, in order."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]


def plain(model: Any) -> Side:
    """Return a plain PyTorch loop with AdamW and clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return Side(model, torch.Tensor.backward, step)


def fsdp2(model: Decoder) -> Side:
    """Return the loop over `fully_shard` of each block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return plain(fully_shard(model, mesh=mesh, mp_policy=policy))


def package(name: str, model: Decoder) -> Side:
    """Return an engine's loop; `stage3-free` frees each unit after its use, as models that exceed the limits do."""
    config = package_config(int(name[5]), 1) | {"gradient_clipping": CLIP, "steps_per_print": 10**6}
    if name.startswith("stage3"):  # matrices are sharded, norms are not, as in models of any real width
        config["zero_optimization"]["stage3_param_persistence_threshold"] = SHAPE.width + 1
    if name == "stage3-free":
        block = sum(param.numel() for param in model.blocks[0].parameters())
        config["zero_optimization"] |= {"stage3_max_live_parameters": 4 * block, "stage3_max_reuse_distance": 0}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return Side(engine, engine.backward, engine.step)


def side_of(name: str, recompute: bool) -> Side:
    """Return a side by its name; all have the same weights."""
    torch.manual_seed(0)
    model = Decoder(SHAPE, recompute)
    if name == "torch":
        return plain(model.bfloat16())
    return fsdp2(model) if name == "fsdp2" else package(name, model)


def turn(side: Side, tokens: torch.Tensor) -> tuple[list[float], float]:
    """Run a step; return the seconds of its phases, and its loss."""
    times = [time.thread_time()]
    loss = side.forward(tokens)
    times.append(time.thread_time())
    side.backward(loss)
    times.append(time.thread_time())
    side.step()
    times.append(time.thread_time())
    return [after - before for before, after in zip(times, times[1:], strict=False)], loss.item()


def measure(names: list[str], recompute: bool, rounds: int) -> list[dict[str, Any]]:
    """Run the sides in turns, in random order; return one record per side, the first of `names` as the reference."""
    sides = {name: side_of(name, recompute) for name in names}
    tokens = torch.randint(0, SHAPE.vocabulary, (1, 8), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for number in range(rounds + 5):
        for name in order.sample(names, len(names)):
            seconds, loss = turn(sides[name], tokens)
            losses[name].append(loss)
            if number >= 5:
                times[name].append(seconds)
    records = []
    for name in names:
        pairs = zip(times[name], times[names[0]], strict=True)
        ratio = statistics.median(sum(own) / sum(other) for own, other in pairs)
        phases = {
            phase: 1e3 * statistics.median(part)
            for phase, part in zip(PHASES, zip(*times[name], strict=True), strict=True)
        }
        whole = 1e3 * statistics.median(map(sum, times[name]))
        records.append({"side": name, "ms": whole, **phases, "ratio": ratio, "losses": losses[name]})
    return records


def profile(name: str, recompute: bool, steps: int, key: str) -> None:
    """Print the functions of a side that take the most time."""
    side = side_of(name, recompute)
    tokens = torch.randint(0, SHAPE.vocabulary, (1, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(5):
        turn(side, tokens)
    profiler = cProfile.Profile(time.thread_time, builtins=False)
    profiler.enable()
    for _ in range(steps):
        turn(side, tokens)
    profiler.disable()
    pstats.Stats(profiler).sort_stats(key).print_stats(60)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--profile", choices=SIDES)
    parser.add_argument("--sort", default="tottime")
    options = parser.parse_args()
    for variable, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 29551}.items():
        os.environ.setdefault(variable, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # whose products of tiny matrices take longer to set up than to compute
    logger.setLevel(logging.WARNING)
    simulated_models.attention = lambda q, k, v, *_: (
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    )
    deepspeed.init_distributed(dist_backend="gloo")
    if options.profile:
        profile(options.profile, options.recompute, options.rounds, options.sort)
        return
    for record in measure(options.sides, options.recompute, options.rounds):
        parts = "  ".join(f"{phase} {record[phase]:6.2f}" for phase in PHASES)
        print(
            f"{record['side']:12s} {record['ms']:7.2f} ms  {parts}  x {record['ratio']:.2f}  {record['losses'][-1]!r}"
        )


if __name__ == "__main__":
    main()
