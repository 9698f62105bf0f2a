"""A trained model made smaller: heads and FFN units, or layers leave it, with and without distillation.

`python -m benchmarks.smaller --model FOLDER` (a Hugging Face folder) trains every row on the same windows of local text
(Python's own library; one file in twenty is held out) with the package's own pruning and distillation, exports it, and
prints parameters, held-out nats, and the time of a pass in processes that know Transformers alone. The dense model is
trained on the same windows beside them. Rows that are there already are not trained again.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import deepspeed
from benchmarks.common import REPOSITORY, print_table, write_json
from deepspeed.compression.compare import Exported

sys.path.insert(0, str(REPOSITORY / "examples" / "bytes_lm"))
from corpus import library_files, split

BAR_NATS, BAR_SPEED = 0.15, 1.2
DENSE = "dense"


def group(modules: list[str], ratio: float) -> dict[str, Any]:
    """`different_groups` of one group."""
    return {"different_groups": {"g": {"params": {"dense_ratio": ratio}, "modules": modules}}}


def rows_of(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`compression_training` of each row."""
    offset = max(given.steps // 20, 1)  # scores are gathered until then
    shared = {"shared_parameters": {"enabled": True, "criterion": "taylor", "schedule_offset": offset}}
    narrow = {
        "head_pruning": {**shared, **group([given.attention], given.heads)},
        "row_pruning": {**shared, **group([given.ffn], given.units)},
    }
    shallow = {"layer_reduction": {"enabled": True, "keep_number_layer": given.layers, "schedule_offset": offset}}
    learning = {"distillation": {"enabled": True, "teacher": "before", "hard": given.hard, "logits": 1 - given.hard,
                                 "temperature": given.temperature}}  # fmt: skip
    rows = {DENSE: {}, "narrow": narrow, "narrow, distilled": {**narrow, **learning}}
    return rows | {"shallow": shallow, "shallow, distilled": {**shallow, **learning}}


def windows(given: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Training and held-out windows, int64 [windows, length + 1]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    found = []
    for text, count in zip(split(library_files()), (given.steps * given.rows, given.held_out), strict=True):
        files = bytes(text.numpy()).decode().split("\0")
        random.Random(0).shuffle(files)
        tokens: list[int] = []
        for file in files:  # a part of each, so that no file fills the whole
            tokens += tokenizer(file[:4000], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            if len(tokens) > count * (given.length + 1):
                break
        count = min(count, len(tokens) // (given.length + 1))
        rows = torch.tensor(tokens[: count * (given.length + 1)]).view(count, given.length + 1)
        found.append(rows[torch.randperm(count, generator=torch.Generator().manual_seed(0))])
    return found[0], found[1]


def config_of(given: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a row."""
    rate = given.rate if section else given.dense_rate
    over = {"warmup_num_steps": max(given.steps // 20, 1), "total_num_steps": given.steps, "warmup_max_lr": rate}
    return {
        "train_batch_size": given.rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": over},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        **({"compression_training": section} if section else {}),
    }


def train(given: argparse.Namespace, name: str, section: dict[str, Any], text: Tensor, folder: Path) -> dict[str, Any]:
    """One row: trained on all windows in their order, and exported; returns its losses."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).train()
    trained = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config_of(given, section))
    losses, times = [], []
    for number, batch in enumerate(text.split(given.rows), start=1):
        started, ids = time.process_time(), batch[:, :-1].to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        times.append(time.process_time() - started)
        if number % max(given.steps // 50, 1) == 0:
            print(f"{name}: step {number}, loss {losses[-1]:.4f}, {times[-1]:.1f} CPU s", file=sys.stderr, flush=True)
    engine.export_compressed(str(folder))
    engine.destroy()
    return {"losses": losses, "cpu_seconds": statistics.median(times[len(times) // 2 :])}


def measure(folders: dict[str, Path], held: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Parameters, held-out nats, and CPU seconds of a pass over a prompt, beside the dense model in each round."""
    found: dict[str, dict[str, float]] = {}
    with Exported(folders[DENSE]) as dense:
        for name, folder in folders.items():
            with Exported(folder) as told:
                row = {"parameters": told.parameters, "nats": told.loss(held)}
                for kind in ("prefill", "token"):
                    pairs = [(told.seconds(kind, 128, 3), dense.seconds(kind, 128, 3)) for _ in range(rounds)]
                    row[kind] = statistics.median(own for own, _ in pairs)
                    row[f"{kind} faster"] = statistics.median(other / own for own, other in pairs)
            found[name] = row
    return found


def draw(rows: dict[str, dict[str, float]], path: Path) -> None:
    """Held-out nats over parameters; an arrow from a row to its distilled form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for name, row in rows.items():
        point = (row["parameters"] / 1e6, row["nats"])
        axes.plot(*point, "o", color="tab:blue" if "distilled" in name else "tab:gray" if name == DENSE else "tab:red")
        axes.annotate(
            f"{name}\n{row['prefill faster']:.2f} x", point, xytext=(8, 0), textcoords="offset points", fontsize=8
        )
    axes.axhline(rows[DENSE]["nats"] + BAR_NATS, color="black", lw=0.8, ls="--")
    axes.set(xlabel="million parameters", ylabel="held-out nats per token")
    axes.margins(x=0.25, y=0.15)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--held_out", type=int, default=64, help="windows")
    parser.add_argument("--rate", type=float, default=2e-4, help="of rows that lose something")
    parser.add_argument("--dense_rate", type=float, default=1e-4)
    parser.add_argument("--attention", default="o_proj", help="expression that finds the matrices out of attention")
    parser.add_argument("--ffn", default="(gate|up)_proj", help="expression that finds the matrices into the FFN")
    parser.add_argument("--heads", type=float, default=2 / 3, help="kept share; whole key-value groups")
    parser.add_argument("--units", type=float, default=0.75, help="kept share of the FFN")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hard", type=float, default=0.3, help="share of the own loss beside the teacher's")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7, help="of paired timings")
    parser.add_argument("--only", nargs="+", help="rows; dense comes along")
    parser.add_argument("--output", type=Path, default=Path("runs/smaller"))
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Every row that is asked for; then table and picture."""
    given = arguments()
    given.output.mkdir(parents=True, exist_ok=True)
    text, held = windows(given)
    folders, told = {"before": given.model}, {}
    for name, section in rows_of(given).items():
        if given.only and name != DENSE and name not in given.only:
            continue
        folder = given.output / re.sub("[^a-z0-9]+", "-", name)
        key = config_of(given, section) | {"steps": given.steps, "length": given.length, "model": str(given.model)}
        kept = folder / "row.json"
        if not kept.exists() or json.loads(kept.read_text())["of"] != key:
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(json.dumps({"of": key, **train(given, name, section, text, folder)}))
        folders[name], told[name] = folder, json.loads(kept.read_text())
    found = measure(folders, held, given.rounds)
    table = []
    for name, row in found.items():
        table.append([name, f"{row['parameters'] / 1e6:.1f}", f"{row['nats']:.4f}",
                      f"{row['nats'] - found[DENSE]['nats']:+.4f}", f"{row['prefill faster']:.2f}",
                      f"{row['token faster']:.2f}", f"{told.get(name, {}).get('cpu_seconds', 0):.2f}"])  # fmt: skip
    head = ["row", "million parameters", "held-out nats", "over dense", "prompt, x faster", "token, x faster"]
    print_table([*head, "CPU s a step"], table)
    draw(found, given.output / "smaller.png")
    if given.write:
        losses = {name: row["losses"] for name, row in told.items()}
        print(write_json("smaller.json", {"rows": found, "losses": losses, "tokens": text[:, 1:].numel()}))
    off = [name for name, row in found.items() if name.endswith("distilled")
           and (row["nats"] > found[DENSE]["nats"] + BAR_NATS or row["prefill faster"] < BAR_SPEED)]  # fmt: skip
    if off:
        raise SystemExit(f"worse than {BAR_NATS} nats over dense, or not {BAR_SPEED} times as fast: {', '.join(off)}")


if __name__ == "__main__":
    main()
