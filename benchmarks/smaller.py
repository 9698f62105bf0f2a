"""A trained model made smaller: heads and FFN units, or layers leave it, with and without distillation.

`python -m benchmarks.smaller --model FOLDER` (a Hugging Face folder) trains every row on the same windows of local text
(Python's own library; one file in twenty is held out) with the package's own pruning and distillation, exports it, and
prints parameters, held-out nats, and the time of a pass in processes that know Transformers alone. The dense model is
trained on the same windows beside them and teaches the distilled rows: a model that has not seen this text would hold
them back. Rows that are there already are not trained again, and a row that was killed goes on from its last checkpoint
(`--save_every`): the same command is repeated until all rows are there.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
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


def rows_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """`compression_training` of each row."""
    offset = max(options.steps // 20, 1)  # scores are gathered until then
    shared = {"shared_parameters": {"enabled": True, "criterion": "taylor", "schedule_offset": offset}}
    narrow = {
        "head_pruning": {**shared, **group([options.attention], options.heads)},
        "row_pruning": {**shared, **group([options.ffn], options.units)},
    }
    shallow = {"layer_reduction": {"enabled": True, "keep_number_layer": options.layers, "schedule_offset": offset}}
    learning = {"distillation": {"enabled": True, "hard": options.hard, "logits": 1 - options.hard,
                                 "temperature": options.temperature, "hidden": options.hidden,
                                 "hidden_distance": "cosine"}}  # fmt: skip
    rows = {DENSE: {}, "narrow": narrow, "narrow, distilled": {**narrow, **learning}}
    return rows | {"shallow": shallow, "shallow, distilled": {**shallow, **learning}}


def windows(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Training and held-out windows, int64 [windows, length + 1]."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    sides = []
    for text, count in zip(split(library_files()), (options.steps * options.rows, options.held_out), strict=True):
        files = bytes(text.numpy()).decode().split("\0")
        random.Random(0).shuffle(files)
        tokens: list[int] = []
        for file in files:  # a part of each, so that no file fills the whole
            tokens += tokenizer(file[:4000], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            if len(tokens) > count * (options.length + 1):
                break
        count = min(count, len(tokens) // (options.length + 1))
        rows = torch.tensor(tokens[: count * (options.length + 1)]).view(count, options.length + 1)
        sides.append(rows[torch.randperm(count, generator=torch.Generator().manual_seed(0))])
    return sides[0], sides[1]


def config_of(options: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a row."""
    rate = options.rate if section else options.dense_rate
    over = {"warmup_num_steps": max(options.steps // 20, 1), "total_num_steps": options.steps, "warmup_max_lr": rate}
    return {
        "train_batch_size": options.rows,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "scheduler": {"type": "WarmupDecayLR", "params": over},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        **({"bf16": {"enabled": True}} if options.dtype == "bf16" else {}),
        **({"compression_training": section} if section else {}),
    }


def row_key(options: argparse.Namespace, section: dict[str, Any]) -> dict[str, Any]:
    """What a row depends on; a stored row or checkpoint with another key is not used."""
    key = config_of(options, section) | {"steps": options.steps, "length": options.length, "model": str(options.model)}
    if "distillation" in section:
        key["teacher"] = row_key(options, {})
    return json.loads(json.dumps(key))  # as it comes out of a file


def resume(engine: Any, state: Path, key: dict[str, Any]) -> dict[str, list[float]]:
    """Load the row's last checkpoint; returns the losses and CPU seconds of its steps, empty without a checkpoint."""
    key_file = state / "key.json"
    if not key_file.exists() or json.loads(key_file.read_text()) != key:
        shutil.rmtree(state, ignore_errors=True)
        state.mkdir(parents=True)
        key_file.write_text(json.dumps(key))
    if not (state / "latest").exists():
        return {"losses": [], "seconds": []}
    _, client_state = engine.load_checkpoint(str(state))
    return {name: client_state[name] for name in ("losses", "seconds")}


def train(options: argparse.Namespace, name: str, section: dict[str, Any], text: Tensor) -> dict[str, Any]:
    """One row: trained on all windows in their order, and exported; returns its losses and CPU seconds a step."""
    from transformers import AutoModelForCausalLM

    folder = row_folder(options, name)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config_of(options, section))
    if "distillation" in section:
        dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
        engine.set_teacher(AutoModelForCausalLM.from_pretrained(row_folder(options, DENSE), dtype=dtype))
    progress = resume(engine, folder / "state", row_key(options, section))
    losses, seconds = progress["losses"], progress["seconds"]
    for batch in text.split(options.rows)[len(losses) :]:
        started, ids = time.process_time(), batch[:, :-1].to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.process_time() - started)
        steps = len(losses)
        if steps % max(options.steps // 50, 1) == 0:
            print(f"{name}: step {steps}, loss {losses[-1]:.4f}, {seconds[-1]:.1f} CPU s", file=sys.stderr, flush=True)
        if options.save_every and steps % options.save_every == 0 and steps < options.steps:
            engine.save_checkpoint(str(folder / "state"), tag="last", client_state=progress)
    engine.export_compressed(str(folder))
    engine.destroy()
    return {"losses": losses, "cpu_seconds": statistics.median(seconds[len(seconds) // 2 :])}


def stored_row(options: argparse.Namespace, name: str, section: dict[str, Any], text: Tensor) -> dict[str, Any]:
    """`row.json` of a row's folder, trained first if it is not there."""
    folder, key = row_folder(options, name), row_key(options, section)
    file = folder / "row.json"
    if not file.exists() or json.loads(file.read_text())["of"] != key:
        folder.mkdir(parents=True, exist_ok=True)
        row = {"of": key, **train(options, name, section, text)}
        file.with_suffix(".part").write_text(json.dumps(row))
        file.with_suffix(".part").rename(file)  # a kill leaves no half of a row
        shutil.rmtree(folder / "state")
    return json.loads(file.read_text())


def row_folder(options: argparse.Namespace, name: str) -> Path:
    """Where a row is exported."""
    return options.output / re.sub("[^a-z0-9]+", "-", name)


def measure(folders: dict[str, Path], held: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Parameters, held-out nats, and CPU seconds of a pass over a prompt, beside the dense model in each round."""
    rows: dict[str, dict[str, float]] = {}
    with Exported(folders[DENSE]) as dense:
        for name, folder in folders.items():
            with Exported(folder) as model:
                row = {"parameters": model.parameters, "nats": model.loss(held)}
                for kind in ("prefill", "token"):
                    pairs = [(model.seconds(kind, 128, 3), dense.seconds(kind, 128, 3)) for _ in range(rounds)]
                    row[kind] = statistics.median(own for own, _ in pairs)
                    row[f"{kind} faster"] = statistics.median(other / own for own, other in pairs)
            rows[name] = row
    return rows


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
    parser.add_argument("--rate", type=float, default=3e-4, help="of rows that lose something")
    parser.add_argument("--dense_rate", type=float, default=1e-4)
    parser.add_argument("--attention", default="o_proj", help="expression that finds the matrices out of attention")
    parser.add_argument("--ffn", default="(gate|up)_proj", help="expression that finds the matrices into the FFN")
    parser.add_argument("--heads", type=float, default=2 / 3, help="kept share; whole key-value groups")
    parser.add_argument("--units", type=float, default=7 / 9, help="kept share of the FFN: with --heads, 3/4 of both")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hard", type=float, default=0.3, help="share of the own loss beside the teacher's")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--hidden", type=float, default=10.0, help="weight of the cosine of hidden states")
    parser.add_argument("--rounds", type=int, default=7, help="of paired timings")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of all rows' training")
    parser.add_argument("--save_every", type=int, default=25, help="steps between a row's checkpoints; 0: none")
    parser.add_argument("--only", nargs="+", help="rows; dense comes along")
    parser.add_argument("--output", type=Path, default=Path("runs/smaller"))
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    return parser.parse_args()


def main() -> None:
    """Every row that is asked for; then table and picture."""
    options = arguments()
    import matplotlib  # noqa: F401 -- missing now, not after hours

    options.output.mkdir(parents=True, exist_ok=True)
    text, held = windows(options)
    folders, stored = {"before": options.model}, {}
    for name, section in rows_of(options).items():
        if options.only and name != DENSE and name not in options.only:
            continue
        stored[name] = stored_row(options, name, section, text)
        folders[name] = row_folder(options, name)
    rows = measure(folders, held, options.rounds)
    table = []
    for name, row in rows.items():
        table.append([name, f"{row['parameters'] / 1e6:.1f}", f"{row['nats']:.4f}",
                      f"{row['nats'] - rows[DENSE]['nats']:+.4f}", f"{row['prefill faster']:.2f}",
                      f"{row['token faster']:.2f}", f"{stored.get(name, {}).get('cpu_seconds', 0):.2f}"])  # fmt: skip
    head = ["row", "million parameters", "held-out nats", "over dense", "prompt, x faster", "token, x faster"]
    print_table([*head, "CPU s a step"], table)
    draw(rows, options.output / "smaller.png")
    if options.write:
        losses = {name: row["losses"] for name, row in stored.items()}
        print(write_json("smaller.json", {"rows": rows, "losses": losses, "tokens": text[:, 1:].numel()}))
    missed = [name for name, row in rows.items() if name.endswith("distilled")
              and (row["nats"] > rows[DENSE]["nats"] + BAR_NATS or row["prefill faster"] < BAR_SPEED)]  # fmt: skip
    if missed:
        raise SystemExit(
            f"worse than {BAR_NATS} nats over dense, or not {BAR_SPEED} times as fast: {', '.join(missed)}"
        )


if __name__ == "__main__":
    main()
