"""1,024 ranks and a 7 B model without the machines: meta tensors, a fake process group, scalar decisions supplied.

Builds the engine of rank 0, runs one step, and compares the bytes of its state with the formula.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

# bytes per parameter and rank at N ranks: bf16 parameters, fp32 master, two moments, fp32 accumulators
FORMULA = {
    0: lambda n: 2 + 12 + 4,
    1: lambda n: 2 + 12 / n + 4 / n,
    2: lambda n: 2 + 12 / n + 4 / n,
    3: lambda n: (2 + 12 + 4) / n,
}


class Block(nn.Module):
    """A decoder block of the usual 7 B shape."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h)))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Embedding, blocks, head: 6.7 B parameters."""

    def __init__(self, vocabulary: int = 32000, width: int = 4096, inner: int = 11008, layers: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def measure(stage: int, ranks: int) -> tuple[float, float, float]:
    """(seconds to build and step, bytes per parameter and rank, the formula's)."""
    import deepspeed

    with torch.device("meta"):
        model = Decoder()
    count = sum(p.numel() for p in model.parameters())
    started = time.perf_counter()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    logits = engine(torch.zeros(1, 128, dtype=torch.long, device="meta"))
    engine.backward(logits.float().logsumexp(-1).mean())
    engine.step()
    seconds = time.perf_counter() - started
    state = sum(engine.state_bytes().values()) / count
    engine.destroy()
    return seconds, state, FORMULA[stage](ranks)


def main() -> None:
    """Print the table; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    args = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE=str(args.ranks), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    from deepspeed.comm.collectives import scalars

    scalars.current = scalars.FakeScalars()
    missed = False
    print("stage  build and step   bytes/parameter/rank    formula   bar: < 60 s, within 3 %")
    for stage in args.stages:
        seconds, state, formula = measure(stage, args.ranks)
        held = seconds < 60 and abs(state / formula - 1) <= 0.03
        missed |= not held
        print(f"{stage:5d} {seconds:13.1f} s {state:22.5f} {formula:10.5f}   {'held' if held else 'MISSED'}")
    dist.destroy_process_group()
    if missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
