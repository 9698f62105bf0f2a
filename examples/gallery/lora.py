"""LoRA of a byte-level model: `deepspeed --num_gpus 2 examples/gallery/lora.py`.

A small transformer learns Python; then it is frozen, and two thin matrices beside each of its own learn another text,
these pages' English. The frozen base is split over the ranks like everything else, and takes no optimizer state.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from pictures import picture
from torch import Tensor, nn
from torch.nn import functional as F

import deepspeed

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "bytes_lm"))
from corpus import Windows, library_files, split  # noqa: E402

LENGTH, WIDTH, BATCH = 64, 128, 16


class Model(nn.Module):
    """Bytes in, logits of each next byte out."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.places(torch.arange(x.size(1), device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Causal attention, then two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.one(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.two(x))))


class Adapted(nn.Module):
    """A frozen layer, and beside it a product of two thin matrices, zero at the start (Hu et al. 2021)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.a), self.b)


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Nats per byte; windows: `[batch, LENGTH + 1]`."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train(model: nn.Module, windows: Windows, stage: int, rate: float) -> tuple[Any, list[float]]:
    """One pass over the windows; the engine, and the loss of every step on this rank."""
    trained = [param for param in model.parameters() if param.requires_grad]
    config = {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=trained, training_data=windows, config=config
    )
    losses = []
    for batch in engine.loop(loader, progress=True):
        loss = loss_of(engine, batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return engine, losses


@torch.no_grad()
def held_out(engine: Any, windows: Windows) -> float:
    """Mean loss over all of the windows; every rank computes the whole."""
    engine.eval()
    found = [loss_of(engine, torch.stack([windows[i] for i in range(at, at + 16)]).to(engine.device)).item()
             for at in range(0, len(windows) - 15, 16)]  # fmt: skip
    engine.train()
    return sum(found) / len(found)


def main() -> None:
    """Teach the base, freeze it, teach the adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--steps", type=int, default=250, help="of each of the two parts")
    parser.add_argument("--output", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    torch.manual_seed(0)
    python, _ = split(library_files())
    pages = sorted((Path(__file__).resolve().parents[2] / "docs").glob("*.md"))
    text = bytearray(b"".join(page.read_bytes() for page in pages))
    english = torch.frombuffer(text, dtype=torch.uint8)
    count = given.steps * BATCH * LENGTH
    edge = len(english) * 9 // 10
    first, then = Windows(python, LENGTH, count, seed=0), Windows(english[:edge], LENGTH, count, seed=1)
    unseen = Windows(english[edge:], LENGTH, 128 * LENGTH, seed=2)
    model = Model()
    engine, before = train(model, first, given.stage, 3e-3)
    start = held_out(engine, unseen)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):  # whole, to be wrapped anew
        weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    engine.destroy()
    model = Model()
    model.load_state_dict(weights)
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name), given.rank))
    total = sum(p.numel() for p in model.parameters())
    thin = sum(p.numel() for p in model.parameters() if p.requires_grad)
    engine, after = train(model, then, given.stage, 1e-2)
    end = held_out(engine, unseen)
    lead = engine.global_rank == 0
    engine.destroy()
    if lead:
        with picture(given.output / "lora.png") as axes:
            axes.plot(before, linewidth=0.7, label=f"base on Python: {total - thin:,} parameters")
            axes.plot(range(len(before), len(before) + len(after)), after, linewidth=0.7,
                      label=f"adapters on English: {thin:,}")  # fmt: skip
            axes.set(xlabel="step", ylabel="nats per byte", title=f"unseen English: {start:.2f}, then {end:.2f}")
            axes.legend()
        print(f"{thin:,} of {total:,} parameters adapted: unseen English {start:.2f} -> {end:.2f} nats per byte")


if __name__ == "__main__":
    main()
