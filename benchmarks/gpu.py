"""`make gpu`: what a real card can show, in under ten minutes, and how far the simulator is from it.

Losses of the parity table's cells beside the CPU's, the accelerator's contract, tests marked `gpu`, and timed steps
beside the simulated ones (recordings made without values, kept under `results/simulated`). Exits 2 where torch sees no
GPU; 1 where something is not as it should be. It has never been run on a card yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulate import KEPT, RESULTS
from deepspeed.accelerator import get_accelerator
from deepspeed.simulator.machine import Machine, cards
from deepspeed.simulator.replay import replay
from deepspeed.simulator.trace import Recording
from deepspeed.testing import accelerator_checks

NO_GPU = 2
LIMITS = {"parity": 200, "tests": 150, "steps": 150}  # seconds of each part: under ten minutes together
BARS = {"fp32": 1e-4, "bf16": 1e-2, "fp16": 1e-2}  # a card sums in other orders than a CPU
TIMED = 10


def main(arguments: list[str]) -> int:
    """All parts, or one in a process of its own."""
    if not torch.cuda.is_available():
        print("make gpu: torch sees no GPU here, so nothing was run and nothing was shown", file=sys.stderr)
        return NO_GPU
    if arguments:
        return {"losses": _losses, "steps": _steps}[arguments[0]](*arguments[1:])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    parts = [
        _contract(),
        _parity(),
        _run("tests", [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], {}, (0, 5)),
    ]
    parts.append(_run("steps", [sys.executable, "-m", "benchmarks.gpu", "steps"], {}))
    return 0 if all(parts) else 1


def _run(part: str, command: list[str], environment: dict[str, str], good: tuple[int, ...] = (0,)) -> bool:
    try:
        code = subprocess.run(command, timeout=LIMITS[part], env={**os.environ, **environment}, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{part}: not over after {LIMITS[part]} s")
        return False
    print(f"{part}: exit code {code}")
    return code in good


def _contract() -> bool:
    failed = []
    for check in accelerator_checks():
        try:
            check(get_accelerator())
        except Exception as error:  # noqa: BLE001  each check's failure is a line of the report
            failed.append(f"{check.__name__}: {error}")
    print("\n".join(["accelerator contract:", *(failed or ["kept"])]))
    return not failed


def _cells() -> list[Any]:
    from tests.emulated.cells import others, pairwise

    return [cell for cell in [*pairwise(), *others(60)] if cell.ranks == 1]


def _losses(path: str) -> int:
    """Losses of every cell of one rank, on the device that `DS_ACCELERATOR` names."""
    from tests.emulated.runs import train

    Path(path).write_text(json.dumps({str(cell): train(cell).losses for cell in _cells()}))
    return 0


def _parity() -> bool:
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for device in ("cpu", "cuda"):
            path = Path(folder, device)
            if not _run(
                "parity", [sys.executable, "-m", "benchmarks.gpu", "losses", str(path)], {"DS_ACCELERATOR": device}
            ):
                return False
            found[device] = json.loads(path.read_text())
    kept = True
    for cell in _cells():
        pairs = zip(found["cuda"][str(cell)], found["cpu"][str(cell)], strict=True)
        gap = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        kept = kept and gap <= BARS[cell.dtype]
        print(f"{cell!s:60s} {gap:.2e}{'' if gap <= BARS[cell.dtype] else '  MORE THAN ' + str(BARS[cell.dtype])}")
    return kept


def _card() -> Machine | None:
    """The file of this card; None where no card of ours has such a name."""
    name = torch.cuda.get_device_name().upper().replace(" ", "-")
    known = next((card for card in cards() if card.split("-")[0] in name or card[:8] in name), None)
    return None if known is None else replace(Machine.load(known), ranks=1)


def _steps() -> int:
    """Timed steps of one card beside the simulator's, with one more column: how far they are apart."""
    machine, rows = _card(), []
    for path in sorted(KEPT.glob("one-card-*.json.gz")):
        case = json.loads(path.with_suffix("").with_suffix(".case").read_text())
        seconds = _timed(case)
        simulated = None if machine is None else replay(Recording.load(path), machine).seconds
        apart = "" if simulated is None else f"{simulated * 1e3:9.1f} ms simulated ({simulated / seconds - 1:+.1%})"
        print(f"{path.name:40s} {seconds * 1e3:9.1f} ms measured {apart}", flush=True)
        rows.append({"case": case, "measured": seconds, "simulated": simulated})
    name = torch.cuda.get_device_name().replace(" ", "-")
    (RESULTS / f"measured-{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _timed(case: dict[str, Any]) -> float:
    """The median seconds of a step on this card."""
    import deepspeed
    from benchmarks.simulated_models import SHAPES, Decoder, package_config

    deepspeed.init_distributed()
    with torch.device("cuda"):
        model = Decoder(SHAPES[case["model"]], case["recompute"]).float()
    config = package_config(case["stage"], case["micro"])
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    tokens = torch.zeros(case["micro"], case["length"], dtype=torch.long, device="cuda")
    times = []
    for _ in range(3 + TIMED):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.backward(engine(tokens))
        engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    engine.destroy()
    return sorted(times[3:])[TIMED // 2]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
