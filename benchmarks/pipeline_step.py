"""Time of one training step of Transformers' Llama in stages, beside torch's own pipelining.

Width 384, 8 layers, vocabulary 8,192, sequence 128, fp32, batch 8 in 4 or 8 micro-batches. Sides, in random order in
every round: torch's 1F1B, interleaved 1F1B and zero-bubble over hand-made stages of equally many layers, and engines at
ZeRO 0 over the unedited model with the same schedules, cut so ("even") and by operations ("best", the default). Losses
are equal, which is checked at the first step; bytes sent are compared with the formula.

Idle is the part of ranks times step in which a rank waits for another; it is compared with what simulation says of the
schedule, where each part costs what its forward, backward and weights took (the mean of a step's micro-batches), and
each stage does beside its schedule what it was seen to do: medians over the rounds. Rounds are kept as they end; a
second call on the same day adds to them, so delete the file when the tree has changed.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from common import (
    World,
    check_losses,
    median_interval,
    print_table,
    results_folder,
    serve,
    start_world,
    time_sides,
    write_json,
)
from tensor_step import LEARNING_RATE, SAME_LOSS, SEQUENCE, VOCABULARY, llama
from torch import Tensor, nn

WIDTH, BATCH = 384, 8
CHUNKS = {"1f1b": 1, "interleaved": 2, "zero_bubble": 1}
PARTITIONS = {"even": "uniform", "best": "best"}
SIDES = [f"{who} {schedule}" for who in ("torch", *PARTITIONS) for schedule in CHUNKS]
REFERENCE = "torch 1f1b"
_ACTION = re.compile(r"([FBW])\d+(?:\.(\d+))?")  # what the recorder calls a forward or backward of a chunk


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
    facts: dict[str, Any] = field(default_factory=dict)


def torchs(schedule: str, rank: int, ranks: int, micros: int) -> Side:
    """torch's pipelining."""
    from torch.distributed import pipelining

    model, parts = llama(WIDTH), ranks * CHUNKS[schedule]
    step = len(model.model.layers) // parts
    own = [Part(model, at * step, (at + 1) * step) for at in range(rank, parts, ranks)]
    device, places = torch.device("cpu"), zip(own, range(rank, parts, ranks), strict=True)
    stages = [pipelining.PipelineStage(part, at, parts, device) for part, at in places]
    made: Any
    if schedule == "1f1b":
        made = pipelining.Schedule1F1B(stages[0], micros, loss_fn=loss_of)
    elif schedule == "interleaved":
        made = pipelining.ScheduleInterleaved1F1B(stages, micros, loss_fn=loss_of)
    else:
        made = pipelining.ScheduleInterleavedZeroBubble(stages, micros, loss_fn=loss_of)
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
    from deepspeed.foundation.spans import recorder

    engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    side = Side(lambda _: 0.0)

    def run(ids: Tensor) -> float | None:
        sent, begun = engine._executor.bytes_sent, time.monotonic_ns()
        recorder.start()
        batches = iter([{"input_ids": part, "labels": part} for part in ids.chunk(micros)])
        loss = float(engine.train_batch(batches))
        ended = time.monotonic_ns()
        recorder.stop()
        spent = spent_in(recorder.take()[0], begun, ended)
        side.facts = {"bytes": engine._executor.bytes_sent - sent, **spent, "model": engine.simulated(micros).idle}
        return loss if engine.is_last_stage() else None

    side.step = run
    return side


def spent_in(spans: Sequence[Any], begun: int, ended: int) -> dict[str, Any]:
    """Seconds of a step: its length, waits, forward and backward by chunk, and what was done beside the schedule."""
    from deepspeed.foundation.spans import CALL, WAIT

    own = [span for span in spans if span.thread == threading.get_ident()]
    actions = [(found, span) for span in own if (found := _ACTION.fullmatch(span.label))]
    first, last = min(span.begin for _, span in actions), max(span.end for _, span in actions)
    took: dict[str, list[float]] = defaultdict(list)
    for found, span in actions:
        took[f"{found[1]}{found[2] or 0}"].append((span.end - span.begin) / 1e9)
    inside = outside = at = 0
    # Over shared memory a call that all must enter waits by itself; calls that send take microseconds.
    for span in sorted(span for span in own if span.category in (WAIT, CALL)):  # one may lie within another
        length = max(0, span.end - max(at, span.begin))
        inside, outside = (inside + length, outside) if first <= span.begin < last else (inside, outside + length)
        at = max(at, span.end)
    beside = (ended - begun - (last - first) - outside) / 1e9
    means = {what: round(statistics.mean(each), 6) for what, each in took.items()}
    seconds = {"step": (ended - begun) / 1e9, "idle": (inside + outside) / 1e9, "beside": beside}
    return {**{what: round(value, 6) for what, value in seconds.items()}, "took": means}


def make_rank(ranks: int, micros: int, sides: list[str]) -> Callable[..., Any]:
    """A rank that holds these sides; a round answers with seconds, losses and facts by side."""
    rank, _ = start_world()
    built = {}
    for name in sides:
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


def measure(ranks: int, micros: int, sides: list[str], given: argparse.Namespace, rounds: list[dict[str, Any]]) -> None:
    """Add rounds to those that were kept: seconds and facts of each rank by side."""
    world = World("pipeline_step.py", ranks, {"ranks": ranks, "micros": micros, "sides": sides})
    order, until = random.Random(given.seed + len(rounds)), time.monotonic() + given.seconds / len(given.micros)
    for number in range(2 if given.dry else given.rounds):
        answers = world.ask(what="round", order=order.sample(sides, len(sides)), number=len(rounds))
        if number == 0:
            check_losses([answer[name][1] for answer in answers for name in sides], SAME_LOSS)
        row = {name: [{"seconds": answer[name][0], **answer[name][2]} for answer in answers] for name in sides}
        for name in sides:
            sent, wanted = sum(fact.get("bytes", 0) for fact in row[name]), formula(name.split()[1], ranks)
            if not name.startswith("torch") and sent != wanted:
                raise SystemExit(f"{name} sent {sent} bytes, not {wanted}")
        rounds.append({"micros": micros, **row})
        if not given.dry:
            keep(ranks, rounds)
        if time.monotonic() > until:
            break
    world.close()


def kept(ranks: int) -> list[dict[str, Any]]:
    """Rounds of today."""
    path = results_folder() / f"pipeline_step-{ranks}.json"
    return json.loads(path.read_text())["rounds"] if path.exists() else []


def keep(ranks: int, rounds: list[dict[str, Any]]) -> None:
    """Write them, with their table."""
    write_json(f"pipeline_step-{ranks}.json", {"rows": rows_of(ranks, rounds), "rounds": rounds})


def rows_of(ranks: int, rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each side: milliseconds, paired ratios to torch's 1F1B and to torch's same schedule, idle shares."""
    rows = []
    for micros in sorted({one["micros"] for one in rounds}):
        own = [one for one in rounds if one["micros"] == micros]
        for name in (side for side in SIDES if side in own[0]):
            here = [one for one in own if name in one]
            same = f"torch {name.split()[1]}"

            def paired(other: str, name: str = name, here: list[Any] = here) -> dict[str, float]:
                found = median_interval([longest(one[name]) / longest(one[other]) for one in here])
                return {"ratio": found.median, "low": found.low, "high": found.high}

            row = {"ranks": ranks, "micros": micros, "side": name, "rounds": len(here),
                   "ms": 1e3 * statistics.median(longest(one[name]) for one in here), **paired(REFERENCE),
                   "of the same": paired(same) if all(same in one for one in here) else {}}  # fmt: skip
            seen = [one[name] for one in here if "idle" in one[name][0]]
            rows.append(row | (idle_of(name, ranks, micros, seen) if seen else {}))
    return rows


def longest(facts: list[dict[str, Any]]) -> float:
    """Seconds of a step: those of the slowest rank."""
    return max(fact["seconds"] for fact in facts)


def idle_of(name: str, ranks: int, micros: int, rounds: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Idle share as it was seen, as simulation has it with what was seen of each part, and as the engine said it."""
    from deepspeed.pipe.schedule import make_schedule
    from deepspeed.pipe.schedule_simulator import simulate

    schedule = name.split()[1]

    def took(rank: int, what: str) -> float:
        return statistics.median(facts[rank]["took"].get(what, 0.0) for facts in rounds)

    costs = [tuple(took(rank, f"{op}{c}") for op in "FBW") for c in range(CHUNKS[schedule]) for rank in range(ranks)]
    beside = [statistics.median(facts[rank]["beside"] for facts in rounds) for rank in range(ranks)]
    found = simulate(make_schedule(schedule, ranks, micros, CHUNKS[schedule]), costs, beside)
    seen = [
        1 - sum(fact["step"] - fact["idle"] for fact in facts) / ranks / max(fact["step"] for fact in facts)
        for facts in rounds
    ]
    return {"idle": statistics.median(seen), "simulated": found.idle, "by operations": rounds[0][0]["model"],
            "simulated ms": 1e3 * found.time}  # fmt: skip


def main() -> None:
    """Run and print."""
    if "--worker" in sys.argv:
        serve(make_rank)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no round after this long")
    parser.add_argument("--micros", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="two rounds, nothing written")
    given = parser.parse_args()
    sides = [side for side in SIDES if side in {REFERENCE, *given.sides}]
    rounds = [] if given.dry else kept(given.ranks)
    for micros in given.micros:
        measure(given.ranks, micros, sides, given, rounds)
    table = [
        [str(row["micros"]), row["side"], str(row["rounds"]), f"{row['ms']:.1f}", ratio(row), ratio(row["of the same"]),
         f"{row['idle']:.1%} / {row['simulated']:.1%} / {row['by operations']:.1%}" if "idle" in row else ""]
        for row in rows_of(given.ranks, rounds)
    ]  # fmt: skip
    head = ["micro-batches", "side", "rounds", "ms", "of torch's 1F1B", "of torch's same"]
    print_table([*head, "idle / simulated / by operations"], table)


def ratio(row: dict[str, float]) -> str:
    """A ratio with its interval; nothing where there is none."""
    return f"{row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" if row else ""


if __name__ == "__main__":
    main()
