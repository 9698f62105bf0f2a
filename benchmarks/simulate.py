"""Steps on cards that are not here: published rows checked, this package beside FSDP2 and DDP, offload, memory.

`python -m benchmarks.simulate rows|steps|offload|memory|picture`; recordings and results are kept, so a run that was
ended goes on where it was. Nothing here is run on a GPU: steps are recorded without values on an emulated device, and
replayed with a card's published figures (`deepspeed/simulator`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed.simulator.machine import Machine
from deepspeed.simulator.recording import Recording
from deepspeed.simulator.replay import Timeline, repeated, replay

RESULTS = Path(__file__).parent / "results" / "simulated"
FIT = {"H100-80GB": "7b 2048 8", "H100-80GB-500W": "llama3-8b 8192 8"}


@dataclass(frozen=True)
class Row:
    """A published throughput: eager FSDP, bf16. Tokens per second and GPU."""

    model: str
    length: int
    ranks: int
    micro: int
    accumulation: int
    recompute: bool
    tokens: float
    card: str = "H100-80GB"

    @property
    def name(self) -> str:
        return f"{self.model.removeprefix('mpt-')} {self.length} {self.ranks}"


def _rows() -> list[Row]:
    lines = """70b 2048 64 8 4 yes 1039
        70b 2048 32 2 16 yes 882
        30b 8192 8 1 21 yes 1384
        30b 4096 8 1 21 yes 1802
        30b 2048 32 14 3 yes 2308
        30b 2048 16 10 3 yes 2263
        30b 2048 8 3 21 yes 2002
        13b 16384 8 3 3 yes 2985
        13b 4096 8 10 3 yes 4717
        13b 2048 64 2 1 no 4800
        13b 2048 32 2 1 no 4811
        13b 2048 16 2 1 no 4767
        13b 2048 8 2 1 no 4792
        13b 1024 8 40 3 yes 5502
        7b 8192 8 8 2 yes 6935
        7b 4096 8 16 2 yes 8611
        7b 2048 8 6 1 no 10643
        7b 1024 8 64 2 yes 10203
        3b 8192 8 3 6 no 16578
        3b 4096 8 5 6 no 20964
        3b 2048 64 6 3 no 22525
        3b 2048 16 10 3 no 24142
        1b 2048 64 20 1 no 44402
        1b 2048 8 14 1 no 45455
        760m 2048 32 24 1 no 67971
        760m 2048 8 24 2 no 63147"""
    found = []
    for line in lines.splitlines():
        model, length, ranks, micro, accumulation, recompute, tokens = line.split()
        numbers = [int(each) for each in (length, ranks, micro, accumulation)]
        found.append(Row(f"mpt-{model}", *numbers, recompute == "yes", float(tokens)))
    for ranks, tokens in (
        (8, 5762.0),
        (128, 5605.0),
    ):  # torchtitan: 8192 tokens, one sequence, blocks recomputed in part
        found.append(Row("llama3-8b", 8192, ranks, 1, 1, True, tokens, "H100-80GB-500W"))
    return found


ROWS = _rows()


def recorded(kept: Path, **case: Any) -> Recording:
    """A recording, from its file or made in a process of its own."""
    name = "-".join(str(value) for value in case.values()).replace(" ", "")
    path = kept / f"{name}.json"
    if not path.exists():
        kept.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "benchmarks.simulated_device", str(path), json.dumps(case)]
        subprocess.run(command, check=True)
    return Recording.load(path)


def throughput(recording: Recording, timeline: Timeline) -> float:
    """Tokens per second and card."""
    return recording.facts["tokens"] / timeline.seconds


def rows(kept: Path, only: str) -> list[dict[str, Any]]:
    """Every published row beside the simulator's, the two constants as the card's file has them."""
    found = []
    for row in ROWS:
        if only and only not in row.name:
            continue
        machine = Machine.load(row.card)
        shape = {"model": row.model, "maker": "fsdp2", "ranks": row.ranks, "micro": row.micro, "length": row.length}
        made = repeated(recorded(kept, **shape, recompute=row.recompute), row.accumulation)
        timeline = replay(made, machine)
        simulated = throughput(made, timeline)
        exposed = timeline.exposed() / timeline.seconds
        found.append(asdict(row) | {"name": row.name, "simulated": simulated, "error": simulated / row.tokens - 1,
                                    "exposed": exposed, "idle": timeline.idle / timeline.seconds})  # fmt: skip
        mark = " (fitted)" if FIT.get(row.card) == row.name else ""
        print(f"{row.card:15s} {row.name:18s} {row.tokens:8.0f} {simulated:8.0f} {found[-1]['error']:+7.1%}"
              f"  exposed {exposed:5.1%}  idle {found[-1]['idle']:5.1%}{mark}", flush=True)  # fmt: skip
    judged = [abs(each["error"]) for each in found if each["name"] != FIT.get(each["card"])]
    if judged:
        print(f"{len(judged)} rows that were not fitted: median error {statistics.median(judged):.1%}, "
              f"worst {max(judged):.1%}")  # fmt: skip
    return found


def main() -> int:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["rows", "steps", "offload", "memory", "picture"])
    parser.add_argument("--kept", type=Path, default=Path("build/recordings"), help="where recordings are kept")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if options.part == "rows":
        found = rows(options.kept, options.only)
        if not options.only:
            (RESULTS / "rows.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
