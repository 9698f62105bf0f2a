"""Find the fastest plan for a model, machine and global batch; prints all plans with reasons (`ds_plan`)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.config.load import load_raw
from deepspeed.engine.wire_choice import LinkCosts
from deepspeed.errors import DeepSpeedError
from deepspeed.planner.machine_benchmark import INTERPRETER, calibrate
from deepspeed.planner.mesh_options import unjudged
from deepspeed.planner.search import MOST, Answer, Judged, Task, TrainingPlan, confirm, search, table
from deepspeed.planner.training_script import model_named
from deepspeed.planner.trials import Command, TrialLimits, TrialOutcome, run_trial, trial_config
from deepspeed.simulator.machine import Machine

_DEFAULT = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(prog="ds_plan", description=__doc__)
    add = command.add_argument
    add("model", help="file.py:factory, which returns (module, batch); a folder with config.json; or a class' name")
    add("--batch", type=int, required=True, help="samples of an update over all ranks")
    add("--machine", default="here", help="`here`, which is measured, or a file")
    add("--save_machine", default="", metavar="FILE", help="keep what was measured")
    add("--ranks", type=int, default=2, help="ranks of a machine that is measured")
    add(
        "--memory",
        type=float,
        default=0,
        metavar="GiB",
        help="for the tensors of one rank; 0: its share of what is free",
    )
    add("--nvme", default="", metavar="FOLDER", help="on a disk that may be used")
    add("--length", type=int, default=128, help="tokens of a sequence, for models of Transformers")
    add("--expert_load", type=float, default=1.0, help="with divided experts, the choices that the busiest rank's "
        "experts get over the mean")  # fmt: skip
    add("--config", default="", help="JSON whose other keys are kept; default: AdamW in bf16")
    add("--seconds", type=float, default=300.0, help="to search for")
    add("--trials", type=int, default=-1, help=f"short runs of the best plans, at most {MOST}; default: {MOST} on a "
        "machine that is measured, none with a file")  # fmt: skip
    add("--trial_seconds", type=float, default=120.0, help="longest time of one")
    add("--trial_folder", default="ds_plan_trials", help="takes their JSON, output and figures")
    add("--output", default="ds_plan.json", help="file for the best plan's JSON")
    return command


# Seconds to encode and decode one element in native code on one core; on devices, memory's speed hides it.
_CODING = 1.5e-9


def wire_advice(best: Judged, machine: Machine, elements: int) -> str:
    """Say which codec pays between the hosts of a machine; "" for one host, or a plan with other axes than data.

    Args:
        best: plan with a predicted time.
        machine: machine whose `between` is the speed of a rank's share of the network.
        elements: parameters of the model.
    """
    time, plan = best.time, best.plan
    if time is None or not machine.between or plan.shape.width > 1 or plan.shape.stages > 1:
        return ""
    rounds = plan.steps if plan.stage >= 2 else 1
    gathers = 2 * plan.steps if plan.stage == 3 else int(plan.stage > 0)
    coding = 0.0 if machine.link else _CODING
    costs = LinkCosts(machine.between, coding, elements * rounds * (2 if plan.stage == 0 else 1), elements * gathers)
    chosen, times = costs.choose(time.total - time.messages)
    shown = ", ".join(f"{codec} {seconds * 1e3:,.1f} ms" for codec, seconds in times.items())
    setting = (
        "no codec pays" if chosen == "none" else f'"wire": {{"gradients": "{chosen}", "weights": "{chosen}"}} pays'
    )
    return f"messages between hosts at {machine.between / 1e9:.2f} GB/s for a rank: {setting} (an update: {shown})"


def main(args: Sequence[str] | None = None) -> int:
    """Print the plans and write the best one's JSON, for the command line `args` (None: that of the process).

    Returns:
        0; 1 if no plan fits; 2 after an error, which is printed.
    """
    options = parser().parse_args(args)
    try:
        config = load_raw(options.config) if options.config else {**_DEFAULT, "bf16": {"enabled": True}}
        make, batch = model_named(options.model, options.length)
        if options.machine == "here":
            machine = calibrate(options.ranks, options.nvme, int(options.memory * 2**30))
            for note in machine.notes:
                print(f"note: {note}")
            if options.save_machine:
                machine.save(options.save_machine)
        else:
            machine = Machine.load(options.machine)
        judged = search(
            Task(make, batch, options.batch, config, expert_load=options.expert_load),
            machine,
            options.seconds,
            axes=True,
        )
    except DeepSpeedError as error:
        print(f"ds_plan: {error}", file=sys.stderr)
        return 2
    answer = _confirmed(options, judged, config, machine)
    print(table(answer.judged, machine=machine))
    for line in unjudged(machine):
        print(line)
    code = _print_answer(answer, {**config, "train_batch_size": options.batch}, machine, options.output)
    if answer.best is not None and machine.between:
        with torch.device("meta"):
            elements = sum(param.numel() for param in make().parameters())
        if advice := wire_advice(answer.best, machine, elements):
            print(advice)
    return code


def _confirmed(options: argparse.Namespace, judged: list[Judged], config: dict[str, Any], machine: Machine) -> Answer:
    """Run trials of the best plans if the options request them; returns the ranked plans."""
    most = options.trials if options.trials >= 0 else MOST if options.machine == "here" else 0
    if not most or not (judged[0].fits or judged[0].perhaps):
        return confirm(judged, lambda _plan: TrialOutcome(None), 0)
    print(f"predicted best: {judged[0].plan.name}; trying the best {min(most, MOST)}", flush=True)
    program = ["--module", "deepspeed.planner.training_script", options.model, "--length", str(options.length)]
    command = Command(["--num_gpus", str(machine.ranks), "--grace", "1"], [*program, "--deepspeed_config", "{config}"])
    limits = TrialLimits(options.trial_seconds, machine.memory + INTERPRETER)

    def run(plan: TrainingPlan) -> TrialOutcome:
        folder = Path(options.trial_folder, plan.name)
        return run_trial(command, trial_config(plan.config(config, machine.folder), folder.absolute()), folder, limits)

    return confirm(judged, run, most, say_trial)


def say_trial(tried: Judged) -> None:
    """Print a plan's predicted and measured time, or why its trial failed; does nothing without a trial."""
    outcome = tried.trial
    if outcome is not None:
        measured = f"measured {(outcome.seconds or 0) * 1e3:,.1f} ms" if outcome.seconds is not None else outcome.reason
        print(f"tried {tried.plan.name}: predicted {tried.seconds * 1e3:,.1f} ms, {measured}", flush=True)


def _print_answer(answer: Answer, config: dict[str, Any], machine: Machine, output: str) -> int:
    best = answer.best
    if best is None:
        known = [each for each in answer.judged if each.memory is not None]
        print(f"no plan {'is sure to fit' if any(each.perhaps for each in known) else 'fits'} this machine.")
        if known:
            least = min(known, key=lambda each: max(each.memory.peak, each.memory.birth) if each.memory else 0)
            print(f"nearest: {least.plan.name}: {least.reason}")
        return 1
    planned = best.plan.config(config, machine.folder) | {"train_batch_size": config["train_batch_size"]}
    Path(output).write_text(json.dumps(planned, indent=2) + "\n")
    print(f"\nbest: {best.plan.name}, {answer.best_time()} for an update; its JSON: {output}")
    if best.plan.shape.stages > 1:
        whole = next(
            (each.plan.name for each in answer.judged if each.fits and each.plan.shape.stages == 1), "none fits"
        )
        print(f"engine.train_batch() runs stages of a pipeline; for a loop of forward, backward and step: {whole}")
    if best.memory is not None:
        print(best.memory.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
