"""Trials: whatever one does, an answer comes back, and nothing of it is left behind."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from deepspeed.planner import cli
from deepspeed.planner.memory import MemoryCount
from deepspeed.planner.search import MOST, Judged, TrainingPlan, confirm, table
from deepspeed.planner.step_time import StepTime
from deepspeed.planner.trials import METRICS, Command, TrialLimits, TrialOutcome, run_trial, trial_config
from tests.harness.pool import PATIENCE
from tests.unit.planner.test_plans import MACHINE

# A rank without torch: it does what the JSON says, and rank 0 writes the figures.
RANK = """
import json, os, sys, time
config = json.load(open(sys.argv[sys.argv.index("--deepspeed_config") + 1]))
how, rank = config["how"], int(os.environ["RANK"])
path = config["autotuning"]["metric_path"]
open(os.path.join(os.path.dirname(path), f"pid{rank}"), "w").write(str(os.getpid()))
if rank == 1 and how == "hangs":
    time.sleep(1000)
if rank == 1 and how == "crashes":
    raise ValueError("planted")
if rank == 1 and how == "killed":
    os.kill(os.getpid(), 9)
if rank == 1 and how == "memory":
    kept = [b"x" * (8 << 20) for _ in range(100) if time.sleep(0.01) is None]
    time.sleep(1000)
if rank == 0 and how == "hangs":
    time.sleep(1000)
if rank == 0 and how in ("measures", "stays"):
    open(path + ".part", "w").write(json.dumps({"latency": 2500.0, "throughput": 400.0}))
    os.replace(path + ".part", path)
if how == "stays":
    time.sleep(1000)
"""


def tried(tmp_path: Path, how: str, seconds: float = 30.0) -> TrialOutcome:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = Command(["--num_gpus", "2", "--grace", "1"], [str(script), "--deepspeed_config", "{config}"])
    config = trial_config({"how": how}, tmp_path)
    found = run_trial(command, config, tmp_path, TrialLimits(seconds * PATIENCE, 200 << 20))
    assert not any(runs(int(path.read_text())) for path in tmp_path.glob("pid*"))
    return found


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_trial_measures_and_its_folder_says_what_was_run(tmp_path: Path) -> None:
    found = tried(tmp_path, "measures")
    assert (found.seconds, found.reason) == (0.0025, "")
    assert found.metrics["throughput"] == 400.0
    assert {"ds_config.json", "cmd.txt", "stdout.log", "stderr.log", "metrics.json"} <= set(os.listdir(tmp_path))
    assert "--num_gpus 2" in (tmp_path / "cmd.txt").read_text()


def test_figures_count_where_the_ranks_do_not_end(tmp_path: Path) -> None:
    found = tried(tmp_path, "stays")
    assert found.seconds == 0.0025
    assert found.took < 25 * PATIENCE


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("how", "reason", "out_of_memory"),
    [
        ("hangs", "no figures within", False),
        ("crashes", "exit code 1: ValueError: planted", False),
        ("killed", "exit code 137", False),
        ("memory", "out of memory: rank 1 held", True),
        ("ends", "ended by itself before the last measured update", False),
    ],
)
def test_what_goes_wrong_is_the_reason(tmp_path: Path, how: str, reason: str, out_of_memory: bool) -> None:
    found = tried(tmp_path, how, 3.0 if how == "hangs" else 30.0)
    assert found.seconds is None
    assert reason in found.reason
    if how != "killed":  # by whom it was killed nobody can say
        assert found.out_of_memory == out_of_memory


def plans(count: int) -> list[Judged]:
    memory = MemoryCount(1 << 20, {}, {}, 1 << 20, 0, 1, 1 << 20)
    return [
        Judged(TrainingPlan(2, "none", 1 << at, 1 << (count - at), False), memory, fits=True) for at in range(count)
    ]


def test_the_fastest_measured_plan_wins_and_at_most_five_are_tried() -> None:
    judged, seen = plans(8), list[TrainingPlan]()

    def run(plan: TrainingPlan) -> TrialOutcome:
        seen.append(plan)
        return TrialOutcome(1.0 / len(seen) if len(seen) < 4 else 1.0)

    found = confirm(judged, run, 100)
    assert len(seen) == MOST
    assert found.best is not None
    assert found.confirmed
    assert found.best.plan == judged[2].plan
    assert [each.plan for each in found.judged[-3:]] == [each.plan for each in judged[-3:]]
    head, best, *_, foot = table(found.judged).splitlines()
    assert "333.3 ms" in best
    assert head.split()[:4] == ["plan", "predicted", "measured", "samples/s"]  # which time is which is said
    assert foot.startswith("predicted: the time") and "samples/s are measured where" in foot
    assert "measured" not in table(judged) and table(judged).splitlines()[-1].endswith("limit; samples/s too")
    count = MemoryCount(1 << 20, {}, {}, 1 << 20, 0, 1, 1 << 20)
    assert count.table().startswith("predicted ") and replace(count, measured=True).table().startswith("measured ")


def test_failed_trials_leave_an_answer() -> None:
    judged = plans(8)
    crashed = confirm(judged, lambda _plan: TrialOutcome(None, "it hung"))
    assert crashed.best is not None
    assert not crashed.confirmed
    assert crashed.best.plan == judged[5].plan  # the best of those that were not tried
    assert [each.reason for each in crashed.judged].count("it hung") == MOST
    one = confirm(judged[:2], lambda _plan: TrialOutcome(None, "it hung"))
    assert one.best is not None
    assert one.best.reason == "it hung"
    # Larger micro-batches hold more: after one has run out of memory they are not tried, nor chosen.
    seen = list[TrainingPlan]()
    full = confirm(judged, lambda plan: seen.append(plan) or TrialOutcome(None, "out of memory", out_of_memory=True))
    assert len(seen) == 1
    assert full.best is None
    assert confirm([], lambda _plan: TrialOutcome(1.0)).best is None


def _toy(tmp_path: Path) -> tuple[str, list[str]]:
    """A model whose second rank does what `PLANT` says in some plans, and the command's arguments."""
    script = tmp_path / "toy.py"
    script.write_text(
        "import json, os, time\nimport torch\nfrom tests.unit.planner.test_plans import Net\n"
        "class Planted(Net):\n"
        "    def forward(self, x):\n"
        "        how = json.loads(os.environ.get('PLANT', '{}')).get(str(len(x)))\n"
        "        if os.environ.get('RANK') == '1':\n"
        "            if how == 'hang': time.sleep(1000)\n"
        "            if how == 'crash': raise ValueError('planted')\n"
        "            if how == 'memory': self.kept = [torch.ones(1 << 22) for _ in range(500)]; time.sleep(1000)\n"
        "        return super().forward(x)\n"
        "def factory():\n"
        f"    open(f'{tmp_path}/pid{{os.getpid()}}', 'w').close()\n"
        "    return Planted(), lambda rows: torch.zeros(rows, 128, 64)\n"
    )
    file = tmp_path / "machine.json"
    replace(MACHINE, disk=0.0).save(file)
    return str(script), ["--machine", str(file), "--output", str(tmp_path / "plan.json")]


@pytest.mark.slow
def test_the_command_confirms_and_survives_what_is_planted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, told = _toy(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("PLANT", json.dumps({"4": "memory", "2": "hang"}))
    told += ["--batch", "8", "--trials", "5", "--trial_folder", str(tmp_path / "trials")]
    told += ["--trial_seconds", str(25 * PATIENCE)]
    assert cli.main([f"{script}:factory", *told]) == 0
    said = capsys.readouterr().out
    assert "predicted best: " in said
    assert said.index("predicted best") < said.index("tried ")
    assert "out of memory: rank 1 held" in said or "no figures within" in said
    assert "best: z" in said
    best = json.loads((tmp_path / "plan.json").read_text())
    assert best["train_micro_batch_size_per_gpu"] * best["gradient_accumulation_steps"] == 4


@pytest.mark.slow
def test_trials_that_are_forked_end_as_launched_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_trials = importlib.import_module("benchmarks.warm_trials")
    script, _ = _toy(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("PLANT", json.dumps({"4": "memory", "2": "hang", "1": "crash"}))
    warm_trials.warm(["deepspeed.planner.training_script", "deepspeed.engine.initialize"])
    command = warm_trials.WarmCommand(2, (f"{script}:factory", "--deepspeed_config", "{config}"))
    found = {}
    for micro in (8, 4, 2, 1):
        folder = tmp_path / str(micro)
        config = trial_config({"train_micro_batch_size_per_gpu": micro}, folder)
        found[micro] = run_trial(command, config, folder, TrialLimits(15 * PATIENCE, 700 << 20))
    server = max(psutil.Process().children(), key=lambda child: "forkserver" in " ".join(child.cmdline()))
    assert not server.children(recursive=True)  # nothing of them runs any more
    ranks = [int(path.name[3:]) for path in tmp_path.glob("pid*")]  # these have sessions, and may lose their parents
    assert len(ranks) == 8
    assert not any(map(runs, ranks))
    warm_trials.cool()
    assert found[8].seconds is not None
    assert found[4].out_of_memory
    assert "rank 1 held" in found[4].reason
    assert "no figures within" in found[2].reason
    assert "exit code 1: ValueError: planted" in found[1].reason


def test_a_rank_whose_first_process_died_before_it_asked_to_die_with_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_trials = importlib.import_module("benchmarks.warm_trials")
    plain = warm_trials._prctl

    def late(option: int, value: object) -> None:
        time.sleep(0.3 if option == warm_trials._PR_SET_PDEATHSIG else 0.0)
        plain(option, value)

    monkeypatch.setattr(warm_trials, "_prctl", late)
    monkeypatch.setattr("deepspeed.planner.training_script.main", lambda _program: time.sleep(60))
    read, write = os.pipe()
    first = os.fork()
    if not first:
        os.write(write, str(warm_trials._rank(0, 1, 29999, [])).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(first, 0)
    rank = int(os.read(read, 20))
    os.close(read)
    os.close(write)
    end = time.monotonic() + 10 * PATIENCE
    while runs(rank) and time.monotonic() < end:
        time.sleep(0.05)
    left = runs(rank)
    if left:
        os.kill(rank, signal.SIGKILL)
    assert not left


def test_ending_ranks_passes_over_one_that_is_gone() -> None:
    warm_trials = importlib.import_module("benchmarks.warm_trials")
    gone, stays = (subprocess.Popen(["sleep", str(seconds)]) for seconds in (0, 60))
    gone.wait()
    warm_trials._end({gone.pid: 0, stays.pid: 1})
    assert stays.wait(10 * PATIENCE) == -signal.SIGKILL


def test_of_plans_that_may_fit_two_are_tried_and_those_that_did_are_chosen() -> None:
    times = [StepTime(float(at + 1), 0.0, 0.0, 0.0) for at in range(6)]
    judged = [replace(each, fits=at in (2, 5), perhaps=True, time=times[at]) for at, each in enumerate(plans(6))]
    judged.sort(key=lambda judged: judged.worth)
    assert [each.seconds for each in judged] == [3.0, 6.0, 1.0, 2.0, 4.0, 5.0]
    for fit in (True, False):
        seen = list[float]()

        def run(plan: TrainingPlan, fit: bool = fit, seen: list[float] = seen) -> TrialOutcome:
            seen.append(next(each.seconds for each in judged if each.plan == plan))
            full = seen[-1] == 2.0 or not fit and seen[-1] == 1.0
            return TrialOutcome(None, "out of memory", out_of_memory=True) if full else TrialOutcome(seen[-1])

        found = confirm(judged, run)
        assert seen == ([1.0, 2.0] if fit else [1.0])  # the others hold more than what ran out of memory
        assert (found.best is not None) == fit
        assert found.best is None or found.best.fits
    different = [replace(each, plan=replace(each.plan, stage=at % 4)) for at, each in enumerate(judged)]
    stages = [replace(each, plan=replace(each.plan, stage=3 * (each.seconds == 5.0))) for each in judged]
    seen = list[float]()
    confirm(stages, lambda plan: seen.append(next(e.seconds for e in stages if e.plan == plan)) or FULL)
    assert seen == [1.0, 5.0]  # those between hold more than the first, and are no trials
    seen = list[float]()
    confirm(
        different, lambda plan: seen.append(next(e.seconds for e in different if e.plan == plan)) or TrialOutcome(1.0)
    )
    assert seen == [1.0, 2.0, 3.0, 6.0]
    assert (
        confirm(judged, lambda _plan: TrialOutcome(None), 0).best == judged[0]
    )  # without a trial: one that surely fits


def test_what_ranks_held_is_from_before_their_end(tmp_path: Path) -> None:
    """What a rank shares with others counts more once they are gone; what it makes after its figures is no plan's."""
    line = "import json, os, sys, time; path = sys.argv[1]; held = bytearray(64 << 20); time.sleep(0.6); "
    line += "open(path, 'w').write(json.dumps({'latency': 1e6})); more = bytearray(512 << 20); time.sleep(0.6)"
    command = Ranked(line, str(tmp_path / METRICS))
    outcome = run_trial(command, {}, tmp_path, TrialLimits(30.0, 0, exact=True))
    assert outcome.seconds == 1.0
    assert 64 << 20 < outcome.held < 256 << 20
    limited = run_trial(command, {}, tmp_path, TrialLimits(30.0, 256 << 20))
    assert limited.seconds == 1.0


FULL = TrialOutcome(None, "out of memory", out_of_memory=True)


class Ranked:
    """Starts Python as a rank of its own."""

    def __init__(self, line: str, path: str) -> None:
        self._words = [sys.executable, "-c", line, path]

    def line(self, config: str) -> list[str]:
        return self._words

    def start(self, config: str, out: Any, err: Any) -> subprocess.Popen[bytes]:
        start = f"import os, subprocess, sys; sys.exit(subprocess.call({self._words!r}, start_new_session=True, "
        start += "env={**os.environ, 'RANK': '0'}))"
        return subprocess.Popen([sys.executable, "-c", start], stdout=out, stderr=err)


def measured(*pairs: tuple[int, float | None]) -> dict[str, TrialOutcome]:
    return {str(at): TrialOutcome(seconds, held=held) for at, (held, seconds) in enumerate(pairs)}


def test_the_limit_of_a_case_is_the_loosest_that_leaves_few_near_the_best() -> None:
    benchmark = importlib.import_module("benchmarks.planner")
    alike = [(10 * (at + 1), 1.0) for at in range(8)]
    assert benchmark.limit_of(measured(*alike)) == (35, True)  # three are left, halfway to the fourth
    apart = [(10 * (at + 1), 2.0**-at) for at in range(8)]
    assert benchmark.limit_of(measured(*apart)) == (65, True)  # a quarter does not fit
    assert benchmark.limit_of(measured(*apart[:6], (0, None), (0, None))) == (60, True)
    assert benchmark.limit_of(measured((10, 1.0), (10, 1.0), (10, 1.0), (10, 1.0)))[1] is False
