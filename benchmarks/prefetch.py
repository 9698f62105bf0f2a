"""Stage 3 on large shapes without the machines: is every gather started ahead, and how much is gathered at once?

Llama-7B, Qwen-72B and Mixtral 8x7B on meta tensors over simulated ranks, as in `scale.py`, at default and "auto" keys.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import print_table, write_json
from scale import Block, Decoder
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

PASSES = 3
KEYS: dict[str, dict[str, Any]] = {
    "default": {},
    "auto": {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "nothing ahead": {"stage3_prefetch_bucket_size": 0},
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; `experts` is 0 for a dense block."""

    vocabulary: int
    width: int
    inner: int
    layers: int
    experts: int = 0


SHAPES = {
    "Llama-7B": Shape(32000, 4096, 11008, 32),
    "Qwen-72B": Shape(152064, 8192, 24576, 80),
    "Mixtral-8x7B": Shape(32000, 4096, 14336, 32, experts=8),
}


class Expert(nn.Module):
    """A gated map."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(Block):
    """A block whose dense map is replaced by experts; meta tensors cannot be routed, so all are run."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__(width, inner)
        del self.gate, self.up, self.down
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h)))
        h = self.after(x)
        weights = self.router(h).softmax(-1)
        return x + sum(expert(h) * weights[..., i : i + 1] for i, expert in enumerate(self.experts))


def model_of(shape: Shape) -> Decoder:
    """The model, on the meta device."""
    with torch.device("meta"):
        model = Decoder(shape.vocabulary, shape.width, shape.inner, 0)
        blocks = (
            Mixture(shape.width, shape.inner, shape.experts) if shape.experts else Block(shape.width, shape.inner)
            for _ in range(shape.layers)
        )
        model.blocks = nn.ModuleList(blocks)
    model.config = SimpleNamespace(hidden_size=shape.width)  # what "auto" is resolved from
    return model


def measure(name: str, keys: str, layers: int | None) -> dict[str, Any]:
    """One shape, or so many of its layers, under one choice of keys."""
    import deepspeed

    shape = SHAPES[name]
    engine, *_ = deepspeed.initialize(
        model=(model := model_of(replace(shape, layers=min(shape.layers, layers or shape.layers)))),
        model_parameters=model.parameters(),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "zero_optimization": {"stage": 3, **KEYS[keys]},
        },
    )
    lifecycle = engine._components.lifecycle
    units = [sum(group.numel for group in groups) for groups in lifecycle.units.values()]
    neighbours = max(a + b for a, b in zip(units, units[1:], strict=False))
    ahead_in_passes = []
    for _ in range(PASSES):
        before = engine.zero_report()
        logits = engine(torch.zeros(1, 16, dtype=torch.long, device="meta"))
        engine.backward(logits.float().logsumexp(-1).mean())
        engine.step()
        after = engine.zero_report()
        ahead_in_passes.append({key: after[key] - before[key] for key in ("gathers", "late")})
    limits, report = lifecycle.prefetcher.limits, engine.zero_report()
    engine.destroy()
    bound = max(limits.live, neighbours)
    # Without prefetching, nothing but the first gather of a pass is expected to be there.
    wanted = 0 if limits.prefetch else ahead_in_passes[-1]["gathers"] - 1
    return {
        "model": name,
        "keys": keys,
        "units": len(units),
        "largest unit": max(units),
        "prefetch bucket": limits.prefetch,
        "gathers of a pass": ahead_in_passes[-1]["gathers"],
        "not ahead": ahead_in_passes[-1]["late"],
        "peak": report["peak"],
        "bound": bound,
        "held": report["peak"] <= bound and all(p["late"] == wanted for p in ahead_in_passes[1:]),
    }


def main() -> None:
    """Print and write the table; exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer than the models have")
    parser.add_argument("--dry", action="store_true", help="write no results")
    args = parser.parse_args()
    os.environ.update(RANK="0", WORLD_SIZE=str(args.ranks), LOCAL_RANK="0")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    from deepspeed.comm.collectives import scalars

    scalars.current = scalars.FakeScalars()
    rows = [measure(name, keys, args.layers) for name in args.models for keys in KEYS]
    print_table(list(rows[0]), [[f"{v:,}" if type(v) is int else str(v) for v in row.values()] for row in rows])
    if not args.dry:
        print(f"written: {write_json('prefetch.json', rows)}")
    if not all(row["held"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
