"""Cost of `import deepspeed` over `import torch`, and of `initialize` of a 20 M-parameter model: best of five."""

from __future__ import annotations

import os
import subprocess
import sys

from common import BENCHMARKS, REPOSITORY, free_port, print_table, write_json

TIMES = 5
IMPORT = """
import time, torch
started = time.perf_counter()
import deepspeed
print(time.perf_counter() - started)
"""
INITIALIZE = """
import time
from common import GPT, Shape
import deepspeed
model = GPT(Shape())
config = {"train_batch_size": 4, "zero_optimization": {"stage": STAGE}}
started = time.perf_counter()
deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print(time.perf_counter() - started)
"""


def best(program: str) -> float:
    """Seconds that the fastest of several fresh processes prints on its last line."""
    environment = os.environ | {"PYTHONPATH": f"{REPOSITORY}{os.pathsep}{BENCHMARKS}", "DS_ACCELERATOR": "cpu"}
    seconds = []
    for _ in range(TIMES):
        alone = environment | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        alone["MASTER_PORT"] = str(free_port())
        run = subprocess.run([sys.executable, "-c", program], env=alone, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr)
        seconds.append(float(run.stdout.split()[-1]))
    return min(seconds)


def main() -> None:
    """Measure, print, write."""
    programs = {"import over torch": (IMPORT, 0.3)}
    programs |= {f"initialize, stage {stage}": (INITIALIZE.replace("STAGE", str(stage)), 1.0) for stage in range(4)}
    records = [{"what": what, "seconds": best(program), "bar": bar} for what, (program, bar) in programs.items()]
    body = [
        [row["what"], f"{row['seconds']:.3f}", f"{row['bar']:.1f}", "ok" if row["seconds"] < row["bar"] else "MISSED"]
        for row in records
    ]
    print_table(["what", "seconds", "bar", ""], body)
    print(f"written: {write_json('start.json', records)}")


if __name__ == "__main__":
    main()
