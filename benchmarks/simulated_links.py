"""Encoded messages on cards that are not here: 8 hosts of 8 H100 with 25 Gbit between hosts, simulated.

`python -m benchmarks.simulated_links` records steps without values on an emulated device and replays them with the
card's published figures, as `benchmarks/simulate.py`; nothing here is measured. Recordings and results are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.simulate import RESULTS, recorded, settled
from benchmarks.simulated_models import PER_HOST
from deepspeed.simulator.machine import Machine
from deepspeed.simulator.trace import MESSAGE, Recording

RANKS, BITS = 64, 25e9  # cards, and bits per second of a host's link
BAR = 1 / 3  # exposed communication over that of plain messages


@dataclass(frozen=True)
class Side:
    """What travels.

    Args:
        name: for tables.
        gradients, weights, secondary: as in `simulated_device.Case`.
        barred: stages at which the bar holds.
    """

    name: str
    gradients: str = ""
    weights: str = ""
    secondary: int = 1
    barred: tuple[int, ...] = ()

    def case(self, model: str, stage: int, kernels: bool) -> dict[str, Any]:
        """What is recorded: two steps, of which the second is judged."""
        shape = {"model": model, "maker": "package", "ranks": RANKS, "micro": 4, "recompute": True, "repeat": 2}
        forms = {"gradients": self.gradients, "weights": self.weights, "secondary": self.secondary}
        return shape | {"stage": stage} | forms | ({} if kernels else {"kernels": False})


SIDES = [
    Side("plain"),
    Side("int8", "int8", "int8", barred=(2,)),
    Side("int4 + int8", "int4", "int8", barred=(2,)),
    Side("ZeRO++", "int4", "int8", PER_HOST, barred=(3,)),
]


def between_hosts(recording: Recording, machine: Machine) -> float:
    """Bytes that a rank receives from other hosts."""
    messages = (entry for entry in recording.entries if entry.kind == MESSAGE)
    return sum(machine.traffic(entry.name, entry.nbytes, entry.group)[1] for entry in messages)


def simulated(kept: Path, model: str, stages: list[int], kernels: bool) -> list[dict[str, Any]]:
    """Rows of the table, printed on the way; without `kernels`, messages are encoded by torch operators."""
    machine, rows = replace(Machine.load("H100-80GB"), between=BITS / 8 / PER_HOST), []
    for stage in stages:
        plain = 0.0
        for side in (side for side in SIDES if side.secondary == 1 or stage == 3):
            recording = recorded(kept, **side.case(model, stage, kernels or not side.gradients))
            row = settled(recording, machine)
            plain = plain or row["exposed"]
            ratio, nbytes = row["exposed"] / plain, between_hosts(recording, machine) / 2
            form = "" if kernels or not side.gradients else ", torch"
            row |= {"name": f"{model} stage {stage} {side.name}{form}", "between": nbytes, "ratio": ratio}
            missed = "  MISSED" if stage in side.barred and ratio > BAR else ""
            print(f"{row['name']:34s} step {row['ms']:8.1f} ms  exposed {row['exposed']:8.1f} = {ratio:.3f} of plain  "
                  f"launches {row['launches']:5.0f}  {nbytes / 1e6:7.0f} MB from other hosts{missed}",
                  flush=True)  # fmt: skip
            rows.append(row)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the steps' times, the exposed communication in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 0.4 * len(rows) + 1.2))
    names = [" ".join(row["name"].split()[1:]) for row in rows]
    exposed = [row["exposed"] / 1e3 for row in rows]
    rest = [row["ms"] / 1e3 - seconds for row, seconds in zip(rows, exposed, strict=True)]
    axes.barh(names, rest, color="#a3a9b0", label="the rest of the step")
    axes.barh(names, exposed, left=rest, color="#1f6fbf", label="exposed communication")
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds of a step, simulated: {rows[0]['name'].split()[0]}, 8 hosts of 8 H100, 25 Gbit between")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def main() -> int:
    """The table; exits 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-7b", help="of `benchmarks.simulated_models.SHAPES`")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--kept", type=Path, default=Path("build/recordings"), help="where recordings are kept")
    parser.add_argument("--torch", action="store_true", help="messages are encoded by torch operators")
    parser.add_argument("--picture", type=Path, help="file for bars of the times, such as simulated-links.svg")
    options = parser.parse_args()
    path, rows = RESULTS / "links.json", simulated(options.kept, options.model, options.stages, not options.torch)
    names = {row["name"] for row in rows}
    before = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([row for row in before if row["name"] not in names] + rows, indent=1) + "\n")
    if options.picture:
        draw(rows, options.picture)
    barred = {f"{options.model} stage {stage} {side.name}" for side in SIDES for stage in side.barred}
    return int(any(row["ratio"] > BAR for row in rows if row["name"].removesuffix(", torch") in barred))


if __name__ == "__main__":
    sys.exit(main())
