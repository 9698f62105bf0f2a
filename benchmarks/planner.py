"""The planner against the truth: all plans of a case are predicted, the choice is printed, then all are measured.

    python -m benchmarks.planner calibrate         # on an idle machine, as `run`
    python -m benchmarks.planner predict           # anywhere: from the machine's figures alone
    python -m benchmarks.planner run --budget 400  # what is missing of both, and the trials; goes on where it was
    python -m benchmarks.planner run --toy --cases wide --plans 4
    python -m benchmarks.planner predict --anew    # of what is kept, after the planner was changed; its trials stay
    python -m benchmarks.planner show

A case is a model of `planner_models.py`, a global batch on two ranks, and a limit of memory. Time and memory of each
plan are predicted, kept and printed before any trial, and the choice by how much memory there may be. Then each plan is
one trial of `deepspeed.planner.trials` without a limit, its ranks forked from a process that has imported all it needs
(`warm_trials.py`), which says how long an update takes and what a rank holds. The limit is the loosest under which the
measured plans are a case (at most three near the best, a quarter or more does not fit); predictions play no part in
it. Under it the planner's list is made of what was predicted, and its five confirming runs are looked up among the
trials: one that held more ran out of memory. Five plans drawn at random stand beside it: the probability that one of
them is within a tenth of the best.

`--anew` predicts what is kept again, with its trials: then the predictions are not older than those, and `before` in
the file has what was predicted first. `--retime` does so from the runs without values that the last prediction has left
under `runs`, where only the machine's figures or the replay have changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pickle
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.planner.machine_benchmark import calibrate
from deepspeed.planner.mesh_options import MeshShape
from deepspeed.planner.search import (
    ALL,
    MOST,
    ON_DEVICE,
    OPTIMIZER,
    Judged,
    Task,
    TrainingPlan,
    confirm,
    judge,
    legal_plans,
    simulated,
    verdict,
)
from deepspeed.planner.step_time import StepTime
from deepspeed.planner.training_script import model_named
from deepspeed.planner.trials import TrialLimits, TrialOutcome, run_trial, trial_config
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
FIXED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what a trial holds is then what it uses
IMPORTED = [
    "deepspeed.planner.training_script",
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
                told = trial_config(TrainingPlan(stage, tier, 1, 1, False).config(ADAMW, folder), Path(folder))
                outcome = run_trial(command_of("tiny"), told, Path(folder), TrialLimits(120.0, 0, exact=True))
            if outcome.seconds is None:
                raise SystemExit(f"the trial of a tiny model failed: {outcome.reason}")
            most = max(most, outcome.held)
        path.write_text(json.dumps({"bytes": most}) + "\n")
    return int(json.loads(path.read_text())["bytes"])


def command_of(factory: str) -> WarmCommand:
    """A trial of a model."""
    return WarmCommand(RANKS, (f"{HERE / 'planner_models.py'}:{factory}", "--deepspeed_config", "{config}"))


def sample(plans: list[TrainingPlan], count: int, seed: str) -> set[TrainingPlan]:
    """So many of the legal plans, drawn before anything is known of them."""
    return set(random.Random(seed).sample(plans, min(count, len(plans))))


def plan_of(row: dict[str, Any]) -> TrainingPlan:
    """The plan of a row that was kept."""
    return TrainingPlan(**{**row["plan"], "shape": MeshShape(**row["plan"].get("shape", {}))})


def predicted(judged: Judged) -> dict[str, Any]:
    """What is kept of a prediction."""
    memory = judged.memory
    return {
        "plan": dataclasses.asdict(judged.plan), "name": judged.plan.name, "reason": judged.reason,
        "held": 0 if memory is None else max(memory.most, memory.birth), "least": judged.least,
        "seconds": judged.seconds if judged.time is not None else None,
    }  # fmt: skip


def predict(name: str, machine: Machine, took: float, runs: dict[TrainingPlan, Any]) -> dict[str, Any]:
    """What the planner says of a case, before any trial: of each plan its time, and the least and the most memory."""
    begun = time.perf_counter()
    judged = [run if isinstance(run, Judged) else verdict(plan, run, machine) for plan, run in runs.items()]
    took += time.perf_counter() - begun
    return {"case": name, "took": took, "plans": [predicted(each) for each in judged], "trials": {}}


def run_without_values(name: str, machine: Machine, count: int, path: Path) -> None:
    """Write to a file the seconds that this takes, and by plan of a case its run without values, or the verdict where
    there could be none."""
    factory, batch, config = CASES[name]
    make, rows = model_named(f"{HERE / 'planner_models.py'}:{factory}", 0)
    begun, task = time.perf_counter(), Task(make, rows, batch, config)
    found: dict[TrainingPlan, Any] = {}
    for plan in sorted(sample(legal_plans(batch, machine), count, name), key=lambda plan: plan.name):
        try:
            found[plan] = simulated(task, plan, replace(machine, memory=1))
        except Exception:
            found[plan] = judge(task, plan, machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((time.perf_counter() - begun, found)))


def judged_under(found: dict[str, Any], memory: float) -> list[Judged]:
    """The planner's list where a rank may take so many bytes besides the interpreter's, the best first."""
    listed = [
        Judged(plan_of(row), None, StepTime(row["seconds"], 0.0, 0.0, 0.0) if row["seconds"] else None,
               0 < row["held"] <= memory, 0 < row["least"] <= memory, row["reason"])
        for row in found["plans"]
    ]  # fmt: skip
    return sorted(listed, key=lambda judged: judged.worth)


def limit_of(trials: dict[str, TrialOutcome]) -> tuple[float, bool]:
    """The loosest limit of a rank's memory under which the measured plans are a case, and whether there is one: a
    quarter of the plans or more does not fit, and at most three that do are near the best of them. What the planner has
    said is not looked at."""
    sizes = sorted({told.held for told in trials.values() if told.seconds is not None}, reverse=True)
    count = len(trials)
    for at, size in enumerate(sizes):
        above = sizes[at - 1] if at else math.inf
        times = [told.seconds for told in trials.values() if told.seconds is not None and told.held <= size]
        close = sum(seconds <= NEAR * min(times) for seconds in times)
        if close <= MOST_NEAR and count - len(times) >= count / 4:
            return (size + above) / 2 if at else size, True
    return max(sizes, default=0), False


def measure(found: dict[str, Any], machine: Machine, path: Path, seconds: float, until: float) -> None:
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
            outcome = run_trial(command_of(factory), told, Path(folder), TrialLimits(seconds, 0, exact=True))
        found["trials"][row["name"]] = dataclasses.asdict(outcome)
        write(path, found)
        took = "–" if outcome.seconds is None else f"{1e3 * outcome.seconds:,.1f} ms"
        expected = "–" if row["seconds"] is None else f"{1e3 * row['seconds']:,.1f} ms"
        size = f"{row['least'] / 2**20:,.0f} to {row['held'] / 2**20:,.0f}"
        print(f"  {row['name']:36s} predicted {expected:>12s}  measured {took:>12s}  MiB predicted {size:>12s}  held "
              f"{outcome.held / 2**20:,.0f}  {outcome.reason[:60]}", flush=True)  # fmt: skip


def write(path: Path, found: dict[str, Any]) -> None:
    """A run that is cut off leaves whole files."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(path)


def score(found: dict[str, Any], interpreter: int) -> dict[str, Any]:
    """How near the planner's choices are to the best, and how near five drawn at random would be."""
    trials = {name: TrialOutcome(**told) for name, told in found["trials"].items()}
    limit, good = limit_of(trials)
    within = {
        name: told if told.held <= limit else TrialOutcome(None, "out of memory", held=told.held, out_of_memory=True)
        for name, told in trials.items()
    }
    judged = [each for each in judged_under(found, limit - interpreter) if each.plan.name in trials]
    times = {name: told.seconds for name, told in within.items() if told.seconds is not None}
    best = min(times.values())
    close = [name for name, seconds in times.items() if seconds <= NEAR * best]
    tried = list[str]()

    def run(plan: TrainingPlan) -> TrialOutcome:
        tried.append(plan.name)
        return within[plan.name]

    answer = confirm(judged, run).best
    count, drawn = len(trials), min(MOST, len(trials))
    first = next((each.plan.name for each in judged if each.fits), "–")
    return {
        "case": found["case"], "plans": count, "dropped": count - len(times), "limit": limit, "good": good,
        "near": len(close), "best": min(times, key=lambda name: times[name]), "first": first,
        "first_over_best": times.get(first, math.inf) / best,
        "chosen": answer.plan.name if answer else "–",
        "chosen_over_best": times.get(answer.plan.name, math.inf) / best if answer else math.inf,
        "random": 1 - math.comb(count - len(close), drawn) / math.comb(count, drawn),
        "failed": sum(name not in times for name in tried),
        "wrong": sum(each.fits and each.plan.name not in times for each in judged),
        "agreed": sum(each.fits or not each.perhaps for each in judged if (each.plan.name in times) == each.fits),
        "open": sum(each.perhaps and not each.fits for each in judged),
    }  # fmt: skip


def show(kept: Path) -> None:
    """The table of all cases that were measured."""
    rows = []
    for path in sorted(kept.glob("case-*.json")):
        found = json.loads(path.read_text())
        whole = len(found["trials"]) == len(found["plans"])
        if any(told["seconds"] is not None for told in found["trials"].values()):
            rows.append({**score(found, interpreter_of(kept)), "whole": whole})
    head = ["case", "plans", "no fit", "near", "best", "first choice", "× best", "after 5 trials", "× best", "failed",
            "5 random", "fit known", "open"]  # fmt: skip
    print_table(head, [
        [row["case"] + ("" if row["whole"] else " (not whole)") + ("" if row["good"] else " (no such limit)"),
         str(row["plans"]), str(row["dropped"]), str(row["near"]), row["best"], row["first"],
         f"{row['first_over_best']:.3f}", row["chosen"], f"{row['chosen_over_best']:.3f}", str(row["failed"]),
         f"{row['random']:.0%}", f"{row['agreed']}/{row['plans'] - row['open']}", str(row["open"])]
        for row in rows
    ])  # fmt: skip
    good, count = sum(row["chosen_over_best"] <= NEAR for row in rows), max(1, len(rows))
    alone = sum(row["first_over_best"] <= NEAR for row in rows)
    few = sum(row["near"] <= MOST_NEAR for row in rows)
    quarter = sum(row["dropped"] >= row["plans"] / 4 for row in rows)
    drawn = sum(row["random"] for row in rows) / count
    print(f"within 10 % of the best: {good} of {len(rows)} after at most five trials, {alone} without any; five at "
          f"random {drawn:.0%}; bar 80 %. At most three plans near the best in {few}, a quarter without fit in "
          f"{quarter}. Said to fit and did not: {sum(row['wrong'] for row in rows)}.")  # fmt: skip
    (kept / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")


def say(found: dict[str, Any]) -> None:
    """Say what is known before any trial: the choice by how much memory there may be."""
    rows = [row for row in found["plans"] if row["held"]]
    sizes = sorted(row["held"] for row in rows)
    print(f"{found['case']}: {len(found['plans'])} plans predicted in {found['took']:.0f} s; choice before any trial, "
          "by memory of a rank:", flush=True)  # fmt: skip
    said = ""
    for size in reversed(sizes):
        first = judged_under(found, size)[0]
        if first.fits and first.plan.name != said:
            said = first.plan.name
            print(f"  up to {size / 2**20:6,.0f} MiB: {said}, {1e3 * first.seconds:,.1f} ms", flush=True)


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
            found = json.loads(path.read_text()) if path.exists() else {}
            if not found or options.anew or options.retime:
                seen = HERE.parent / "runs" / f"{kept.name}-seen" / f"{path.stem}.pickle"
                if not (options.retime and seen.exists()):
                    run_without_values(name, machine, options.plans, seen)
                before = (found.get("before") or found["plans"]) if found.get("trials") else None  # from before them
                told = predict(name, machine, *pickle.loads(seen.read_bytes()))
                found = {**told, "trials": found.get("trials", {}), "before": before}
                write(path, found)
            say(found)
            if options.what == "run":
                measure(found, machine, path, options.seconds, until)
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
    parser.add_argument("--anew", action="store_true", help="predict again what is kept; its trials stay")
    parser.add_argument("--retime", action="store_true", help="the same from the kept runs without values: their times")
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
