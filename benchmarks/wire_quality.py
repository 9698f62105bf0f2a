"""What encoded gradients and weights cost in loss: `examples/bytes_lm` and the 20 M model of the speed tables.

Each run trains the same model on the same data with another block `wire`. The table shows held-out nats per byte (for
the 20 M model the mean training loss of the last tenth of the steps) and the difference to plain messages, by seed.
Finished runs are kept in the results file, so a call goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import GPT, REPOSITORY, Shape, batch_of, print_table, results_folder

CODECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"gradients_within_host": "bf16", "weights_within_host": "bf16"},
    "int8": {"gradients_within_host": "int8", "weights_within_host": "int8"},
    "int4": {"gradients_within_host": "int4", "weights_within_host": "int8"},
    "int4-no-memory": {"gradients_within_host": "int4", "weights_within_host": "int8", "error_memory": False},
}
MODELS = ("bytes", "20M")
STEPS = 120  # of the 20 M model


def train_bytes(codec: str, seed: int, train_bytes: int) -> float:
    """Run the example; returns held-out nats per byte."""
    import deepspeed

    sys.path.insert(0, str(REPOSITORY / "examples" / "bytes_lm"))
    import train as example

    sys.argv[1:] = ["--seed", str(seed), "--train_bytes", str(train_bytes)]
    options = example.parse_arguments()
    torch.manual_seed(seed)
    training_text, heldout_text = example.split(example.library_files())
    training = example.Windows(training_text, options.sequence, options.train_bytes, seed=seed)
    heldout = example.Windows(heldout_text, options.sequence, options.heldout_bytes, seed=seed)
    model = example.build_model(options)
    config = example.resolve_config(options.deepspeed_config, training) | {"wire": CODECS[codec]}
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=training, config=config
    )
    example.train(engine, loader, options.sequence)
    return example.held_out_loss(engine, heldout)


def train_gpt(codec: str, seed: int) -> float:
    """Train the 20 M model; returns the mean loss of the last tenth of the steps over all ranks."""
    import deepspeed
    from deepspeed import comm

    shape = Shape()
    torch.manual_seed(seed)
    model = GPT(shape)
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 2},
        "wire": CODECS[codec],
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        loss = engine(batch_of(shape, 100_000 * seed + step, comm.get_rank()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    last = torch.tensor(losses[-STEPS // 10 :]).mean()
    comm.all_reduce(last)
    return last.item() / comm.get_world_size()


def run(model: str, codec: str, seed: int, train_bytes: int, ranks: int) -> float:
    """One training on `ranks` ranks of this machine."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", str(ranks), str(Path(__file__))]
    command += ["--one", model, codec, str(seed), str(train_bytes)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'benchmarks'}"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if "reached:" in line).rpartition(":")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--codecs", nargs="+", default=["plain", "int8", "int4"], choices=list(CODECS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--train-bytes", type=int, default=3_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--results", type=Path, help="file of finished runs; default: in benchmarks/results")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        model, codec, seed, size = options.one
        reached = train_bytes(codec, int(seed), int(size)) if model == "bytes" else train_gpt(codec, int(seed))
        if int(os.environ["RANK"]) == 0:
            print(f"reached: {reached:.5f}", flush=True)
        return 0
    path = options.results or results_folder() / "wire_quality.json"
    results: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    for model in options.models:
        for seed in options.seeds:
            for codec in options.codecs:
                name = f"{model} {codec} seed {seed} bytes {options.train_bytes} ranks {options.ranks}"
                if name not in results:
                    results[name] = run(model, codec, seed, options.train_bytes, options.ranks)
                    path.write_text(json.dumps(results, indent=1) + "\n")
                    print(f"{name}: {results[name]:.4f}", flush=True)
        rows = []
        for codec in options.codecs:
            name = f"{model} {{}} seed {{}} bytes {options.train_bytes} ranks {options.ranks}"
            values = [results[name.format(codec, seed)] for seed in options.seeds]
            gaps = [
                value - results[name.format("plain", seed)] for value, seed in zip(values, options.seeds, strict=True)
            ]
            rows.append(
                [codec, f"{statistics.mean(values):.4f}", f"{statistics.mean(gaps):+.4f}", *map("{:+.4f}".format, gaps)]
            )
        print_table([model, "mean", "over plain", *(f"seed {seed}" for seed in options.seeds)], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
