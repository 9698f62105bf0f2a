"""What the comparison of units costs at the start: `initialize` of a model cut over ranks, with `verify` on and off.

A Llama of 300 M parameters, fp32, over 2 ranks. Each sample is a world of its own, in random order; the time is that of
`initialize`, the memory the peak of what the process held (VmHWM) over what it held before.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import World, median_interval, print_table, serve, start_world, write_json

SIZES = {"300M": (1024, 2816, 24, 16), "20M": (384, 1024, 8, 6)}  # width, inner width, layers, heads
VOCABULARY = 8192
BAR = 0.20  # of the time of initialize


def kib(word: str) -> int:
    """A line of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(word))


def make_rank(size: str, verify: str) -> Callable[..., Any]:
    """A rank that cuts the model once and answers with (seconds, bytes at the peak, bytes of a block, parameters)."""
    start_world()
    from transformers import LlamaConfig, LlamaForCausalLM

    import deepspeed

    width, inner, layers, heads = SIZES[size]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=heads, vocab_size=VOCABULARY, use_cache=False,
        )
    )  # fmt: skip
    count = sum(param.numel() for param in model.parameters())
    block = sum(param.numel() * 4 for param in model.model.layers[0].parameters())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": torch.distributed.get_world_size(), "verify": verify},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "steps_per_print": 10**9,
    }

    def handle() -> tuple[float, int, int, int]:
        before = kib("VmRSS")
        torch.distributed.barrier()
        started = time.perf_counter()
        deepspeed.initialize(model=model, config=config)
        return time.perf_counter() - started, (kib("VmHWM") - before) * 1024, block, count

    return handle


def main() -> None:
    """Run and print."""
    if "--worker" in sys.argv:
        serve(make_rank)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=SIZES, default="300M")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"off": [], "units": []}
    peaks: dict[str, list[int]] = {"off": [], "units": []}
    block = count = 0
    for number in range(args.rounds):
        for verify in random.Random(number).sample(sorted(seconds), 2):
            world = World("tensor_start.py", args.ranks, {"size": args.size, "verify": verify})
            answers = world.ask()
            world.close()
            seconds[verify].append(max(answer[0] for answer in answers))
            peaks[verify].append(max(answer[1] for answer in answers))
            block, count = answers[0][2:]
    part = median_interval([(a - b) / a for a, b in zip(seconds["units"], seconds["off"], strict=True)])
    more = median_interval([(a - b) / block for a, b in zip(peaks["units"], peaks["off"], strict=True)])
    row = {"parameters": count, "ranks": args.ranks, "part": part.median, "low": part.low, "high": part.high,
           "seconds": min(seconds["units"]), "blocks": more.median}  # fmt: skip
    print_table(
        ["parameters", "ranks", "initialize s", "comparing, of it", "bar", "peak growth, blocks", "bar "],
        [[f"{count:,}", str(args.ranks), f"{row['seconds']:.1f}",
          f"{part.median:.3f} [{part.low:.3f}, {part.high:.3f}]", f"{BAR:.2f}", f"{more.median:.2f}", "1.00"]],
    )  # fmt: skip
    print(write_json(f"tensor_start-{args.size}-{args.ranks}.json", [row]))


if __name__ == "__main__":
    main()
