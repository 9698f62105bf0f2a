"""Time of one training step of Transformers' Llama in stages, beside torch's own pipelining.

Width 384, 8 layers, vocabulary 8,192, sequence 128, fp32, batch 8 in 4 or 8 micro-batches. Sides, in random order in
every round: torch's 1F1B and interleaved 1F1B over hand-made stages of equally many layers, and engines at ZeRO 0 over
the unedited model with the same schedules, cut so ("even") and by operations ("best", the default). Losses are equal,
which is checked at the first step; bytes sent are compared with the formula.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import World, compare_sides, print_table, serve, start_world, time_sides, write_json
from tensor_step import LEARNING_RATE, SAME_LOSS, SEQUENCE, VOCABULARY, llama
from torch import Tensor, nn

WIDTH, BATCH = 384, 8
CHUNKS = {"1f1b": 1, "interleaved": 2}
SIDES = [f"{who} {schedule}" for who in ("torch", "even", "best") for schedule in CHUNKS]
PARTITIONS = {"even": "uniform", "best": "best"}
REFERENCE = "torch 1f1b"


class Part(nn.Module):
    """Some layers of the model, for torch's stages."""

    def __init__(self, model: Any, low: int, high: int) -> None:
        super().__init__()
        inner = model.model
        self.embed = inner.embed_tokens if low == 0 else None
        self.rotary, self.layers = inner.rotary_emb, inner.layers[low:high]
        last = high == len(inner.layers)
        self.norm, self.head = (inner.norm, model.lm_head) if last else (None, None)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.embed is None else self.embed(hidden)
        places = torch.arange(hidden.shape[1]).unsqueeze(0)
        angles = self.rotary(hidden, places)
        for layer in self.layers:
            found = layer(hidden, attention_mask=None, position_ids=places, position_embeddings=angles)
            hidden = found if isinstance(found, Tensor) else found[0]
        return hidden if self.norm is None else self.head(self.norm(hidden))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


@dataclass
class Side:
    """One way to train: a whole step that returns the loss before it (None on other stages), and its facts."""

    step: Callable[[Tensor], float | None]
    facts: dict[str, float] = field(default_factory=dict)


def torchs(schedule: str, rank: int, ranks: int, micros: int) -> Side:
    """torch's pipelining."""
    from torch.distributed import pipelining

    model, parts = llama(WIDTH), ranks * CHUNKS[schedule]
    step = len(model.model.layers) // parts
    own = [Part(model, at * step, (at + 1) * step) for at in range(rank, parts, ranks)]
    device, places = torch.device("cpu"), zip(own, range(rank, parts, ranks), strict=True)
    stages = [pipelining.PipelineStage(part, at, parts, device) for part, at in places]
    made = (
        pipelining.Schedule1F1B(stages[0], micros, loss_fn=loss_of)
        if schedule == "1f1b"
        else pipelining.ScheduleInterleaved1F1B(stages, micros, loss_fn=loss_of)
    )
    parameters = [param for part in own for param in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False)

    def run(ids: Tensor) -> float | None:
        losses: list[Tensor] = []
        last = {"target": ids, "losses": losses} if rank == ranks - 1 else {}
        made.step(*([ids] if rank == 0 else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return Side(run)


def engines(partition: str, schedule: str, ranks: int, micros: int) -> Side:
    """An engine over the unedited model."""
    import deepspeed

    model = llama(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // micros, "gradient_accumulation_steps": micros,
        "pipeline": {
            "stages": ranks, "schedule": schedule, "chunks": CHUNKS[schedule], "partition": PARTITIONS[partition],
        },
        "steps_per_print": 10**9,
    }  # fmt: skip
    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    side = Side(lambda _: 0.0)

    def run(ids: Tensor) -> float | None:
        executor, begun = engine._executor, time.perf_counter()
        sent, waited = executor.bytes_sent, executor.waited
        batches = iter([{"input_ids": part, "labels": part} for part in ids.chunk(micros)])
        loss = float(engine.train_batch(batches))
        side.facts = {
            "bytes": executor.bytes_sent - sent,
            "idle": (executor.waited - waited) / (time.perf_counter() - begun),
            "simulated": engine.simulated(micros).idle,
        }
        return loss if engine.is_last_stage() else None

    side.step = run
    return side


def make_rank(ranks: int, micros: int) -> Callable[..., Any]:
    """A rank that holds all sides; a round answers with seconds, losses and facts by side."""
    rank, _ = start_world()
    built = {}
    for name in SIDES:
        who, schedule = name.split()
        side = torchs(schedule, rank, ranks, micros) if who == "torch" else engines(who, schedule, ranks, micros)
        built[name] = side

    def handle(what: str, order: list[str], number: int) -> dict[str, Any]:
        ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(number))
        found = time_sides({name: built[name].step for name in order}, order, ids)
        return {name: (*row, built[name].facts) for name, row in found.items()}

    return handle


def formula(schedule: str, ranks: int) -> int:
    """Bytes of activations and gradients that all ranks send in a step."""
    return 2 * (ranks * CHUNKS[schedule] - 1) * BATCH * SEQUENCE * WIDTH * 4


def measure(ranks: int, micros: int, rounds: int, seed: int) -> list[dict[str, Any]]:
    """Rows of the table."""
    world = World("pipeline_step.py", ranks, {"ranks": ranks, "micros": micros})
    rows = compare_sides(world, SIDES, REFERENCE, rounds, seed, SAME_LOSS)
    for row in rows:
        facts = row.pop("facts")
        sent, wanted = sum(fact.get("bytes", 0) for fact in facts), formula(row["side"].split()[1], ranks)
        if sent and sent != wanted:
            raise SystemExit(f"{row['side']} sent {sent} bytes, not {wanted}")
        idle = sum(fact.get("idle", 0.0) for fact in facts) / len(facts)
        row |= {"ranks": ranks, "micros": micros, "bytes": sent, "idle": idle}
        row["simulated"] = facts[0].get("simulated", 0.0)
    return rows


def main() -> None:
    """Run and print."""
    if "--worker" in sys.argv:
        serve(make_rank)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--micros", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="two rounds, nothing written")
    args = parser.parse_args()
    rows = [
        row for micros in args.micros for row in measure(args.ranks, micros, 2 if args.dry else args.rounds, args.seed)
    ]
    table = [
        [str(row["micros"]), row["side"], f"{row['ms']:.1f}",
         f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]", f"{row['idle']:.1%} / {row['simulated']:.1%}"]
        for row in rows
    ]  # fmt: skip
    print_table(["micro-batches", "side", "ms", "of torch's 1F1B", "idle / simulated"], table)
    if not args.dry:
        print(write_json(f"pipeline_step-{args.ranks}.json", rows))


if __name__ == "__main__":
    main()
