"""A convolutional network learns handwritten digits: `deepspeed --num_gpus 2 examples/gallery/digits.py`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from pictures import digits, picture
from torch import nn
from torch.nn import functional as F

import deepspeed


def network() -> nn.Module:
    """37 k parameters."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 24), *block(24, 48), nn.MaxPool2d(2), *block(48, 48), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(48, 10),
    )  # fmt: skip


def main() -> None:
    """Train, measure on images that were not seen, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path("runs/gallery"))
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    images, labels, test_images, test_labels = digits()
    torch.manual_seed(0)
    model = network()
    config = {
        "train_batch_size": 64,
        "optimizer": {"type": "AdamW", "params": {"lr": 4e-3}},
        "zero_optimization": {"stage": given.stage},
        "steps_per_print": 10**9,
    }
    data = list(zip(images, labels, strict=True))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config
    )
    losses = []
    for _ in range(given.epochs):
        for x, y in engine.loop(loader, progress=True):
            loss = F.cross_entropy(engine(x.to(engine.device)), y.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.eval()
    with torch.no_grad():
        said = engine(test_images.to(engine.device)).argmax(1).cpu()
    first = engine.global_rank == 0
    engine.destroy()
    if first:
        right = 100 * (said == test_labels).float().mean().item()
        table = torch.zeros(10, 10)
        for truth, answer in zip(test_labels, said, strict=True):
            table[truth, answer] += 1
        with picture(given.output / "digits.png", columns=2) as (curve, confusion):
            curve.plot(losses, linewidth=0.8)
            curve.set(xlabel="step", ylabel="loss", yscale="log")
            confusion.imshow(table.log1p(), cmap="Blues")
            confusion.set(xlabel="said", ylabel="is", title=f"{right:.1f} % of {len(said)} unseen digits")
        print(f"{right:.1f} % of the unseen digits are named right")


if __name__ == "__main__":
    main()
