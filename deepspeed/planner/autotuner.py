"""Autotuner of `deepspeed --autotuning tune|run`: predicts plans for a script, tries the best, writes the results."""

from __future__ import annotations

import argparse
import json
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed.config.load import block_of
from deepspeed.errors import ArgumentError, DeepSpeedError
from deepspeed.planner.cli import say_trial
from deepspeed.planner.machine_benchmark import INTERPRETER, calibrate
from deepspeed.planner.script_probe import INFO, JOB, PLANS, is_allowed
from deepspeed.planner.search import MOST, STAGES, Answer, Judged, TrainingPlan, confirm, legal_plans, table
from deepspeed.planner.train_program import OUTSIDE
from deepspeed.planner.training_script import Script
from deepspeed.planner.trials import METRICS, TrialLimits, TrialOutcome, run_trial, trial_config
from deepspeed.simulator.machine import Machine

_SEARCH_S = 300.0
_SCRIPT_S = 300.0  # time limit of the script up to its first forward
_VALUES = {"throughput": "throughput", "latency": "latency", "flops": "FLOPS_per_gpu"}
OPTIMAL, OPTIMAL_COMMAND = "ds_config_optimal.json", "cmd_optimal.txt"


class Autotuner:
    """Search for the fastest plan (ZeRO stage, offload, micro-batch, recomputation, mesh) of a training script.

    Args:
        args: the launcher's arguments: `user_script`, `user_args`; `launcher_options`, the launcher's options for the
            trials (None: `--num_gpus` with the number of ranks); `module`, whether `user_script` is a module's name.
        active_resources: device indices by host name.

    Raises:
        ArgumentError: the arguments name no JSON, `autotuning` is not enabled in it, or the global batch is unknown.
        DeepSpeedConfigError: the JSON does not exist or is invalid.
    """

    def __init__(self, args: argparse.Namespace, active_resources: dict[str, list[int]]) -> None:
        ranks = sum(len(slots) for slots in active_resources.values())
        options = getattr(args, "launcher_options", None)
        options = ["--num_gpus", str(ranks)] if options is None else options
        self._script = Script(options, args.user_script, list(args.user_args), ranks)
        self._is_module = bool(getattr(args, "module", False))
        self._nodes = len(active_resources)
        self._base, self._block = self._script.base()
        # Configuration of trials: without blocks that have effects outside, such as event files and pictures.
        self._inside = {key: value for key, value in self._base.items() if key not in OUTSIDE}
        mappings = (self._block.arg_mappings or {}).items()  # the script's flags, by key of the JSON
        self._flags = {key.strip(): str(flag).strip() for key, flag in mappings if flag}
        self._results, self._experiments = Path(self._block.results_dir), Path(self._block.exps_dir)
        self._batch, self._micro = self._script.train_batch(self._base, self._flags)
        self.answer: Answer | None = None

    # -- searching ------------------------------------------------------------------------------------------------

    def tune(self) -> Answer:
        """Predict plans, try the best, and write the result files; returns all plans and the best one.

        Raises:
            ArgumentError: the ranks cannot divide the global batch, or the configuration allows no plan.
        """
        self._results.mkdir(parents=True, exist_ok=True)
        self._experiments.mkdir(parents=True, exist_ok=True)
        self._machine = machine = self._measured()
        judged = self._judged(machine)
        if judged and (judged[0].fits or judged[0].perhaps):
            print(f"predicted best: {judged[0].plan.name}; trying at most {self._most()}", flush=True)
        limits = TrialLimits(memory=machine.memory + INTERPRETER)
        self.answer = confirm(judged, lambda plan: self._try(plan, judged, limits), self._most(), say_trial)
        (self._results / "plans.txt").write_text(table(self.answer.judged, 10_000, machine) + "\n")
        self._summarize(self.answer)
        return self.answer

    def _most(self) -> int:
        return min(MOST, self._block.tuner_num_trials)

    def _measured(self) -> Machine:
        path = self._results / "machine.json"
        if path.exists() and not self._block.overwrite:
            return Machine.load(path)
        zero = block_of(self._base, "zero_optimization")
        disks = [block_of(zero, name).get("nvme_path") for name in ("offload_optimizer", "offload_param")]
        machine = calibrate(self._script.ranks, next((str(folder) for folder in disks if folder), ""))
        for note in machine.notes:
            print(f"note: {note}")
        machine.save(path)
        return machine

    def _judged(self, machine: Machine) -> list[Judged]:
        """Predict plans by a simulated run; if it fails, list some to try. ArgumentError if the JSON allows no plan."""
        plans = [plan for plan in legal_plans(self._batch, machine) if self._wanted(plan)]
        if not plans:
            raise ArgumentError(
                f"no plan of a batch of {self._batch} on {machine.ranks} ranks has what the JSON allows: look at the "
                "limits of the micro-batch in `autotuning`, and at lists in place of numbers"
            )
        folder = self._results / "profile_model_info"
        folder.mkdir(exist_ok=True)
        why = self._probe(folder)
        if not why:
            return pickle.loads((folder / PLANS).read_bytes())
        print(f"nothing could be predicted ({why}); see {folder}/stderr.log. Plans are tried unseen.", flush=True)
        sizes = {plan.micro for plan in plans}
        near = min(sizes, key=lambda size: abs(size - (self._micro or max(sizes))))
        first = [plan for plan in plans if plan.micro == near and plan.tier == "none"]
        likely = sorted(first, key=lambda plan: (plan.recompute, plan.stage))  # plans with the least memory last
        return [Judged(plan, fits=True, reason="not predicted") for plan in likely]

    def _probe(self, folder: Path) -> str:
        """Predict plans in a process that runs the script up to its first forward; returns the error, "" for none."""
        share = self._batch // self._script.ranks
        micro = next(size for size in [*range(2, share + 1), 1] if share % size == 0)
        config = TrainingPlan(0, "none", micro, share // micro, False).config(self._inside, "")
        path = folder / "ds_config.json"
        path.write_text(json.dumps(config, indent=2) + "\n")
        job = {
            "script": self._script.name,
            "arguments": self._script.with_json(str(path.absolute()), config, self._flags),
            "module": self._is_module,
            "machine": str((self._results / "machine.json").absolute()),
            "micro": micro,
            "train_batch": self._batch,
            "seconds": _SEARCH_S,
            "limits": self._wishes(),
        }
        (folder / JOB).write_text(json.dumps(job, indent=2) + "\n")
        (folder / PLANS).unlink(missing_ok=True)
        command = [sys.executable, "-m", "deepspeed.planner.script_probe", str(folder.absolute())]
        with open(folder / "stdout.log", "wb") as out, open(folder / "stderr.log", "wb") as err:
            try:
                subprocess.run(command, stdout=out, stderr=err, timeout=_SCRIPT_S + _SEARCH_S, check=True)
            except subprocess.TimeoutExpired:
                return f"the script had not come to its first forward after {_SCRIPT_S:g} s"
            except subprocess.CalledProcessError as error:
                lines = (folder / "stderr.log").read_text(errors="replace").strip().splitlines()
                return lines[-1] if lines else str(error)
        return "" if (folder / INFO).exists() else "it says nothing"

    def _wishes(self) -> dict[str, Any]:
        stage = block_of(self._base, "zero_optimization").get("stage")
        micro = self._base.get("train_micro_batch_size_per_gpu")
        return {
            "stages": stage if isinstance(stage, list) else list(STAGES),
            "least": self._block.min_train_micro_batch_size_per_gpu,
            "most": self._block.max_train_micro_batch_size_per_gpu,
            "micros": micro if isinstance(micro, list) else None,
        }

    def _wanted(self, plan: TrainingPlan) -> bool:
        return is_allowed(plan, self._wishes())

    # -- trying ---------------------------------------------------------------------------------------------------

    def _try(self, plan: TrainingPlan, judged: list[Judged], limits: TrialLimits) -> TrialOutcome:
        folder = self._results / plan.name
        if not self._block.overwrite and (folder / METRICS).exists():
            metrics = json.loads((folder / METRICS).read_text())
            return TrialOutcome(metrics["latency"] / 1e6, "", metrics)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = trial_config(plan.config(self._inside, self._machine.folder), folder.absolute(),
                              self._block.start_profile_step, self._block.end_profile_step)  # fmt: skip
        ranks = self._script.ranks
        trial = {"name": plan.name, "ds_config": config, "num_gpus": ranks // self._nodes, "num_nodes": self._nodes}
        text = json.dumps(trial, indent=2) + "\n"
        (self._experiments / f"{plan.name}.json").write_text(text)
        (folder / "exp.json").write_text(text)
        outcome = run_trial(self._script.command(config, self._flags), config, folder, limits)
        if outcome.seconds is None:
            return outcome
        flops = next((each.flops for each in judged if each.plan == plan), 0.0)
        metrics = {**outcome.metrics, "FLOPS_per_gpu": flops / outcome.seconds}
        (folder / METRICS).write_text(json.dumps(metrics, indent=2) + "\n")
        return replace(outcome, metrics=metrics)

    # -- answering ------------------------------------------------------------------------------------------------

    def _summarize(self, answer: Answer) -> None:
        name = _VALUES[self._block.metric]
        tried = [each for each in answer.judged if each.trial is not None]
        lines = [f"{'tuning_space':16s} {'num_experiments':>15s} {'best_metric_val':>16s}  best_exp_name"]
        spaces = [(f"z{stage}", [each for each in tried if each.plan.stage == stage]) for stage in STAGES]
        for space, those in [*spaces, ("all", tried)]:
            best = next((each for each in those if each.trial is not None and each.trial.seconds is not None), None)
            if those:
                value = f"{best.trial.metrics[name]:,.2f}" if best is not None and best.trial is not None else "–"
                lines.append(f"{space:16s} {len(those):>15d} {value:>16s}  {best.plan.name if best else '–'}")
        lines.append(
            f"{len(answer.judged)} plans predicted, {len(tried)} tried; metric: {self._block.metric}, measured"
        )
        (self._results / "summary.txt").write_text("\n".join(lines) + "\n")

    def print_tuning_results(self) -> None:
        """Print the table of plans, the summary and the best plan; does nothing before `tune`."""
        if self.answer is None:
            return
        print(table(self.answer.judged, machine=self._machine))
        print((self._results / "summary.txt").read_text(), end="")
        best = self.answer.best
        if best is None:
            print(f"no plan fits this machine; reasons are above and in {self._results}")
        else:
            print(f"best: {best.plan.name}, {self.answer.best_time()} for an update; {self._results / OPTIMAL}")

    def write_optimal_config(self) -> None:
        """Write ds_config_optimal.json and cmd_optimal.txt to the results folder; does nothing if no plan fits."""
        if self.answer is None or self.answer.best is None:
            return
        config = self.answer.best.plan.config(self._base, self._machine.folder) | {"train_batch_size": self._batch}
        path = self._results / OPTIMAL
        path.write_text(json.dumps(config, indent=2) + "\n")
        words = self._script.with_json(str(path), config, self._flags)
        line = shlex.join(["deepspeed", *self._script.options, self._script.name, *words])
        (self._results / OPTIMAL_COMMAND).write_text(line + "\n")

    def run_after_tuning(self) -> int:
        """Run the script with the file of `write_optimal_config`; returns its exit code, or 1 if no plan fits."""
        if self.answer is None or self.answer.best is None:
            return 1
        path = self._results / OPTIMAL
        config = json.loads(path.read_text())
        return subprocess.call(self._script.command(config, self._flags).line(str(path.absolute())))


def main(args: Sequence[str] | None = None) -> int:
    """Run the entry point of `deepspeed --autotuning`.

    Args:
        args: the mode (`tune` or `run`), the device indices by host as JSON, the launcher's options as JSON, whether
            the script is a module (0, 1), the script and its arguments; None: the command line.

    Returns:
        0, or with `run` the exit code of the script; 1 if no plan fits, 2 after an error, which is printed.
    """
    mode, hosts, options, module, script, *rest = list(sys.argv[1:] if args is None else args)
    launched = argparse.Namespace(
        user_script=script, user_args=rest, launcher_options=json.loads(options), module=module == "1"
    )
    try:
        tuner = Autotuner(launched, json.loads(hosts))
        answer = tuner.tune()
    except DeepSpeedError as error:
        print(f"deepspeed --autotuning: {error}", file=sys.stderr)
        return 2
    tuner.write_optimal_config()
    tuner.print_tuning_results()
    if answer.best is None:
        return 1
    return tuner.run_after_tuning() if mode == "run" else 0


if __name__ == "__main__":
    sys.exit(main())
