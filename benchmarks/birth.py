"""Peak memory of a 300 M-parameter model born under `zero.Init`, against its state and two largest groups."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from common import GPT, Shape, World, print_table, serve, start_world, write_json

SHAPE = Shape(layers=23, width=1024, vocabulary=8192)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
    },
}
BYTES_PER_PARAMETER = 16  # fp32: parameter, gradient accumulator, two moments
BAR = 1.15


def forget_peak() -> None:
    """Let the kernel's high-water mark of this process start again at what is resident now (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The high-water mark of resident memory since `forget_peak`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def make_rank() -> Callable[..., Any]:
    """A rank that builds the model inside `zero.Init` and initializes it; answers with growth and sizes in bytes."""
    import deepspeed

    _, ranks = start_world()
    deepspeed.init_distributed()

    def handle() -> dict[str, float]:
        forget_peak()
        before = psutil.Process().memory_info().rss
        with deepspeed.zero.Init(config_dict_or_path=CONFIG):
            model = GPT(SHAPE)
        born = peak_bytes() - before
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        grown = peak_bytes() - before
        groups = [*model.blocks, model.tokens, model.head]
        two = 4 * sum(sorted(sum(p.numel() for p in group.parameters()) for group in groups)[-2:])
        parameters = sum(p.numel() for p in model.parameters())
        engine.destroy()
        state = parameters * BYTES_PER_PARAMETER / ranks
        return {"parameters": parameters, "born": born, "grown": grown, "two": two, "state": state}

    return handle


def main() -> None:
    """Measure with two and four ranks, print, write."""
    rows, records = [], []
    for ranks in (2, 4):
        world = World("birth.py", ranks, {})
        answers = world.ask()
        world.close()
        worst = max(answers, key=lambda answer: answer["grown"])
        ratio = worst["grown"] / (worst["state"] + worst["two"])
        records.append({"ranks": ranks, "ratio": ratio, "bar": BAR, **worst})
        megabytes = [f"{worst[name] / 1e6:.0f}" for name in ("parameters", "born", "grown", "state", "two")]
        rows.append([str(ranks), *megabytes, f"{ratio:.3f}", "ok" if ratio <= BAR else "MISSED"])
    print_table(
        [
            "ranks",
            "M parameters",
            "MB peak of birth",
            "MB peak to initialize",
            "MB state",
            "MB two groups",
            "ratio",
            "",
        ],
        rows,
    )
    print(f"written: {write_json('birth.json', records)}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
