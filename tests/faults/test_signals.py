"""A run that is asked to stop: all ranks save on one step, exit with 85, and go on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from deepspeed.native import library
from tests.harness.pool import PATIENCE, WORKER_IMPORTS
from tests.unit.comm.ranks import run_ranks

ROOT = Path(__file__).parents[2]

TRAIN = """
    import os, signal, sys, time, torch, deepspeed
    from torch import nn
    torch.manual_seed(0); torch.set_num_threads(1)
    BEFORE
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "checkpoint": CHECKPOINT}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.load_checkpoint("saved") if LOAD else None
    for step in range(engine.global_steps, LAST):
        torch.manual_seed(step)
        loss = engine(torch.randn(2, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        if step == 3:
            os.write(1, f"ready {os.getpid()}\\n".encode())
            if os.environ.get("SENDS") == os.environ["RANK"]:
                signal.raise_signal(signal.Signals[os.environ["SIGNAL"]])
        time.sleep(0.002 * (1 + int(os.environ["RANK"])))
    os.write(1, f"end {step} {loss.item():.9f}\\n".encode())
"""


WAITS = """
    from pathlib import Path

    class Mine(Exception):
        pass

    def handler(*_):
        raise Mine

    dist.init_distributed()
    raised, end = Path(os.environ["START_LINE"], "raised"), time.monotonic() + 10
    dist.all_reduce(torch.ones(8))  # the memory is there
    if dist.get_rank() == 1:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            dist.all_reduce(torch.ones(8))
        except Mine:
            raised.touch()
    while not raised.exists() and time.monotonic() < end:  # rank 0 does not come
        time.sleep(0.01)
    os._exit(0 if raised.exists() else 3)
"""


def program(last=100_000, load=True, before="pass", checkpoint="{}"):
    text = textwrap.dedent(TRAIN).replace("LAST", str(last)).replace("LOAD", str(load))
    return text.replace("BEFORE", before).replace("CHECKPOINT", checkpoint)


def start(folder, last=100_000, load=True, before="pass", checkpoint="{}", ranks=2):
    (folder / "train.py").write_text(program(last, load, before, checkpoint))
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--grace", "20", "train.py"],
        cwd=folder, env={**inherited, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ready(launcher, ranks=2):
    return sorted(int(launcher.stdout.readline().split()[1]) for _ in range(ranks))


def test_what_a_handler_raises_reaches_a_rank_that_waits_in_shared_memory():
    """It waits in native code, which calls back: nothing of a callback may be lost."""
    ends = run_ranks(WAITS, 2, limit=60 * PATIENCE, imported=WORKER_IMPORTS)
    assert [each.code for each in ends] == [0, 0] or library() is None, [each.err for each in ends]


def test_a_signal_to_one_rank_lets_all_save_on_one_step(tmp_path):
    """Without the launcher; how it hands signals and codes on is in test_launcher.py."""
    snippet = f"os.chdir({str(tmp_path)!r})\n{program()}"
    sent = {"SENDS": "1", "SIGNAL": "SIGUSR1"}
    first, second = run_ranks(snippet, 2, limit=120 * PATIENCE, imported=WORKER_IMPORTS, **sent)
    assert (first.code, second.code) == (85, 85), first.err + second.err
    assert "SIGUSR1: saved to saved; exit code 85" in first.err
    assert len([path for path in (tmp_path / "saved").iterdir() if path.is_dir()]) == 1


def test_without_a_folder_nothing_is_saved_and_the_signal_ends_it(tmp_path):
    snippet = f"os.chdir({str(tmp_path)!r})\n{program(load=False)}"
    sent = {"SENDS": "0", "SIGNAL": "SIGTERM", "DS_JOB_ID": "here"}
    (only,) = run_ranks(snippet, limit=120 * PATIENCE, imported=WORKER_IMPORTS, **sent)
    assert only.code == -signal.SIGTERM, only.err
    assert "SIGTERM, SIGUSR1, SIGHUP: nothing will be saved" in only.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "whom"),
    [("SIGTERM", "launcher"), ("SIGUSR1", "rank"), ("SIGHUP", "launcher"), ("SIGTERM", "every process")],
)
def test_all_ranks_save_on_one_step_and_go_on(tmp_path, name, whom):
    launcher = start(tmp_path)
    ranks = ready(launcher)
    targets = {"launcher": [launcher], "rank": [psutil.Process(ranks[1])]}
    targets["every process"] = [launcher, *psutil.Process(launcher.pid).children(recursive=True), launcher]
    for target in targets[whom]:
        target.send_signal(signal.Signals[name])
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 85, err
    assert f"{name}: saved to saved; exit code 85" in err
    [tag] = [path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()]
    reached = int(re.fullmatch(r"global_step(\d+)", tag)[1])
    again = start(tmp_path, last=reached + 5)
    out, err = again.communicate(timeout=240)
    assert again.returncode == 0, err
    whole = start(tmp_path, last=reached + 5, load=False)
    assert sorted(line for line in out.splitlines() if "end" in line) == sorted(
        line for line in whole.communicate(timeout=240)[0].splitlines() if "end" in line
    )


@pytest.mark.slow
def test_without_a_folder_nothing_is_saved_and_the_old_code_stays(tmp_path):
    launcher = start(tmp_path, load=False, ranks=1)
    ready(launcher, 1)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=240)
    assert launcher.returncode == 143
    assert "SIGTERM, SIGUSR1, SIGHUP: nothing will be saved" in err


@pytest.mark.slow
def test_a_handler_of_the_users_stays_in_charge(tmp_path):
    own = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))"
    launcher = start(tmp_path, before=own, checkpoint="{'signal_dir': 'other'}")
    ready(launcher)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=240)
    assert launcher.returncode == 9
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_key_names_the_folder(tmp_path):
    launcher = start(tmp_path, load=False, checkpoint="{'signal_dir': 'other'}")
    ready(launcher)
    launcher.send_signal(signal.SIGHUP)
    launcher.communicate(timeout=240)
    assert launcher.returncode == 85
    assert len([path for path in (tmp_path / "other").iterdir() if path.is_dir()]) == 1
