"""The planner against the truth: all plans of a case are predicted, the choice is printed, then all are measured.

    python -m benchmarks.planner run               # goes on where it was; results are kept
    python -m benchmarks.planner run --toy --cases wide --plans 4
    python -m benchmarks.planner show

A case is a model of `planner_models.py`, a global batch on two ranks, and a limit of memory that is set before any
trial so that nearly half of its plans are predicted not to fit (what is under way counts at its most, so fewer do not);
whether one does is what its trial under that limit says. Each plan is one trial of `deepspeed.planner.trials`. The
planner's five confirming runs are looked up among them. Five plans drawn at random stand beside it: the probability
that one of them is within a tenth of the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.planner.axes import Shape
from deepspeed.planner.calibrate import calibrate
from deepspeed.planner.confirm import MOST, confirm
from deepspeed.planner.plans import ON_DEVICE, Judged, Plan, Task, legal_plans, search
from deepspeed.planner.source import model_named
from deepspeed.planner.trials import Command, Limits, Outcome, run_trial, trial_config
from deepspeed.simulator.machine import Machine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the other benchmarks are run as files
from common import machine_name, print_table  # noqa: E402

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
BF16 = {**ADAMW, "bf16": {"enabled": True}}
# name: the model, the global batch on two ranks, the JSON
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "wide": ("wide", 8, ADAMW),
    "deep": ("deep", 12, ADAMW),
    "vocabulary": ("vocabulary", 8, ADAMW),
    "llama": ("llama", 8, ADAMW),
    "bert": ("bert", 12, ADAMW),
    "t5": ("t5", 16, ADAMW),
    "experts": ("experts", 12, ADAMW),
    "heavy": ("heavy", 16, ADAMW),
    "light": ("light", 16, ADAMW),
    "convolutions": ("convolutions", 24, ADAMW),
    "recurrent": ("recurrent", 24, ADAMW),
    "wide, bf16": ("wide", 8, BF16),
}
RANKS, NEAR, DROPPED = 2, 1.10, 0.45
FIXED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what a trial holds is then what it uses


def folder_of(toy: bool) -> Path:
    """Where results are kept: by machine, for as many days as the run takes."""
    found = HERE.parent / "runs" / "planner-toy" if toy else HERE / "results" / f"planner-{machine_name()}"
    found.mkdir(parents=True, exist_ok=True)
    return found


def machine_of(kept: Path, disk: str) -> Machine:
    """Measured once for all cases."""
    if not (kept / "machine.json").exists():
        replace(calibrate(RANKS, disk), folder="").save(kept / "machine.json")
    return replace(Machine.load(kept / "machine.json"), folder=disk)


def interpreter_of(kept: Path) -> int:
    """Bytes of a rank besides what is predicted: what a trial of a tiny model holds, by share, less its prediction."""
    path = kept / "interpreter.json"
    if not path.exists():
        toy = {"PLANNER_TOY": "1"}
        with tempfile.TemporaryDirectory(prefix="planner-") as folder:
            program = ["--module", "deepspeed.planner.training", f"{HERE / 'planner_models.py'}:deep"]
            command = Command(["--num_gpus", str(RANKS), "--grace", "1"], [*program, "--deepspeed_config", "{config}"])
            told = trial_config(Plan(0, ON_DEVICE, 1, 1, False).config(ADAMW, ""), Path(folder))
            before = {name: os.environ.get(name) for name in toy}
            os.environ.update(toy)
            outcome = run_trial(command, told, Path(folder), Limits(120.0, 0, exact=True))
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        if outcome.seconds is None:
            raise SystemExit(f"the trial of a tiny model failed: {outcome.reason}")
        path.write_text(json.dumps({"bytes": outcome.held}) + "\n")
    return int(json.loads(path.read_text())["bytes"])


def sample(plans: list[Plan], count: int, seed: str) -> set[Plan]:
    """So many of the legal plans, drawn before anything is known of them."""
    return set(random.Random(seed).sample(plans, min(count, len(plans))))


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan of a row that was kept."""
    return Plan(**{**row["plan"], "shape": Shape(**row["plan"].get("shape", {}))})


def held(judged: Judged) -> int:
    """Bytes of a rank, as predicted."""
    return max(judged.memory.peak, judged.memory.birth) if judged.memory is not None else 0


def limited(judged: list[Judged], memory: int) -> list[Judged]:
    """The same on a machine with that much memory, the best first."""
    found = [replace(each, fits=each.memory is not None and held(each) <= memory) for each in judged]
    return sorted(found, key=lambda each: (not each.fits, each.seconds, each.plan.micro))


def predict(name: str, machine: Machine, count: int) -> dict[str, Any]:
    """What the planner says of a case, before any trial."""
    factory, batch, config = CASES[name]
    make, rows = model_named(f"{HERE / 'planner_models.py'}:{factory}", 0)
    plans = sample(legal_plans(batch, machine), count, name)
    begun = time.perf_counter()
    endless = replace(machine, memory=1 << 50)
    judged = search(Task(make, rows, batch, config), endless, 3600.0, allowed=lambda plan: plan in plans)
    sizes = sorted(held(each) for each in judged)
    memory = sizes[max(0, math.ceil(len(sizes) * (1 - DROPPED)) - 1)]
    rows_ = [
        {"plan": dataclasses.asdict(each.plan), "name": each.plan.name, "fits": each.fits, "held": held(each),
         "seconds": each.seconds if each.time is not None else None, "reason": each.reason}
        for each in limited(judged, memory)
    ]  # fmt: skip
    return {"case": name, "memory": memory, "took": time.perf_counter() - begun, "plans": rows_, "trials": {}}


def measure(found: dict[str, Any], machine: Machine, path: Path, seconds: float, interpreter: int) -> None:
    """Try the plans that were not tried yet; each outcome is kept at once."""
    factory, _, config = CASES[found["case"]]
    program = ["--module", "deepspeed.planner.training", f"{HERE / 'planner_models.py'}:{factory}"]
    command = Command(["--num_gpus", str(RANKS), "--grace", "1"], [*program, "--deepspeed_config", "{config}"])
    limits = Limits(seconds, found["memory"] + interpreter)
    left = [row for row in found["plans"] if row["name"] not in found["trials"]]
    random.Random(found["case"]).shuffle(left)  # a machine that grows slower favours nobody
    for row in left:
        with tempfile.TemporaryDirectory(prefix="planner-") as folder:
            plan = plan_of(row)
            told = trial_config(plan.config(config, machine.folder), Path(folder))
            outcome = run_trial(command, told, Path(folder), limits)
        found["trials"][row["name"]] = dataclasses.asdict(outcome)
        write(path, found)
        took = "–" if outcome.seconds is None else f"{1e3 * outcome.seconds:,.1f} ms"
        expected = "–" if row["seconds"] is None else f"{1e3 * row['seconds']:,.1f} ms"
        print(f"  {row['name']:36s} predicted {expected:>12s}  measured {took:>12s}  {outcome.reason[:90]}", flush=True)


def write(path: Path, found: dict[str, Any]) -> None:
    """A run that is cut off leaves whole files."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def score(found: dict[str, Any]) -> dict[str, Any]:
    """How near the planner's choices are to the best, and how near five drawn at random would be."""
    trials = {name: Outcome(**told) for name, told in found["trials"].items()}
    judged = [
        Judged(plan_of(row), fits=row["fits"], reason=row["reason"])
        for row in found["plans"] if row["name"] in trials
    ]  # fmt: skip
    times = {name: told.seconds for name, told in trials.items() if told.seconds is not None}
    best = min(times.values())
    near = [name for name, seconds in times.items() if seconds <= NEAR * best]
    answer = confirm(judged, lambda plan: trials[plan.name]).best
    count, drawn = len(trials), min(MOST, len(trials))
    first = judged[0].plan.name
    return {
        "case": found["case"], "plans": count, "dropped": sum(told.seconds is None for told in trials.values()),
        "near": len(near), "best": min(times, key=lambda name: times[name]), "first": first,
        "first_over_best": times[first] / best if first in times else math.inf,
        "chosen": answer.plan.name if answer else "–",
        "chosen_over_best": times.get(answer.plan.name, math.inf) / best if answer else math.inf,
        "random": 1 - math.comb(count - len(near), drawn) / math.comb(count, drawn),
        "agreed": sum(row["fits"] == (row["name"] in times) for row in found["plans"] if row["name"] in trials),
    }  # fmt: skip


def show(kept: Path) -> None:
    """The table of all cases that were measured."""
    rows = []
    for path in sorted(kept.glob("case-*.json")):
        found = json.loads(path.read_text())
        whole = len(found["trials"]) == len(found["plans"])
        if any(told["seconds"] is not None for told in found["trials"].values()):
            rows.append({**score(found), "whole": whole})
    head = ["case", "plans", "no fit", "near", "best", "first choice", "× best", "after 5 trials", "× best", "5 random",
            "fit agreed"]  # fmt: skip
    print_table(head, [
        [row["case"] + ("" if row["whole"] else " (not whole)"), str(row["plans"]), str(row["dropped"]),
         str(row["near"]), row["best"], row["first"], f"{row['first_over_best']:.3f}", row["chosen"],
         f"{row['chosen_over_best']:.3f}", f"{row['random']:.0%}", f"{row['agreed']}/{row['plans']}"]
        for row in rows
    ])  # fmt: skip
    good, count = sum(row["chosen_over_best"] <= NEAR for row in rows), max(1, len(rows))
    alone = sum(row["first_over_best"] <= NEAR for row in rows)
    few = sum(row["near"] <= 3 for row in rows)
    quarter = sum(row["dropped"] >= row["plans"] / 4 for row in rows)
    drawn = sum(row["random"] for row in rows) / count
    print(f"within 10 % of the best: {good} of {len(rows)} after at most five trials, {alone} without any; five at "
          f"random {drawn:.0%}; bar 80 %. At most three plans near the best in {few}, a quarter without fit in "
          f"{quarter}.")  # fmt: skip
    (kept / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")


def run(options: argparse.Namespace) -> None:
    """All cases, from where the last run ended."""
    kept = folder_of(options.toy)
    os.environ.update(FIXED | ({"PLANNER_TOY": "1"} if options.toy else {}))
    with tempfile.TemporaryDirectory(prefix="planner-disk-", dir=options.disk) as disk:
        machine, interpreter = machine_of(kept, disk), interpreter_of(kept)
        for name in options.cases or CASES:
            path = kept / f"case-{name.replace(', ', '-')}.json"
            if not path.exists():
                write(path, predict(name, machine, options.plans))
            found = json.loads(path.read_text())
            choice = next((row for row in found["plans"] if row["fits"]), None)
            print(f"{name}: {len(found['plans'])} plans predicted in {found['took']:.0f} s, "
                  f"{found['memory'] / 2**20:,.0f} MiB a rank; choice before any trial: "
                  f"{choice['name'] if choice else 'none fits'}", flush=True)  # fmt: skip
            measure(found, machine, path, options.seconds, interpreter)
    show(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=None)
    parser.add_argument("--plans", type=int, default=24, help="of a case")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time of a trial")
    parser.add_argument("--disk", default="/var/tmp", help="folder on a disk that plans may use")
    parser.add_argument("--toy", action="store_true", help="small models: proves that it runs, says nothing else")
    options = parser.parse_args()
    if options.what == "show":
        show(folder_of(options.toy))
    else:
        run(options)


if __name__ == "__main__":
    main()
