"""The arithmetic of 1,024 ranks: bytes of state and one step, simulated on meta tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_a_simulated_rank_of_1024_holds_what_the_formula_says():
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "benchmarks/scale.py", "--stages", "1", "3"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("held") == 2
