"""Steps on cards that are not here: published rows checked, this package beside FSDP2 and DDP, offload, memory.

`python -m benchmarks.simulate PART` (see `PARTS`); recordings and results are kept: a run that was ended goes on where
it was. Nothing here is run on a GPU: steps are recorded without values on an emulated device, and replayed with a
card's published figures (`deepspeed/simulator`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import decode_tables
from benchmarks.gpu.plan import TINY, TRAINING
from benchmarks.simulated_models import PER_HOST, SHAPES, Decoder, package_config
from deepspeed.planner.memory import simulate
from deepspeed.planner.train_program import Program
from deepspeed.simulator.allocator import replay_memory
from deepspeed.simulator.machine import Machine, cards
from deepspeed.simulator.replay import SimulatedTimeline, draw, repeated, replay
from deepspeed.simulator.trace import COPY, DISK, HOST, KERNEL, MARK, Recording

RESULTS = Path(__file__).parent / "results" / "simulated"
KEPT = RESULTS / "recordings"  # of one card: `benchmarks/gpu` compares with them where there is one
PREDICTION = 0.05  # bar: predicted over allocated memory
FIT = {"H100-80GB": "13b 2048 8", "H100-80GB-500W": "llama3-8b 8192 8"}


@dataclass(frozen=True)
class Row:
    """A published throughput: eager FSDP, bf16. Tokens per second and GPU."""

    model: str
    length: int
    ranks: int
    micro: int
    accumulation: int
    recompute: bool
    tokens: float
    card: str = "H100-80GB"

    @property
    def name(self) -> str:
        return f"{self.model.removeprefix('mpt-')} {self.length} {self.ranks}"


def _rows() -> list[Row]:
    lines = """70b 2048 64 8 4 yes 1039
        70b 2048 32 2 16 yes 882
        30b 8192 8 1 21 yes 1384
        30b 4096 8 1 21 yes 1802
        30b 2048 32 14 3 yes 2308
        30b 2048 16 10 3 yes 2263
        30b 2048 8 3 21 yes 2002
        13b 16384 8 3 3 yes 2985
        13b 4096 8 10 3 yes 4717
        13b 2048 64 2 1 no 4800
        13b 2048 32 2 1 no 4811
        13b 2048 16 2 1 no 4767
        13b 2048 8 2 1 no 4792
        13b 1024 8 40 3 yes 5502
        7b 8192 8 8 2 yes 6935
        7b 4096 8 16 2 yes 8611
        7b 2048 8 6 1 no 10643
        7b 1024 8 64 2 yes 10203
        3b 8192 8 3 6 no 16578
        3b 4096 8 5 6 no 20964
        3b 2048 64 6 3 no 22525
        3b 2048 16 10 3 no 24142
        1b 2048 64 20 1 no 44402
        1b 2048 8 14 1 no 45455
        760m 2048 32 24 1 no 67971
        760m 2048 8 24 2 no 63147"""
    found = []
    for line in lines.splitlines():
        model, length, ranks, micro, accumulation, recompute, tokens = line.split()
        numbers = [int(each) for each in (length, ranks, micro, accumulation)]
        found.append(Row(f"mpt-{model}", *numbers, recompute == "yes", float(tokens)))
    for ranks, tokens in (
        (8, 5762.0),
        (128, 5605.0),
    ):  # torchtitan's; recompute in part is in the constants
        found.append(Row("llama3-8b", 8192, ranks, 2, 1, False, tokens, "H100-80GB-500W"))
    return found


ROWS = _rows()


def recorded(kept: Path, **case: Any) -> Recording:
    """A recording, from its file or made in a process of its own."""
    name = "-".join(str(value) for value in case.values()).replace(" ", "")
    path = kept / f"{name}.json"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.simulated_device", str(path), json.dumps(case)]
        subprocess.run(command, check=True)
    return Recording.load(path)


def ends_of(recording: Recording) -> list[int]:
    """How many entries there are at the end of each step."""
    return [at for at, e in enumerate(recording.entries, 1) if e.kind == MARK and e.name == "end"]


def throughput(recording: Recording, timeline: SimulatedTimeline) -> float:
    """Tokens per second and card."""
    return recording.facts["tokens"] / timeline.seconds


def rows(kept: Path, only: str) -> list[dict[str, Any]]:
    """Every published row beside the simulator's, the two constants as the card's file has them."""
    found = []
    for row in ROWS:
        if only and only not in row.name:
            continue
        machine = Machine.load(row.card)
        made = _recorded_row(kept, row)
        timeline = replay(made, machine)
        simulated = throughput(made, timeline)
        exposed = timeline.exposed() / timeline.seconds
        found.append(asdict(row) | {"name": row.name, "simulated": simulated, "error": simulated / row.tokens - 1,
                                    "exposed": exposed, "idle": timeline.idle / timeline.seconds})  # fmt: skip
        mark = " (fitted)" if FIT.get(row.card) == row.name else ""
        print(f"{row.card:15s} {row.name:18s} {row.tokens:8.0f} {simulated:8.0f} {found[-1]['error']:+7.1%}"
              f"  exposed {exposed:5.1%}  idle {found[-1]['idle']:5.1%}{mark}", flush=True)  # fmt: skip
    judged = [abs(each["error"]) for each in found if each["name"] != FIT.get(each["card"])]
    if judged:
        print(f"{len(judged)} rows that were not fitted: median error {statistics.median(judged):.1%}, "
              f"worst {max(judged):.1%}")  # fmt: skip
    return found


def fit(kept: Path) -> None:
    """Set the two constants of each card so that its one row is met. A row has one figure: both are taken as equal."""
    for card, name in FIT.items():
        row = next(row for row in ROWS if row.card == card and row.name == name)
        made, low, high = _recorded_row(kept, row), 0.05, 1.0
        for _ in range(20):
            middle = (low + high) / 2
            machine = replace(Machine.load(card), matrix_efficiency=middle, memory_efficiency=middle)
            low, high = (middle, high) if throughput(made, replay(made, machine)) < row.tokens else (low, middle)
        machine = replace(machine, matrix_efficiency=round(low, 3), memory_efficiency=round(low, 3))
        machine.save(Path("deepspeed/simulator/cards") / f"{card}.json")
        print(f"{card}: both constants {low:.3f}, fitted on {name} ({row.tokens:,.0f} tokens/s)")


def choices(kept: Path, card: str = "H100-80GB") -> None:
    """What the other rows' errors would be, whichever row had been fitted."""
    judged, held = [row for row in ROWS if row.card == card], 0
    tries = [0.4 + 0.02 * step for step in range(11)]
    told: dict[Row, list[float]] = {}
    for row in judged:
        made = _recorded_row(kept, row)
        machines = [replace(Machine.load(card), matrix_efficiency=e, memory_efficiency=e) for e in tries]
        told[row] = [throughput(made, replay(made, machine)) for machine in machines]
    for row in judged:
        nearest = min(range(len(tries)), key=lambda at: abs(told[row][at] - row.tokens))
        errors = [abs(told[other][nearest] / other.tokens - 1) for other in judged if other is not row]
        held += statistics.median(errors) <= 0.15 and max(errors) <= 0.30
        print(f"fitted on {row.name:14s} {tries[nearest]:.2f}: median {statistics.median(errors):.1%}, "
              f"worst {max(errors):.1%}", flush=True)  # fmt: skip
    print(f"{held} of {len(judged)} rows would do: median <= 15 %, worst <= 30 %")


# -- memory, the timeline as a picture -------------------------------------------------------------------------------


def memory(kept: Path, card: str) -> dict[str, Any]:
    """The allocator's rule over twenty steps of Llama-7B at stage 3 on eight cards."""
    case = {"model": "llama-7b", "maker": "package", "ranks": 8, "micro": 4, "recompute": True, "stage": 3}
    recording = recorded(kept, **case, steps=20)
    held = replay_memory(recording, Machine.load(card), ends_of(recording))
    for at, (allocated, reserved) in enumerate(held.by_step, 1):
        if at in (1, 2, 3, len(held.by_step)):
            print(f"step {at:2d}: most allocated {allocated / 2**30:.2f} GiB, most reserved {reserved / 2**30:.2f} GiB")
    grown = held.by_step[-1][1] - held.by_step[1][1]
    print(f"reserved / allocated {held.ratio:.3f}; reserved after the second step grows by {grown} bytes")
    return {"ratio": held.ratio, "grown": grown, "by_step": held.by_step}


_SMALL = {"maker": "package", "micro": 4, "length": 1024}
PREDICTED = [
    *[_SMALL | {"model": "gpt2", "ranks": 8, "recompute": False, "stage": stage} for stage in (0, 1, 2, 3)],
    *[_SMALL | {"model": "llama-220m", "ranks": 64, "recompute": True, "stage": stage} for stage in (2, 3)],
    _SMALL | {"model": "llama-220m", "ranks": 8, "recompute": False, "stage": 3},
    _SMALL | {"model": "gpt2", "ranks": 64, "recompute": True, "stage": 1},
    _SMALL | {"model": "llama-220m", "ranks": 8, "recompute": False, "stage": 2, "offload": "optimizer-cpu"},
    _SMALL | {"model": "llama-220m", "ranks": 8, "recompute": True, "stage": 3, "offload": "all-cpu"},
]


def predicted(kept: Path, case: dict[str, Any], card: str) -> dict[str, Any]:
    """What the planner predicts that a card holds, by category, beside what the allocator's rule makes of three steps
    on the emulated device."""
    recording = recorded(kept, **case, steps=3)
    held = replay_memory(recording, Machine.load(card), ends_of(recording))
    config = package_config(case["stage"], case["micro"], case.get("offload", ""))
    tokens = torch.zeros(case["micro"], case["length"], dtype=torch.long)
    program = Program(lambda: Decoder(SHAPES[case["model"]], case["recompute"]), config, tokens)
    count = simulate(program, 0, case["ranks"], device=True, per_host=min(PER_HOST, case["ranks"]))
    near = {name: nbytes - count.host.get(name, 0) for name, nbytes in count.at_peak.items()}
    return {"case": case, "name": recording.name + (", recompute" if case["recompute"] else ""), "predicted": near,
            "allocated": held.allocated, "reserved": held.reserved,
            "gap": sum(near.values()) / held.allocated - 1}  # fmt: skip


def predictions(kept: Path, only: str, card: str) -> list[dict[str, Any]]:
    """The table of `predicted`; the bar is 5 % of the most allocated."""
    found = []
    for case in PREDICTED:
        row = predicted(kept, case, card) if only in case["model"] else None
        if row is None:
            continue
        found.append(row)
        parts = ", ".join(f"{name} {nbytes / 2**20:,.0f}" for name, nbytes in row["predicted"].items() if nbytes)
        print(f"{row['name']:48s} predicted {sum(row['predicted'].values()) / 2**20:,.0f} MiB ({parts}), allocated "
              f"{row['allocated'] / 2**20:,.0f} ({row['gap']:+.2%}), reserved {row['reserved'] / 2**20:,.0f}"
              f"{'' if abs(row['gap']) <= PREDICTION else '  MISSED'}", flush=True)  # fmt: skip
    return found


def one_card(kept: Path, only: str) -> None:
    """Keep the recordings of the steps that `benchmarks.gpu` times on one card, and the tiny ones of its rehearsal."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for model, micro, length, recompute, side in sorted(one_card_sides()):
        if only not in model:
            continue
        maker, stage = ("package", int(side[5:])) if side.startswith("stage") else (side, 0)
        case = {
            "model": model,
            "micro": micro,
            "length": length,
            "recompute": recompute,
            "maker": maker,
            "stage": stage,
        }
        made = recorded(kept, **case, ranks=1, clip=1.0, sums="fp32")
        made.blocks.clear()
        name = f"one-card-{model}-{side}"
        made.save(KEPT / f"{name}.json.gz")
        (KEPT / f"{name}.case").write_text(json.dumps(case) + "\n")


def one_card_sides() -> set[tuple[str, int, int, bool, str]]:
    """Model, sequences, tokens of each, whether blocks are computed again, and side of every step."""
    found = set()
    for row in TRAINING:
        case: dict[str, Any] = {"recompute": False} | row.arguments
        for side in case["sides"] if "host" not in row.key else ():
            found.add((case["model"], case["micro"], case["length"], case["recompute"], side))
            found.add((*TINY, False, side))
    return found


def picture(kept: Path, only: str, card: str) -> None:
    """The timelines of a pair, ours above theirs, as one picture."""
    for ours, theirs in PAIRS:
        name = pair_name(ours)
        if only in name:
            made = [replay(recorded(kept, **side), Machine.load(card)) for side in (ours, theirs)]
            path = RESULTS / f"{name.replace(' ', '-')}-{card}.png"
            draw(made, path, f"{name}, {card}: simulated, not measured")
            print(path)


def _recorded_row(kept: Path, row: Row) -> Recording:
    shape = {"model": row.model, "maker": "fsdp2", "ranks": row.ranks, "micro": row.micro, "length": row.length}
    made = recorded(kept, **shape, recompute=row.recompute)
    return repeated(made, row.accumulation)


# -- this package beside FSDP2 and DDP -------------------------------------------------------------------------------

_SEVEN = {"model": "llama-7b", "micro": 4, "recompute": True}
_SEVENTY = {"model": "llama-70b", "micro": 4, "recompute": True}
_ONE = {"model": "llama-1.3b", "micro": 4, "ranks": 8, "repeat": 2}
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *[(_ONE | {"maker": "package", "stage": stage}, _ONE | {"maker": "ddp"}) for stage in (0, 1, 2)],
    *[
        (base | {"maker": "package", "stage": stage, "hybrid": hybrid},
         base | {"maker": "fsdp2", "hybrid": hybrid, "sums": "fp32"})
        for base, stage, hybrid in [
            (_SEVEN | {"ranks": 8, "repeat": 2}, 2, 0),
            (_SEVEN | {"ranks": 8}, 3, 0),
            (_SEVEN | {"ranks": 64, "repeat": 2}, 2, 0),
            (_SEVEN | {"ranks": 64}, 3, 0),
            (_SEVEN | {"ranks": 64}, 3, 8),
            (_SEVENTY | {"ranks": 64}, 3, 0),
            (_SEVENTY | {"ranks": 64}, 3, 32),
        ]
    ],
]  # fmt: skip


def pair_name(ours: dict[str, Any]) -> str:
    """For tables and files."""
    hybrid = f" hybrid {ours['hybrid']}" if ours.get("hybrid") else ""
    return f"{ours['model']} {ours['ranks']} stage {ours['stage']}{hybrid}"


_MOVED = ("matrix_efficiency", "memory_efficiency", "launch")


def steps(kept: Path, only: str, card: str) -> list[dict[str, Any]]:
    """Both sides of each pair on a card, as it is and with each constant moved by a quarter.

    What does not fit into the card's memory is left out, and said.
    """
    found, machine = [], Machine.load(card)
    for ours, theirs in PAIRS:
        name = pair_name(ours)
        if only and only not in name:
            continue
        for sums in ("fp32", "bf16") if "sums" in theirs else ("",):
            against = theirs | {"sums": sums} if sums else theirs
            sides = [recorded(kept, **side) for side in (ours, against)]
            too_large = [made.name for made in sides if replay_memory(made, machine, []).allocated > machine.memory]
            if too_large:
                print(f"{name:32s} does not fit: {', '.join(too_large)}", flush=True)
                continue
            row = _compared(name, machine, *sides)
            found.append(row | {"against": against["maker"] + (f", sums in {sums}" if sums else "")})
            _keep(RESULTS / f"steps-{card}.json", found)
            print(f"{name:32s} {found[-1]['against']:20s} {row['ours']['ms']:8.1f} ms / {row['theirs']['ms']:8.1f}"
                  f" = {row['ratio']:.3f} (worst {row['worst']:.3f}: {row['worst_at']})  exposed "
                  f"{row['ours']['exposed']:.1f} / {row['theirs']['exposed']:.1f} ms  host "
                  f"{row['ours']['host']:.0f} / {row['theirs']['host']:.0f} ms  idle {row['ours']['idle']:.1f} / "
                  f"{row['theirs']['idle']:.1f}  launches {row['ours']['launches']} / {row['theirs']['launches']}",
                  flush=True)  # fmt: skip
    return found


def others(kept: Path, only: str) -> None:
    """The pairs on the cards that no published row was fitted for; their rows are kept as the others' are."""
    for card in (card for card in cards() if card not in FIT):
        print(f"{card}: the H100's constants, for comparison only")
        steps(kept, only, card)


def _first_step(recording: Recording) -> Recording | None:
    """What comes before the first mark `end`, where more comes behind it."""
    ends = ends_of(recording)
    return replace(recording, entries=recording.entries[: ends[0]], blocks=[]) if len(ends) > 1 else None


def settled(made: Recording, machine: Machine, host: float | None = None) -> dict[str, Any]:
    """A step among its likes: of two that were recorded, what the second adds, since one may end in the next."""
    first, found = _first_step(made), []
    for recording in (made, first) if first is not None else (made,):
        timeline = replay(recording, machine, host)
        found.append({"ms": timeline.seconds * 1e3, "exposed": timeline.exposed() * 1e3, "idle": timeline.idle * 1e3,
                      "host": timeline.host * 1e3, "launches": recording.launches} | recording.sent())  # fmt: skip
    row = {key: value - (found[1][key] if first is not None else 0) for key, value in found[0].items()}
    row["exposed"] = max(0.0, round(row["exposed"], 9))  # what two sums of seconds differ by is no message
    return {key: row.pop(key) for key in ("ms", "exposed", "idle", "host", "launches")} | {"sent": row}


def _compared(name: str, machine: Machine, ours: Recording, theirs: Recording) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name}
    times = json.loads((RESULTS / "host.json").read_text()) if (RESULTS / "host.json").exists() else {}
    for made, kind in ((ours, "package-3"), (theirs, "fsdp2")):  # else the machine's
        made.host_time = times.get(kind, {}).get("per_launch", 0.0)
    for side, made in (("ours", ours), ("theirs", theirs)):
        row[side] = settled(made, machine)
    row["ratio"] = row["ours"]["ms"] / row["theirs"]["ms"]
    ratios = {"as fitted": row["ratio"]}
    for constant in _MOVED:
        for factor in (0.75, 1.25):
            sides = []
            for made in (ours, theirs):
                host = (made.host_time or machine.launch) * (factor if constant == "launch" else 1)
                sides.append(settled(made, machine.moved(**{constant: factor}), host)["ms"])
            ratios[f"{constant} x {factor}"] = sides[0] / sides[1]
    row["worst_at"] = max(ratios, key=lambda each: ratios[each])
    return row | {"moved": ratios, "worst": ratios[row["worst_at"]]}


# -- offload -----------------------------------------------------------------------------------------------------------

_OFFLOADED = {"maker": "package", "ranks": 8, "micro": 8, "accumulation": 4, "recompute": True}
OFFLOADS = [
    _OFFLOADED | {"model": "llama-13b", "stage": 2, "offload": "optimizer-cpu"},
    _OFFLOADED | {"model": "llama-70b", "stage": 3, "offload": "all-nvme"},
]


def offload(kept: Path, only: str, card: str) -> list[dict[str, Any]]:
    """Steps whose state rests on the host or a disk, beside what each part alone would take at least."""
    found, machine = [], Machine.load(card)
    for case in OFFLOADS:
        if only not in case["model"]:
            continue
        made = recorded(kept, **case)
        timeline = replay(made, machine)
        moved = {way: sum(e.nbytes for e in made.entries if e.kind == COPY and e.name == way) for way in _WAYS}
        floors = {
            "compute": timeline.compute,
            "link": max(moved.values()) / machine.link,
            "host Adam": sum(e.nbytes for e in made.entries if e.kind == HOST) / machine.host,
            "disk": sum(e.nbytes for e in made.entries if e.kind == DISK) / machine.disk,
        }
        limit = max(floors, key=lambda each: floors[each])
        exposed = timeline.exposed(COPY, beside=(KERNEL, HOST, DISK)) / timeline.seconds
        print(f"{made.name}: {timeline.seconds:.2f} s a step, {timeline.seconds / floors[limit]:.3f} x the largest "
              f"floor ({limit}); exposed transfer {exposed:.1%}; floors "
              + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in floors.items()), flush=True)  # fmt: skip
        found.append({"case": case, "seconds": timeline.seconds, "floors": floors, "limit": limit, "exposed": exposed})
    return found


_WAYS = ("to_host", "to_device")


def host_times() -> None:
    """See `simulated_host.py`."""
    subprocess.run([sys.executable, "-m", "benchmarks.simulated_host", str(RESULTS / "host.json")], check=True)


PARTS = ["rows", "fit", "choices", "host", "steps", "cards", "offload", "memory", "predicted", "picture", "one-card",
         "decode"]  # fmt: skip


def _keep(path: Path, found: Any) -> None:
    """Write what was found; rows of a table take the place of those of the same name."""
    if isinstance(found, list):
        known = json.loads(path.read_text()) if path.exists() else []
        fresh = {(row.get("name"), row.get("against"), str(row.get("case"))) for row in found}
        found = [r for r in known if (r.get("name"), r.get("against"), str(r.get("case"))) not in fresh] + found
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> int:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--kept", type=Path, default=Path("build/recordings"), help="where recordings are kept")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    parser.add_argument("--card", default="H100-80GB", help="of `deepspeed.simulator.machine.cards()`")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept, only, card = options.kept, options.only, options.card
    parts: dict[str, Callable[[], Any]] = {
        "rows": lambda: rows(kept, only),
        "fit": lambda: fit(kept),
        "choices": lambda: choices(kept),
        "host": lambda: host_times(),
        "steps": lambda: steps(kept, only, card),
        "cards": lambda: others(kept, only),
        "offload": lambda: offload(kept, only, card),
        "memory": lambda: memory(kept, card),
        "predicted": lambda: predictions(kept, only, card),
        "picture": lambda: picture(kept, only, card),
        "one-card": lambda: one_card(kept, only),
        "decode": lambda: decode_tables.main(kept),
    }
    found = parts[options.part]()
    if found:
        _keep(RESULTS / f"{options.part}-{card}.json", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
