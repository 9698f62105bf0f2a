"""What `import deepspeed` costs and does, each time in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.architecture.sources import ROOT

MOST_SECONDS = 0.3
TRIES = 3

_MEASURE = """
import json, os, sys, time
import torch
before, tasks = set(sys.modules), len(os.listdir("/proc/self/task"))
start = time.perf_counter()
import deepspeed
seconds = time.perf_counter() - start
import psutil
print(json.dumps({
    "seconds": seconds,
    "triton": sorted(name for name in set(sys.modules) - before if name.split(".")[0] == "triton"),
    "threads": len(os.listdir("/proc/self/task")) - tasks,
    "processes": len(psutil.Process().children()),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_importing_the_package_is_cheap_and_quiet() -> None:
    seconds: list[float] = []
    while len(seconds) < TRIES and min(seconds, default=MOST_SECONDS) >= MOST_SECONDS:
        found = json.loads(_python(_MEASURE))  # fails if anything else was printed
        seconds.append(found.pop("seconds"))
        assert found == {"triton": [], "threads": 0, "processes": 0, "cuda": False}
    assert min(seconds) < MOST_SECONDS, seconds


def test_the_launcher_starts_without_torch() -> None:
    rooms = "deepspeed.launcher.runner, deepspeed.launcher.launch"
    assert _python(f"import sys, {rooms}; print('torch' in sys.modules)").strip() == "False"
