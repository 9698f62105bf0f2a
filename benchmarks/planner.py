"""The planner against the truth: all plans of a case are predicted, the choice is printed, then all are measured.

    python -m benchmarks.planner calibrate         # on an idle machine, as `run`
    python -m benchmarks.planner predict           # anywhere: from the machine's figures alone
    python -m benchmarks.planner run --budget 400  # what is missing of both, and the trials; goes on where it was
    python -m benchmarks.planner run --toy --cases wide --plans 4
    python -m benchmarks.planner show

A case is a model of `planner_models.py`, a global batch on two ranks, and a limit of memory that is set before any
trial: 45 to 70 % of its plans are predicted not to fit (what is under way counts at its most, so fewer do not), so that
at most three of the others are predicted near the best, where that can be. Whether one fits is what its trial under
that limit says. Each plan is one trial of `deepspeed.planner.trials`, its ranks forked from a process that has imported
everything (`warm_trials.py`). The planner's five confirming runs are looked up among them. Five plans drawn at random
stand beside it: the probability that one of them is within a tenth of the best.
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
from deepspeed.planner.plans import ALL, ON_DEVICE, OPTIMIZER, Judged, Plan, Task, legal_plans, search
from deepspeed.planner.source import model_named
from deepspeed.planner.trials import Limits, Outcome, run_trial, trial_config
from deepspeed.simulator.machine import Machine

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # the other benchmarks are run as files
from common import machine_name, print_table  # noqa: E402
from warm_trials import WarmCommand, environment, warm  # noqa: E402

ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
BF16 = {**ADAMW, "bf16": {"enabled": True}}
# name: the model, the global batch on two ranks, the JSON
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "wide": ("wide", 8, ADAMW),
    "deep": ("deep", 8, ADAMW),
    "vocabulary": ("vocabulary", 8, ADAMW),
    "llama": ("llama", 8, ADAMW),
    "bert": ("bert", 8, ADAMW),
    "t5": ("t5", 8, ADAMW),
    "experts": ("experts", 8, ADAMW),
    "heavy": ("heavy", 8, ADAMW),
    "light": ("light", 8, ADAMW),
    "convolutions": ("convolutions", 8, ADAMW),
    "recurrent": ("recurrent", 8, ADAMW),
    "wide, bf16": ("wide", 8, BF16),
}
RANKS, NEAR, MOST_NEAR = 2, 1.10, 3
TIMED = 3, 4  # updates: the third is like all that follow
DROPPED = (0.6, 0.55, 0.65, 0.5, 0.7, 0.45)  # of plans; the first that leaves few near the best, as predicted
FIXED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what a trial holds is then what it uses
IMPORTED = [
    "deepspeed.planner.training",
    "deepspeed.planner.cli",
    "deepspeed.engine.initialize",
]  # and of each model its module
IMPORTED += [
    f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "t5", "mixtral", "resnet")
]


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
    """Bytes of a rank besides what is predicted: the most that trials of a tiny model hold, by share."""
    path = kept / "interpreter.json"
    if not path.exists():
        most = 0
        for stage, tier in ((0, ON_DEVICE), (3, ON_DEVICE), (2, OPTIMIZER), (3, ALL)):
            with tempfile.TemporaryDirectory(prefix="planner-") as folder:
                told = trial_config(Plan(stage, tier, 1, 1, False).config(ADAMW, folder), Path(folder))
                outcome = run_trial(command_of("tiny"), told, Path(folder), Limits(120.0, 0, exact=True))
            if outcome.seconds is None:
                raise SystemExit(f"the trial of a tiny model failed: {outcome.reason}")
            most = max(most, outcome.held)
        path.write_text(json.dumps({"bytes": most}) + "\n")
    return int(json.loads(path.read_text())["bytes"])


def command_of(factory: str) -> WarmCommand:
    """A trial of a model."""
    return WarmCommand(RANKS, (f"{HERE / 'planner_models.py'}:{factory}", "--deepspeed_config", "{config}"))


def sample(plans: list[Plan], count: int, seed: str) -> set[Plan]:
    """So many of the legal plans, drawn before anything is known of them."""
    return set(random.Random(seed).sample(plans, min(count, len(plans))))


def plan_of(row: dict[str, Any]) -> Plan:
    """The plan of a row that was kept."""
    return Plan(**{**row["plan"], "shape": Shape(**row["plan"].get("shape", {}))})


def held(judged: Judged) -> int:
    """Bytes of a rank, as predicted."""
    return max(judged.memory.peak, judged.memory.birth) if judged.memory is not None else 0


def near(rows: list[dict[str, Any]]) -> int:
    """How many of the plans that fit are predicted within a tenth of the best."""
    fits = [row["seconds"] for row in rows if row["fits"]]
    return sum(seconds <= NEAR * min(fits) for seconds in fits)


def limited(rows: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """A limit of memory under which a choice is one, and the plans with whether they fit, the best first."""
    sizes, found = sorted(row["held"] for row in rows), list[tuple[int, list[dict[str, Any]]]]()
    memory, those = 0, rows
    for share in (*DROPPED, 0.0):
        memory = sizes[max(0, math.ceil(len(sizes) * (1 - share)) - 1)]
        those = [{**row, "fits": 0 < row["held"] <= memory} for row in rows]
        those.sort(key=lambda row: (not row["fits"], row["seconds"] or math.inf, row["plan"]["micro"]))
        if near(those) and (share or not found):  # plans that cannot be made hold nothing: a limit may leave none
            found.append((memory, those))
    return min(found, key=lambda each: max(MOST_NEAR, near(each[1])), default=(memory, those))


def predict(name: str, machine: Machine, count: int) -> dict[str, Any]:
    """What the planner says of a case, before any trial."""
    factory, batch, config = CASES[name]
    make, rows = model_named(f"{HERE / 'planner_models.py'}:{factory}", 0)
    plans = sample(legal_plans(batch, machine), count, name)
    begun = time.perf_counter()
    endless = replace(machine, memory=1 << 50)
    judged = search(Task(make, rows, batch, config), endless, 3600.0, allowed=lambda plan: plan in plans)
    rows_ = [
        {"plan": dataclasses.asdict(each.plan), "name": each.plan.name, "held": held(each), "reason": each.reason,
         "seconds": each.seconds if each.time is not None else None}
        for each in judged
    ]  # fmt: skip
    memory, rows_ = limited(rows_)
    return {"case": name, "memory": memory, "took": time.perf_counter() - begun, "plans": rows_, "trials": {}}


def measure(found: dict[str, Any], machine: Machine, path: Path, limits: Limits, until: float) -> None:
    """Try the plans that were not tried yet, until then; each outcome is kept at once."""
    factory, _, config = CASES[found["case"]]
    left = [row for row in found["plans"] if row["name"] not in found["trials"]]
    random.Random(found["case"]).shuffle(left)  # a machine that grows slower favours nobody
    for row in left:
        if time.monotonic() > until:
            return
        with tempfile.TemporaryDirectory(prefix="planner-") as folder:
            plan = plan_of(row)
            told = trial_config(plan.config(config, machine.folder), Path(folder), *TIMED)
            outcome = run_trial(command_of(factory), told, Path(folder), limits)
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
    close = [name for name, seconds in times.items() if seconds <= NEAR * best]
    answer = confirm(judged, lambda plan: trials[plan.name]).best
    count, drawn = len(trials), min(MOST, len(trials))
    first = judged[0].plan.name
    return {
        "case": found["case"], "plans": count, "dropped": sum(told.seconds is None for told in trials.values()),
        "near": len(close), "best": min(times, key=lambda name: times[name]), "first": first,
        "first_over_best": times[first] / best if first in times else math.inf,
        "chosen": answer.plan.name if answer else "–",
        "chosen_over_best": times.get(answer.plan.name, math.inf) / best if answer else math.inf,
        "random": 1 - math.comb(count - len(close), drawn) / math.comb(count, drawn),
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
    few = sum(row["near"] <= MOST_NEAR for row in rows)
    quarter = sum(row["dropped"] >= row["plans"] / 4 for row in rows)
    drawn = sum(row["random"] for row in rows) / count
    print(f"within 10 % of the best: {good} of {len(rows)} after at most five trials, {alone} without any; five at "
          f"random {drawn:.0%}; bar 80 %. At most three plans near the best in {few}, a quarter without fit in "
          f"{quarter}.")  # fmt: skip
    (kept / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")


def say(found: dict[str, Any]) -> None:
    """Say what is known before any trial."""
    fits = [row for row in found["plans"] if row["fits"]]
    print(f"{found['case']}: {len(found['plans'])} plans predicted in {found['took']:.0f} s, {len(fits)} fit in "
          f"{found['memory'] / 2**20:,.0f} MiB a rank, {near(found['plans'])} within a tenth of the best; "
          f"choice before any trial: {fits[0]['name'] if fits else 'none fits'}", flush=True)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """All cases, from where the last run ended."""
    kept, until = folder_of(options.toy), time.monotonic() + options.budget
    os.environ.update(environment(RANKS) | ({"PLANNER_TOY": "1"} if options.toy else {}))
    warm(IMPORTED)
    with tempfile.TemporaryDirectory(prefix="planner-disk-", dir=options.disk) as disk:
        machine = machine_of(kept, disk)
        if options.what == "calibrate":
            interpreter_of(kept)
            return
        for name in options.cases or CASES:
            path = kept / f"case-{name.replace(', ', '-')}.json"
            if not path.exists():
                write(path, predict(name, machine, options.plans))
            found = json.loads(path.read_text())
            say(found)
            if options.what == "run":
                limits = Limits(options.seconds, found["memory"] + interpreter_of(kept))
                measure(found, machine, path, limits, until)
            if time.monotonic() > until:
                break
    if options.what == "run":
        show(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calibrate", "predict", "run", "show"])
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=None)
    parser.add_argument("--plans", type=int, default=24, help="of a case")
    parser.add_argument("--seconds", type=float, default=120.0, help="longest time of a trial")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds, after which no trial begins")
    parser.add_argument("--disk", default="/var/tmp", help="folder on a disk that plans may use")
    parser.add_argument("--toy", action="store_true", help="small models: proves that it runs, says nothing else")
    options = parser.parse_args()
    if not FIXED.items() <= os.environ.items():  # the machine is measured as trials are run
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.planner", *sys.argv[1:]], os.environ | FIXED)
    if options.what == "show":
        show(folder_of(options.toy))
    else:
        run(options)


if __name__ == "__main__":
    main()
