"""What the launcher costs: time to the first line of the script, the agent's memory and share of a core, 64 agents on
one launcher, and the divergence check per step. The hosts are those of tests/hosts: root and `make hosts`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import REPOSITORY, free_port, print_table, write_json

sys.path.insert(0, str(REPOSITORY))
from tests.hosts.cluster import Cluster, cluster, missing

TIMES = 10
AGENTS = (16, 32, 64)
LAUNCH = [sys.executable, "-m", "deepspeed.launcher.runner", "-q"]
FIRST_LINE = "import os; os.write(1, b'first\\n')"
SLEEP = "import os, time; os.write(1, b'first\\n'); time.sleep(60)"
CHECK = """
    import json, os, statistics, sys, time
    import torch
    from common import GPT, Shape
    import deepspeed
    from deepspeed import comm
    from deepspeed.comm.watchdog.desync import trail
    stage, rounds = int(sys.argv[-2]), int(sys.argv[-1])
    shape = Shape(layers=8, width=128, vocabulary=512, sequence=64, batch=2)
    model = GPT(shape)
    config = {
        "train_micro_batch_size_per_gpu": shape.batch, "steps_per_print": None, "divergence_check_interval": 32,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": {"stage": stage},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    windows = torch.randint(0, shape.vocabulary, (shape.batch, shape.sequence + 1))
    def step():
        begun = time.perf_counter()
        engine.backward(engine(windows))
        engine.step()
        return time.perf_counter() - begun
    for _ in range(10):
        step()
    times = {0: [], 32: []}
    entered = sum(s.count for s in trail._streams.values()) / 10
    for turn in range(rounds):
        for interval in ((0, 32) if turn % 2 else (32, 0)):
            comm.barrier()
            trail.interval = interval
            times[interval] += [step() for _ in range(10)]
    if engine.global_rank == 0:
        ratios = [statistics.median(times[32][i:i + 10]) / statistics.median(times[0][i:i + 10])
                  for i in range(0, 10 * rounds, 10)]
        deciles = statistics.quantiles(ratios, n=20)
        print(json.dumps([statistics.median(ratios), deciles[0], deciles[-1], statistics.median(times[0]), entered]))
"""


class Hosts:
    """Commands on the hosts of a cluster, in a folder that all of them see."""

    def __init__(self, made: Cluster, folder: Path) -> None:
        self.made, self.folder = made, folder
        self.environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu"}

    def start(self, command: list[str], on: str = "h0") -> subprocess.Popen[str]:
        """The running command."""
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        return self.made.on(on, command, cwd=self.folder, env=self.environment, **streams)

    def first_line(self, *commands: list[str]) -> float:
        """Seconds until all of these commands, started together, have printed a first line; they then end."""
        begun = time.perf_counter()
        started = [self.start(command) for command in commands]
        for process in started:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("first"):
                raise RuntimeError(f"{process.args} printed no line")
        seconds = time.perf_counter() - begun
        for process in started:
            process.communicate()
        return seconds


def by_hand(rank: int, port: int) -> list[str]:
    """The command line of a rank of two that is started without a launcher."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-u", "first.py"]


def first_lines(hosts: Hosts) -> list[dict[str, Any]]:
    """Over ranks by hand on one host; over a bare ssh with three."""
    (hosts.folder / "first.py").write_text(FIRST_LINE)
    (hosts.folder / "hostfile").write_text("".join(f"{name} slots=2\n" for name in hosts.made.names))
    port = free_port()
    sides: dict[str, Callable[[], float]] = {
        "one host, by hand": lambda: hosts.first_line(by_hand(0, port), by_hand(1, port)),
        "one host, deepspeed": lambda: hosts.first_line([*LAUNCH, "-H", "hostfile", "-i", "h0", "first.py"]),
        "bare ssh": lambda: hosts.first_line(["ssh", "h1", f"cd {hosts.folder} && {sys.executable} -u first.py"]),
        "three hosts, deepspeed": lambda: hosts.first_line([*LAUNCH, "-H", "hostfile", "first.py"]),
    }
    best = {name: min(side() for _ in range(TIMES)) for name, side in sides.items()}
    one = best["one host, deepspeed"] - best["one host, by hand"]
    three = best["three hosts, deepspeed"] - best["bare ssh"]
    print("  ".join(f"{name} {seconds:.3f} s" for name, seconds in best.items()))
    return [row("one host over ranks by hand", one, 0.3, "s"), row("three hosts over a bare ssh", three, 1.0, "s")]


def agents(hosts: Hosts) -> list[dict[str, Any]]:
    """Memory and time of the agent of another host while its ranks work."""
    (hosts.folder / "sleep.py").write_text(SLEEP)
    started = hosts.start([*LAUNCH, "-H", "hostfile", "-i", "h0@h1", "sleep.py"])
    assert started.stdout is not None
    for _ in range(4):
        started.stdout.readline()
    found = [p for p in hosts.made.processes("h1") if any("deepspeed.launcher.agent" in w for w in p.cmdline()[1:3])]
    agent = max(found, key=lambda process: process.memory_info().rss)  # its guard is a fork
    time.sleep(2)
    before, begun = sum(agent.cpu_times()[:2]), time.monotonic()
    time.sleep(30)
    share = (sum(agent.cpu_times()[:2]) - before) / (time.monotonic() - begun)
    memory = agent.memory_full_info().uss / 1e6, agent.memory_info().rss / 1e6
    hosts.made.inner(started).terminate()
    started.communicate()
    print(f"agent: {memory[0]:.1f} MB of its own, {memory[1]:.1f} MB resident")
    return [row("memory of an agent", memory[1], 40, "MB"), row("share of a core", 100 * share, 0.2, "%")]


def many(hosts: Hosts) -> list[dict[str, Any]]:
    """Time and memory of a launcher by number of agents: all names are those of one host."""
    first = hosts.made.names[0]
    etc = Path("/etc/netns", hosts.made.space(first), "hosts")
    lines = "".join(f"{hosts.made.address('h1')} n{number}\n" for number in range(max(AGENTS)))
    names = hosts.made.sees(first, "/etc/hosts")
    names.write_text(etc.read_text() + lines)
    (hosts.folder / "first.py").write_text("import time; print('first', flush=True); time.sleep(3)")
    rows: list[tuple[int, float, float]] = []
    for count in AGENTS:
        (hosts.folder / "many").write_text("".join(f"n{number} slots=1\n" for number in range(count)))
        best, memory = float("inf"), 0.0
        for _ in range(3):
            begun = time.perf_counter()
            started = hosts.start([*LAUNCH, "-H", "many", "first.py"])
            assert started.stdout is not None
            for _ in range(count):
                started.stdout.readline()
            best = min(best, time.perf_counter() - begun)
            [middle] = hosts.made.inner(started).children()
            memory = middle.memory_full_info().uss / 1e6
            started.communicate()
        print(f"{count} agents: {best:.2f} s, launcher {memory:.1f} MB of its own")
        rows.append((count, best, memory))
    (few, time_few, _), (lots, time_lots, _) = rows[0], rows[-1]
    growth = [(b[2] - a[2]) / (b[0] - a[0]) for a, b in itertools.pairwise(rows)]
    return [
        row(f"time per agent, {lots} over {few}", (time_lots / lots) / (time_few / few), 1.2, "x"),
        row("memory per further agent", max(growth), 0.5, "MB"),
    ]


def check(stage: int, rounds: int) -> dict[str, Any]:
    """The divergence check at an interval of 32, on two ranks: the median over pairs of ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "check.py").write_text(textwrap.dedent(CHECK))
        path = f"{REPOSITORY}{os.pathsep}{Path(__file__).parent}"
        command = [*LAUNCH, "--num_gpus", "2", "check.py", str(stage), str(rounds)]
        environment = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    middle, low, high, seconds, entered = json.loads(done.stdout.splitlines()[-1])
    print(
        f"stage {stage}: {middle:.4f} [{low:.4f}, {high:.4f}] of {seconds * 1e3:.1f} ms, {entered:.0f} entries a step"
    )
    return row(f"check at 32, stage {stage}", 100 * (middle - 1), 3.0, "%")


def row(what: str, value: float, bar: float, unit: str) -> dict[str, Any]:
    """A line of the table."""
    return {"what": what, "value": value, "bar": bar, "unit": unit, "held": value <= bar}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="pairs of ten steps with and without the check")
    parser.add_argument("--only", choices=["hosts", "check"], help="a part of it")
    options = parser.parse_args()
    records: list[dict[str, Any]] = []
    if options.only != "check":
        if missing():
            raise SystemExit(missing())
        with cluster(3) as made, tempfile.TemporaryDirectory() as folder:
            hosts = Hosts(made, Path(folder))
            records += [*first_lines(hosts), *agents(hosts), *many(hosts)]
    if options.only != "hosts":
        records += [check(stage, options.rounds) for stage in (2, 3)]
    body = [
        [one["what"], f"{one['value']:.3f} {one['unit']}", f"{one['bar']:g}", "ok" if one["held"] else "MISSED"]
        for one in records
    ]
    print_table(["what", "value", "bar", ""], body)
    print(f"load while measuring: {statistics.fmean(os.getloadavg()):.1f}")
    print(f"written: {write_json('launch.json', records)}")


if __name__ == "__main__":
    main()
