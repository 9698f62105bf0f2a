"""Half of the channels of a residual network leave while it trains on scikit-learn's handwritten digits.

Eight epochs dense, then the cut, then three epochs more, all in one engine. Prints accuracy, parameters, and the speed
of both networks as exported programs, in a process that knows neither this package nor the class.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed
from deepspeed import comm

TEST_IMAGES, BATCH = 450, 64

# Paired: both programs take turns on one thread; CPU time of all test images, the median of the ratios.
TIMER = """
import json, statistics, sys, time
import torch
torch.set_num_threads(1)
programs = [torch.export.load(path).module() for path in sys.argv[1:3]]
images = torch.rand(450, 1, 8, 8)
def seconds(program):
    started = time.process_time()
    for _ in range(4):
        program(images)
    return time.process_time() - started
with torch.no_grad():
    for program in programs:
        seconds(program)
    ratios = [seconds(programs[0]) / seconds(programs[1]) for _ in range(9)]
assert "deepspeed" not in sys.modules
print(json.dumps(statistics.median(ratios)))
"""


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.two, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.short = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.norm2(self.two(F.relu(self.norm1(self.one(x))))))


class Network(nn.Module):
    """78 k parameters; `example_input_array` is what the channels are traced with."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.blocks = nn.Sequential(Block(32, 32), Block(32, 32), nn.MaxPool2d(2), Block(32, 48))
        self.last, self.head = nn.Conv2d(48, 64, 1), nn.Linear(64, 10)
        self.example_input_array = torch.randn(2, 1, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.relu(self.last(x)).mean((2, 3)))


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images fp32 `[n, 1, 8, 8]` and labels of training and test, split at random."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come from scikit-learn: pip install scikit-learn") from None
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[training], labels[training], images[test], labels[test]


def config(stage: int, steps: int, cut_after: int, criterion: str, ratio: float) -> dict[str, Any]:
    """The JSON of a run of so many steps that cuts after some of them."""
    shared = {"enabled": True, "criterion": criterion, "schedule_offset": cut_after}
    group = {"params": {"dense_ratio": ratio}, "modules": ["stem", "blocks", "last"]}
    return {
        "train_batch_size": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": steps, "warmup_num_steps": 20}},
        "compression_training": {"channel_pruning": {"shared_parameters": shared, "different_groups": {"all": group}}},
    }


@torch.no_grad()
def accuracy(engine: Any, images: Tensor, labels: Tensor) -> float:
    """Share of test images that are named right; all ranks call."""
    engine.eval()
    right = (engine(images.to(engine.device)).argmax(1).cpu() == labels).float().mean()
    engine.train()
    return float(right)


def epochs(engine: Any, images: Tensor, labels: Tensor, count: int, seed: int) -> None:
    """Train; every rank takes its share of each batch."""
    mine, ranks = comm.get_rank(), comm.get_world_size()
    for epoch in range(count):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for start in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH][mine::ranks]
            loss = F.cross_entropy(engine(images[chosen].to(engine.device)), labels[chosen].to(engine.device))
            engine.backward(loss)
            engine.step()


def speed_up(dense: Path, small: Path) -> float:
    """× of the exported small program, in a fresh process."""
    command = [sys.executable, "-c", TIMER, str(dense), str(small)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd="/").stdout)


def save(model: nn.Module, path: Path) -> None:
    """Write a plain network as an exported program that takes any number of images."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model.cpu().eval(), (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: batch},))
    torch.export.save(program, path)


def main() -> None:
    """Train, cut, train; print what was reached on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--ratio", type=float, default=0.5, help="share of channels kept")
    parser.add_argument("--criterion", default="taylor", choices=["taylor", "magnitude"])
    parser.add_argument("--epochs", type=int, nargs=2, default=(8, 3), help="before and after the cut")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    images, labels, test_images, test_labels = digits(given.seed)
    torch.manual_seed(given.seed)
    model = Network()
    before, steps = sum(p.numel() for p in model.parameters()), len(images) // BATCH
    section = config(given.stage, sum(given.epochs) * steps, given.epochs[0] * steps + 1, given.criterion, given.ratio)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=section)
    epochs(engine, images, labels, given.epochs[0], given.seed)
    dense = accuracy(engine, test_images, test_labels)
    epochs(engine, images, labels, given.epochs[1], given.seed + 1)
    small = accuracy(engine, test_images, test_labels)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        plain = copy.deepcopy(model)  # whole on every rank, whatever the stage
    rank = engine.global_rank
    engine.destroy()
    if rank == 0:
        after = sum(p.numel() for p in plain.parameters())
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, f"{name}.pt2") for name in ("dense", "small")]
            save(Network(), paths[0])
            save(plain, paths[1])
            faster = speed_up(*paths)
        print(f"dense {100 * dense:.2f} % of {before:,} parameters; cut {100 * small:.2f} % of {after:,}")
        print(f"parameters × {after / before:.3f}, {faster:.1f} × faster")
        if given.json is not None:
            row = {"dense": dense, "cut": small, "parameters": after / before, "faster": faster}
            given.json.write_text(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
