"""Compress the model of `make train` in every way, on the same added bytes, and draw loss over size.

A dense model is trained first; every row then starts from it, trains on the same bytes more, and is exported. Size,
loss and speed are those of the exported folder, in a process that does not know this package. What has been done with
the same arguments is not done again: a run that was cut off goes on with the row it was at.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import deepspeed
from deepspeed import comm
from deepspeed.compression import init_compression, redundancy_clean
from deepspeed.compression.compare import Exported
from deepspeed.compression.export import export
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.structured_removal import remove_from
from deepspeed.compression.pruning.verify import flags_at_random

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bytes_lm"))
from corpus import Windows, library_files, split
from train import build_model


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--train_bytes", type=int, default=3_000_000)
    parser.add_argument("--more_bytes", type=int, default=600_000, help="that every row is trained on")
    parser.add_argument("--heldout_bytes", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--more_batch", type=int, default=8, help="of the added bytes: half the size, twice the steps")
    parser.add_argument("--deep_batch", type=int, default=4, help="of rows that lose layers, which need the most steps")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="rows whose names begin so; dense is always there")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("runs/compress"))
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args()


NOT_OF_A_ROW = ("seeds", "only", "output", "local_rank")  # arguments that change no row


@dataclass
class Job:
    """What all rows share.

    Args:
        given: the command line.
        seed: of weights and order.
        first: windows that the dense model is trained on.
        more: windows that every row is trained on.
        heldout: int64 [n, sequence + 1].
        folder: of this seed.
    """

    given: argparse.Namespace
    seed: int
    first: Any
    more: Any
    heldout: Tensor
    folder: Path

    def kept(self) -> dict[str, dict[str, Any]]:
        """Rows that are there already, by name, of the same arguments; else all of the folder's are left aside."""
        same = {key: value for key, value in vars(self.given).items() if key not in NOT_OF_A_ROW}
        path = self.folder / "rows.json"
        held = json.loads(path.read_text()) if path.is_file() else {}
        return held["rows"] if held.get("arguments") == same else {}

    def keep(self, rows: dict[str, dict[str, Any]]) -> None:
        """Write rows down, on rank 0."""
        same = {key: value for key, value in vars(self.given).items() if key not in NOT_OF_A_ROW}
        if comm.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "rows.json").write_text(json.dumps({"arguments": same, "rows": rows}, indent=1) + "\n")
        comm.barrier()

    def dense(self) -> Any:
        """The model that all rows start from: trained, or read if it was trained before."""
        torch.manual_seed(self.seed)
        model, path = build_model(self.given), self.folder / "dense.pt"
        if "trained" in self.kept() and path.is_file():
            model.load_state_dict(torch.load(path))
            return model
        self.train(model, self.first, self.given.lr)
        if comm.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), path)
        self.keep({"trained": {}})
        return model

    def train(
        self,
        model: nn.Module,
        windows: Any,
        lr: float,
        section: dict[str, Any] | None = None,
        teacher: Any = None,
        batch: int | None = None,
    ) -> None:
        """One pass; the model is what came out of it, in fp32.

        Args:
            model: trained in place.
            windows: bytes, each a row of the batch.
            lr: at its highest.
            section: `compression_training`.
            teacher: of a distillation.
            batch: windows per step; default: `--batch`.
        """
        batch = batch or self.given.batch
        steps = math.ceil(len(windows) / batch)
        decay = 0.1 if windows is self.first else 0.0  # one short pass forgets more by it than it gains
        over: dict[str, Any] = {"warmup_num_steps": max(steps // 15, 1), "total_num_steps": steps}
        schedule = {"type": "WarmupCosineLR", "params": over}
        if windows is not self.first:  # a short pass is too soon at the small rates of a cosine
            schedule = {"type": "WarmupDecayLR", "params": {**over, "warmup_max_lr": lr}}
        config = {
            "train_batch_size": batch,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": lr, "betas": [0.9, 0.95], "weight_decay": decay}},
            "scheduler": schedule,
            "bf16": {"enabled": "auto"},  # as the model of `make train`
            "zero_optimization": {"stage": self.given.stage},
            **({"compression_training": section} if section else {}),
        }
        torch.manual_seed(self.seed)
        engine, _, loader, _ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), training_data=windows, config=config
        )
        if teacher is not None:
            engine.set_teacher(teacher)
        for rows in loader:
            ids = rows[:, :-1].to(engine.device)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.destroy()
        model.float()

    def measured(self, model: Any, name: str, weights: str = "float") -> dict[str, Any]:
        """The row of an exported folder; on rank 0, elsewhere empty."""
        row: dict[str, Any] = {}
        if comm.get_rank() == 0:
            folder = self.folder / re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-")
            export(model, model.state_dict(), folder, weights)
            with Exported(folder) as told:
                row = {"name": name, "seed": self.seed, "bytes": told.bytes, "parameters": told.parameters}
                row |= {"loss": told.loss(self.heldout), "prefill": told.seconds("prefill", self.given.sequence, 5)}
            print(f"{self.seed} {name:28} {told.bytes / 1e6:7.2f} MB  {row['loss']:.4f} nats", flush=True)
        comm.barrier()
        return row


def pruning(technique: str, modules: list[str], ratio: float = 0.5, **shared: Any) -> dict[str, Any]:
    """A block of the JSON."""
    group = {"params": {"dense_ratio": ratio}, "modules": modules}
    return {technique: {"shared_parameters": {"enabled": True, **shared}, "different_groups": {"g": group}}}


def rows_of(job: Job, dense: Any) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every row by its name; `dense` is the model that all start from."""
    given, lr = job.given, job.given.lr / 2
    steps = math.ceil(len(job.more) / given.more_batch)
    blocks = ["attention", "mlp"]
    # What is left of the steps mends: a ramp over half of them left 0.04 nats, one over a seventh 0.025.
    ramp = {"schedule_offset": steps // 100, "schedule_offset_end": max(steps // 7, 1), "schedule": "cubic",
            "schedule_offset_stride": max(steps // 100, 1)}  # fmt: skip
    pruned = {
        "single weights -50%": pruning("sparse_pruning", blocks, method="l1", **ramp),
        "2:4": pruning("sparse_pruning", blocks, block_pattern="2:4", schedule_offset=steps // 20),
        "FFN -50%": pruning("row_pruning", ["c_fc"], criterion="taylor", schedule_offset=max(steps // 20, 1)),
    }
    half = given.layers // 2

    def trained(section: dict[str, Any]) -> Any:
        model = copy.deepcopy(dense)
        job.train(model, job.more, lr, section, batch=given.more_batch)
        return model

    # The first and the last layer have learned to read and to write: what stands between them goes.
    kept = sorted({round(at * (given.layers - 1) / max(half - 1, 1)) for at in range(half)})
    shallow = {"layer_reduction": {"enabled": True, "module_name_prefix": "transformer.h", "teacher_layer": kept}}
    learning = {"distillation": {"enabled": True, "hard": 0.5, "logits": 0.5, "temperature": 2.0}}

    def cut_layers(name: str, section: dict[str, Any], teacher: Any = None) -> dict[str, Any]:
        model = copy.deepcopy(dense)
        # at the full rate: half of the model is new to the other half
        job.train(model, job.more, given.lr, {**shallow, **section}, teacher, given.deep_batch)
        return job.measured(model, name)

    def from_scratch(name: str, *parts: Any) -> dict[str, Any]:
        torch.manual_seed(job.seed + 100)
        model = build_model(argparse.Namespace(**{**vars(given), "layers": half}))
        for part in parts:
            job.train(model, part, given.lr, batch=given.batch if part is job.first else given.more_batch)
        return job.measured(model, name)

    @functools.cache
    def whole() -> Any:
        return trained({})

    def packed(weights: str) -> dict[str, Any]:
        return job.measured(whole(), weights, weights)

    return {
        "dense": lambda: job.measured(whole(), "dense"),
        **{name: (lambda n=name, s=section: job.measured(trained(s), n)) for name, section in pruned.items()},
        (name := f"layers -> {half}"): lambda: cut_layers(name, {}),
        f"{name} distilled": lambda: cut_layers(f"{name} distilled", learning, copy.deepcopy(dense)),
        "int8": lambda: packed("int8"),
        "int4": lambda: packed("int4"),
        "w8a8": lambda: packed("w8a8"),
        "scratch, added bytes": lambda: from_scratch("scratch, added bytes", job.more),
        "scratch, all bytes": lambda: from_scratch("scratch, all bytes", job.first, job.more),
        **{f"one-shot {kind}": (lambda k=kind: one_shot(job, dense, k)) for kind in ("none", "taylor", "l1", "random")},
    }


def one_shot(job: Job, dense: Any, criterion: str) -> dict[str, Any]:
    """Half of the FFN leaves, and nothing is trained after it."""
    model = copy.deepcopy(dense)
    if criterion == "taylor":
        few = Subset(job.more, range(min(len(job.more), 16 * job.given.more_batch)))
        section = pruning("row_pruning", ["c_fc"], criterion="taylor", schedule_offset=len(few) // job.given.more_batch)
        job.train(model, few, 0.0, section, batch=job.given.more_batch)
    elif criterion == "l1":
        section = {"compression_training": pruning("row_pruning", ["c_fc"], method="l1", schedule_offset=0)}
        redundancy_clean(init_compression(model, section), section)
    elif criterion == "random":
        cut_at_random(model, job.seed)
    return job.measured(model, f"one-shot {criterion}")


def cut_at_random(model: Any, seed: int) -> None:
    """Half of the FFN units of every layer, whichever."""
    plan = PruningPlan(model)
    shrink = plan.shrinks("ffn")[0]
    keeps = flags_at_random(shrink, 0.5, seed)
    remove_from(model, plan.removal_of(list(zip(shrink.families, keeps, strict=True))))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss over bytes: one point per trained row, the mean over seeds with their range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    points: list[tuple[float, float, str]] = []
    figure, axes = plt.subplots(figsize=(8, 5))
    for name in dict.fromkeys(row["name"] for row in rows if not row["name"].startswith("one-shot")):
        same = [row for row in rows if row["name"] == name]
        size = sum(row["bytes"] for row in same) / len(same) / 1e6
        losses = [row["loss"] for row in same]
        mean = sum(losses) / len(losses)
        axes.errorbar(size, mean, [[mean - min(losses)], [max(losses) - mean]], fmt="o", capsize=3)
        points.append((size, mean, name))
    axes.set(xlabel="MB of the exported folder", ylabel="held-out nats per byte", xscale="log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(sorted({round(size, 1) for size, _, _ in points}))
    axes.margins(x=0.3, y=0.15)
    for size, mean, name in points:  # rows of one size that lie close share a height: one above the other
        near = [other for other in points if abs(other[0] / size - 1) < 0.05]
        rank = sorted((m, n) for _, m, n in near).index((mean, name))
        shift = 13 * (rank - (len(near) - 1) / 2) if len(near) > 1 else 0
        axes.annotate(
            name, (size, mean), textcoords="offset points", xytext=(14, shift), ha="left", va="center", fontsize=8,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "gray"},
        )  # fmt: skip
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def table(rows: list[dict[str, Any]]) -> None:
    """Nats over the dense model that got the same bytes, by row; of one-shot rows over the model that was cut."""
    by = {(row["name"], row["seed"]): row for row in rows}
    print(f"{'row':28} {'MB':>7} {'x':>6} {'nats over dense, by seed'}")
    for name in dict.fromkeys(row["name"] for row in rows):
        same = [row for row in rows if row["name"] == name]
        base = "one-shot none" if name.startswith("one-shot") else "dense"
        over = [row["loss"] - by[base, row["seed"]]["loss"] for row in same if (base, row["seed"]) in by]
        size = same[0]["bytes"] / by["dense", same[0]["seed"]]["bytes"]
        print(f"{name:28} {same[0]['bytes'] / 1e6:7.2f} {size:6.3f} {' '.join(f'{one:+.4f}' for one in over)}")


def main() -> None:
    """Every seed, every row; then table and picture."""
    given = parse_arguments()
    deepspeed.init_distributed()
    training, heldout = split(library_files())
    held = Windows(heldout, given.sequence, given.heldout_bytes, seed=0)
    windows = torch.stack([held[index] for index in range(len(held))])
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        every = Windows(training, given.sequence, given.train_bytes + given.more_bytes, seed=seed)
        cut = given.train_bytes // given.sequence
        parts = [Subset(every, range(cut)), Subset(every, range(cut, len(every)))]
        job = Job(given, seed, *parts, windows, given.output / str(seed))
        dense, done = job.dense(), job.kept()
        for name, run in rows_of(job, dense).items():
            if given.only is None or name == "dense" or any(name.startswith(one) for one in given.only):
                if name not in done:
                    done[name] = run()
                    job.keep(done)
                rows.append(done[name])
    if comm.get_rank() == 0:
        given.output.mkdir(parents=True, exist_ok=True)
        (given.output / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
        table(rows)
        draw(rows, given.output / "loss_over_size.png")
        print(f"picture: {given.output / 'loss_over_size.png'}", flush=True)


if __name__ == "__main__":
    main()
