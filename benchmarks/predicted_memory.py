"""What a rank holds at its fullest: predicted, counted on live tensors, and resident; upstream's estimate beside them.

Ranks run with a fixed MALLOC_MMAP_THRESHOLD_, so that the C library gives freed blocks back; resident is the growth of
the proportional set size since the rank was warm. `--upstream PYTHON` names the interpreter of an environment that has
upstream: its two estimators (of states at stages 2 and 3, in 16 bits with masters, without activations) are asked
there, in a process of their own, about the same model. Eight cases take five minutes on two cores: each is shown as it
is measured and kept at once, so that `--dtypes` and `--stages` may cut a run in parts, which add up in one file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import (
    GPT,
    REPOSITORY,
    Shape,
    World,
    batch_of,
    print_table,
    results_folder,
    serve,
    start_world,
    write_json,
)

STAGES, DTYPES = (0, 1, 2, 3), ("fp32", "bf16")
LIVE, RESIDENT = 0.02, 0.05  # bars: prediction over live bytes, resident growth over the prediction
LARGE = 500 << 20  # the second bar holds for growths from here on
NAME = "predicted_memory.json"
# Prints [file, version, {stage: bytes}] of a model of (trained elements, elements of its largest module). The estimator
# of stage 3 prints its table for people, so it is asked for numbers by its "cold" form, which takes the two counts.
_ASKS = """
import contextlib, io, json, sys
total, largest, ranks = map(int, sys.argv[1:])
with contextlib.redirect_stdout(io.StringIO()):
    import deepspeed
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two
    near3 = three(total, largest, num_gpus_per_node=ranks, num_nodes=1, cpu_offload=False, cpu_offload_params=False,
                  zero_init=True)[1]
    near2 = two(total, num_gpus_per_node=ranks, num_nodes=1, cpu_offload=False)[1]
print(json.dumps([deepspeed.__file__, deepspeed.__version__, {"2": near2, "3": near3}]))
"""


def config_of(stage: int, dtype: str, batch: int) -> dict[str, Any]:
    """The JSON; without `overlap_comm` a prediction is one figure."""
    return {
        "train_micro_batch_size_per_gpu": batch,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 2_000_000},
    }


def make_rank(width: int, layers: int, batch: int) -> Callable[..., Any]:
    """A rank that trains a case and answers with its live peak and its resident growth."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks are run as files
    from deepspeed.planner import measure_memory
    from tests.harness.resident_memory import ResidentPeak

    rank, _ = start_world()
    shape = Shape(width=width, layers=layers, batch=batch)
    small = Shape(width=64, layers=1, batch=1)

    def handle(stage: int, dtype: str) -> dict[str, int]:
        measure_memory(lambda: GPT(small), config_of(stage, dtype, 1), batch=[batch_of(small, 0, rank)])  # warm
        torch.distributed.barrier()
        with ResidentPeak() as resident:
            found = measure_memory(lambda: GPT(shape), config_of(stage, dtype, batch), batch=[batch_of(shape, 0, rank)])
        return {"live": found.peak, "birth": found.birth, "resident": resident.growth}

    return handle


def upstream(python: str, shape: Shape, ranks: int) -> tuple[str, dict[str, int]]:
    """Upstream's version, and bytes of a device by stage as its estimators give them; empty without an interpreter.

    Raises:
        SystemExit: the interpreter has no upstream, or finds this package in its place.
    """
    if not python:
        return "", {}
    model = GPT(shape)
    total = sum(param.numel() for param in model.parameters())
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    # A PYTHONPATH that leads here would have our own estimators answer.
    there = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    run = subprocess.run(
        [python, "-c", _ASKS, str(total), str(largest), str(ranks)], env=there | {"DS_ACCELERATOR": "cpu"},
        cwd=os.path.dirname(os.path.abspath(python)), capture_output=True, text=True, timeout=300,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if run.returncode:
        raise SystemExit(f"{python} could not be asked:\n{run.stderr[-2000:]}")
    file, version, told = json.loads(run.stdout.splitlines()[-1])
    if Path(file).is_relative_to(REPOSITORY):
        raise SystemExit(f"{python} imports this package ({file}), not upstream's")
    return version, {stage: int(count) for stage, count in told.items()}


def row_of(predicted: Any, answers: list[dict[str, int]], estimate: int | None) -> dict[str, Any]:
    """One record of a case."""
    live, resident = (max(answer[kind] for answer in answers) for kind in ("live", "resident"))
    birth = max(answer["birth"] for answer in answers)
    expected = max(predicted.peak, predicted.birth)
    return {
        "predicted": predicted.peak, "live": live, "resident": resident, "upstream": estimate,
        "live_gap": predicted.peak / live - 1, "resident_gap": resident / max(expected, live, birth) - 1,
        "large": resident >= LARGE,
    }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    body = []
    for row in rows:
        mib = [f"{row[kind] / 2**20:,.1f}" for kind in ("predicted", "live", "resident")]
        told = (
            "" if row["upstream"] is None else f"{row['upstream'] / 2**20:,.1f} ({row['upstream'] / row['live']:.2f})"
        )
        held = abs(row["live_gap"]) <= LIVE and (not row["large"] or abs(row["resident_gap"]) <= RESIDENT)
        gaps = [f"{row['live_gap']:+.2%}", f"{row['resident_gap']:+.2%}" + ("" if row["large"] else " (small)")]
        body.append([row["dtype"], str(row["stage"]), *mib, *gaps, told, "ok" if held else "MISSED"])
    head = ["dtype", "stage", "predicted MiB", "live MiB", "resident MiB", "predicted/live", "resident/predicted"]
    print_table([*head, "upstream's MiB (of live)", ""], body)


def with_kept(rows: list[dict[str, Any]], setup: dict[str, int]) -> list[dict[str, Any]]:
    """These rows, and those that earlier runs of today kept of the same sizes."""
    path = results_folder() / NAME
    kept = json.loads(path.read_text()) if path.exists() else []
    new = {(row["dtype"], row["stage"]) for row in rows}
    other = [row for row in kept if row.get("setup") == setup and (row["dtype"], row["stage"]) not in new]
    return sorted(other + rows, key=lambda row: (row["dtype"], row["stage"]))


def main() -> None:
    """Predict, measure, ask, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, nargs="+", default=STAGES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--upstream", default="", help="interpreter of an environment with upstream")
    parser.add_argument("--dry", action="store_true", help="write no results")
    arguments = parser.parse_args()
    from deepspeed.planner import predict_memory

    shape = Shape(width=arguments.width, layers=arguments.layers, batch=arguments.batch)
    setup = {"width": arguments.width, "layers": arguments.layers, "batch": arguments.batch}
    asked = {**setup, "ranks": arguments.ranks}
    version, told = upstream(arguments.upstream, shape, arguments.ranks)
    rows = []
    for stage, dtype in ((stage, dtype) for dtype in arguments.dtypes for stage in arguments.stages):
        predicted = predict_memory(
            lambda: GPT(shape), config_of(stage, dtype, shape.batch), arguments.ranks, batch=[batch_of(shape, 0, 0)]
        )  # before it is measured
        os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the ranks
        world = World("predicted_memory.py", arguments.ranks, setup)  # anew: what is mapped once stays
        answers = world.ask(stage=stage, dtype=dtype)
        world.close()
        row = {"stage": stage, "dtype": dtype, **row_of(predicted, answers, told.get(str(stage)))}
        rows.append({**row, "upstream_version": version, "setup": asked})
        show(rows[-1:])
        if not arguments.dry:
            write_json(NAME, with_kept(rows, asked))
    if not arguments.dry:
        rows = with_kept(rows, asked)
        print(f"written: {write_json(NAME, rows)}")
    show(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(make_rank)
    else:
        main()
