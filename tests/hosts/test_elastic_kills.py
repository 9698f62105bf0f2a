"""One elastic run through twenty random kills: every sample once per epoch, and the losses of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.harness.pool import PATIENCE
from tests.hosts.cluster import Cluster, cluster
from tests.hosts.runs import Runs, need_hosts

need_hosts()

SEED = int(os.environ.get("KILLS_SEED", "1"))
BATCH, EPOCH, STEPS = 12, 10, 120  # samples of a step, steps of an epoch, steps of the run
TRAIN = f"""
    import json, os, sys, time
    import torch, deepspeed
    from torch.nn import functional as F

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return {BATCH * EPOCH}
        def __getitem__(self, index):
            x = torch.sin(torch.arange(1, 9) * (index + 1.0))
            return x, x.sum().tanh(), index

    pause = float(sys.argv[-1])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Data(), config="ds.json"
    )
    engine.load_checkpoint("checkpoints")
    rank, attempt = os.environ["RANK"], os.environ["DS_ATTEMPT"]
    with open(f"seen/{{attempt}}.{{rank}}", "a", buffering=1) as seen:
        print("joined", file=seen)
        while engine.global_steps < {STEPS}:
            for x, y, index in loader:
                step = engine.global_steps
                loss = F.mse_loss(engine(x).flatten(), y)
                print(json.dumps([step, index.tolist(), loss.item()]), file=seen)
                engine.backward(loss)
                engine.step()
                if engine.global_steps > step:
                    time.sleep(0 if os.path.exists("hurry") else pause)
                    if pause and engine.global_steps % 2 == 0:
                        engine.save_checkpoint("checkpoints")
                if engine.global_steps >= {STEPS}:
                    break
"""
CONFIG = {
    "elasticity": {"enabled": True, "max_train_batch_size": BATCH, "micro_batch_sizes": [1, 2], "version": 0.1},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": None,
}


class Seen:
    """What the ranks of all attempts have written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attempts(self) -> dict[int, list[Path]]:
        found: dict[int, list[Path]] = {}
        for path in self.folder.iterdir():
            found.setdefault(int(path.name.split(".")[0]), []).append(path)
        return dict(sorted(found.items()))

    def newest(self) -> tuple[int, int]:
        """Number of the newest attempt that has trained, and its last step."""
        steps = {number: self._steps(paths) for number, paths in self.attempts().items()}
        trained = {number: max(found) for number, found in steps.items() if found}
        return (max(trained), trained[max(trained)]) if trained else (-1, -1)

    def steps(self, number: int) -> dict[int, list[tuple[list[int], float]]]:
        """What the ranks of an attempt have trained on, by step."""
        return self._steps(self.attempts().get(number, []))

    @staticmethod
    def _steps(paths: list[Path]) -> dict[int, list[tuple[list[int], float]]]:
        found: dict[int, list[tuple[list[int], float]]] = {}
        for path in paths:
            for line in path.read_text().splitlines():
                if line.startswith("[") and line.endswith("]"):
                    step, samples, loss = json.loads(line)
                    found.setdefault(step, []).append((samples, loss))
        return found

    def history(self) -> dict[int, tuple[list[int], float]]:
        """Samples and mean loss of every step, as of the last attempt that made it: later ones went on from there."""
        made: dict[int, tuple[list[int], float]] = {}
        for paths in self.attempts().values():
            for step, parts in self._steps(paths).items():
                samples = sorted(sample for part, _ in parts for sample in part)
                made[step] = samples, sum(loss * len(part) for part, loss in parts) / len(samples)
        return made


def prepare(runs: Runs) -> Seen:
    (runs.folder / "ds.json").write_text(json.dumps(CONFIG))
    (runs.folder / "seen").mkdir()
    return Seen(runs.folder / "seen")


def words_of(process: psutil.Process) -> list[str]:
    """The command line; none of a process that has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def ranks(hosts: Cluster, name: str) -> list[psutil.Process]:
    found = []
    for process in hosts.processes(name):
        words = words_of(process)
        if "train.py" in words and "-u" in words and "deepspeed.launcher.runner" not in words:
            found.append(process)
    return found


def agents(hosts: Cluster, name: str) -> list[psutil.Process]:
    found = hosts.processes(name)
    return [p for p in found if any("deepspeed.launcher.agent" in word for word in words_of(p)[1:3])]


class Killer:
    """Kills ranks, agents and hosts of a running job, and starts lost hosts again."""

    def __init__(self, runs: Runs, err: Path, seen: Seen, started: subprocess.Popen[str]) -> None:
        self.err, self.seen, self.started = err, seen, started
        self.hosts = runs.cluster
        self.random = random.Random(SEED)
        self.down: dict[str, float] = {}
        self.done: Counter[str] = Counter()

    def until(self, true: Callable[[], bool], what: str, limit: float = 120 * PATIENCE) -> None:
        """Wait; hosts whose time has come are started meanwhile."""
        end = time.monotonic() + limit
        while not true():
            assert time.monotonic() < end, f"{what} did not come: {self.err.read_text()[-3000:]}"
            for name, since in list(self.down.items()):
                if time.monotonic() > since:
                    self.hosts.boot(name)
                    del self.down[name]
            time.sleep(0.05)

    def runs_until(self, true: Callable[[], bool], what: str) -> None:
        """The same, of a job that must not end before."""

        def there() -> bool:
            assert self.started.poll() is None, f"it ended: {self.err.read_text()[-3000:]}"
            return true()

        self.until(there, what)

    def begun(self) -> int:
        """How many attempts have begun after the first."""
        return len(re.findall(r"attempt \d+ follows", self.err.read_text()))

    def trains_on(self, past: int) -> None:
        """Wait until an attempt after number `past` has made two steps."""

        def moved() -> bool:
            number, _ = self.seen.newest()
            return number > past and len(self.seen.steps(number)) >= 2

        self.runs_until(moved, f"an attempt after {past}")

    def kill(self, kind: str) -> None:
        """Kill a host, an agent, or a rank of the attempt; the first host keeps the job, and lives."""
        places = self.hosts.names[kind in ("host", "agent") :]
        there: dict[str, list[psutil.Process]] = {}

        def found() -> bool:
            there.clear()
            for name in places:
                if name not in self.down and (own := ranks(self.hosts, name)):
                    there[name] = agents(self.hosts, name) if kind == "agent" else own
            return any(there.values())

        while True:
            self.runs_until(found, kind)
            name = self.random.choice([name for name, processes in there.items() if processes])
            if kind == "host":
                self.hosts.kill(name)
                self.down[name] = time.monotonic() + self.random.uniform(1, 12)
                return
            with contextlib.suppress(psutil.NoSuchProcess):
                self.random.choice(there[name]).kill()
                return


KINDS = ["host"] * 6 + ["import"] * 5 + ["rank"] * 7 + ["agent"] * 2


def kill_all(killer: Killer) -> None:
    """Twenty kills in a random order; each waits until the run has trained on, or only begun to start again."""
    killer.random.shuffle(kinds := list(KINDS))
    newest = before = -1
    for kind in kinds:
        if kind == "import":
            killer.runs_until(lambda before=before: killer.begun() > before, "the next attempt")
            killer.runs_until(
                lambda: any(ranks(killer.hosts, n) for n in killer.hosts.names if n not in killer.down), "a rank"
            )
            time.sleep(killer.random.uniform(0.05, 2.0))
        else:
            killer.trains_on(newest)
            time.sleep(killer.random.uniform(0.0, 1.0))
        trained, before = killer.seen.newest()[0], killer.begun()
        killer.kill(kind)
        early = kind == "import" and killer.seen.newest()[0] == newest  # nobody of this attempt had trained
        killer.done["rank" if kind == "import" and not early else kind] += 1
        newest = max(newest, trained, killer.seen.newest()[0])


@pytest.mark.slow
def test_twenty_random_kills(tmp_path: Path) -> None:
    with cluster(3) as hosts:
        (tmp_path / "calm").mkdir()
        calm = Runs(hosts, tmp_path / "calm")
        calm.hostfile({"h0": 1})
        reference = prepare(calm)
        args = ["--deepspeed_config", "ds.json"]
        done = calm.to_end(TRAIN, "--elastic_training", args=[*args, "0"], limit=100 * PATIENCE)
        assert done.code == 0, done.err
        calm.close()

        (tmp_path / "wild").mkdir()
        wild = Runs(hosts, tmp_path / "wild")
        wild.hostfile(dict.fromkeys(hosts.names, 1))  # on two cores most of the time goes into imports
        seen = prepare(wild)
        err = tmp_path / "wild" / "err"
        with err.open("w") as errors, (tmp_path / "wild" / "out").open("w") as out:
            flags = ["--elastic_training", "--heartbeat", "3"]
            started = wild.start(TRAIN, *flags, args=[*args, "0.5"], stdout=out, stderr=errors)
            killer = Killer(wild, err, seen, started)
            kill_all(killer)
            (tmp_path / "wild" / "hurry").touch()
            killer.until(lambda: started.poll() is not None, "the end", 100 * PATIENCE)
        assert started.returncode == 0, err.read_text()[-3000:]
        print(f"seed {SEED}: {dict(killer.done)}, {killer.begun() + 1} attempts")
        judge(seen.history(), reference.history())
        assert wild.left() == []
        wild.close()
        assert sum(killer.done.values()) >= 20 and killer.done["host"] >= 5 and killer.done["import"] >= 3


def judge(history: dict[int, tuple[list[int], float]], reference: dict[int, tuple[list[int], float]]) -> None:
    assert sorted(history) == sorted(reference) == list(range(STEPS))
    for epoch in range(STEPS // EPOCH):
        steps = range(epoch * EPOCH, (epoch + 1) * EPOCH)
        assert sorted(s for step in steps for s in history[step][0]) == list(range(BATCH * EPOCH)), f"epoch {epoch}"
    for step in range(STEPS):
        assert history[step][0] == reference[step][0], f"the samples of step {step}"
    worst = max(abs(history[step][1] - reference[step][1]) for step in range(STEPS))
    print(f"losses differ by at most {worst:.2e}")
    assert worst <= 1e-4
