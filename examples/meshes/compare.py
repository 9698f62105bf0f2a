"""Train one model on every mesh of 1, 2 and 4 ranks by JSON alone; print one table and draw one picture.

python examples/meshes/compare.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MESHES: list[tuple[int, dict[str, int]]] = [
    (1, {}), (2, {"dp": 2}), (2, {"tp": 2}), (4, {"dp": 4}), (4, {"tp": 2}), (4, {"tp": 4}),
]  # fmt: skip


def name_of(ranks: int, mesh: dict[str, int]) -> str:
    """A mesh in words: what is not named is data-parallel."""
    left = ranks
    for size in mesh.values():
        left //= size
    sizes = {"dp": left, **mesh}
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


def run(ranks: int, mesh: dict[str, int], more: list[str]) -> dict[str, Any]:
    """One row, or the last line of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        command = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(HERE / "train.py")]
        command += ["--mesh", json.dumps(mesh), "--result", str(result), *more]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if result.exists():
            return json.loads(result.read_text())
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "Error" in line] or ["failed without a word"]
    return {"note": lines[-1][:150]}


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
    """Losses over each other, and bars of speed, memory and messages."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, speed, memory, messages) = plt.subplots(1, 4, figsize=(16, 3.8), width_ratios=(1.4, 1, 1, 1))
    for width, (name, row) in zip(range(2 * len(rows), 0, -2), rows.items(), strict=False):
        losses.plot(row["losses"], label=name, linewidth=width, alpha=0.7)
    losses.set(xlabel="step", ylabel="nats per byte", title="one curve: the meshes agree")
    losses.legend(fontsize=7)
    names = list(rows)
    speed.barh(names, [row["tokens_per_s"] for row in rows.values()], color="tab:blue")
    speed.set(title="tokens per second")
    memory.barh(names, [row["bytes"] / 1e6 for row in rows.values()], color="tab:green")
    memory.set(title="MB of state on the fullest rank")
    received = {axis: [row["received"][axis] / 1e6 for row in rows.values()] for axis in ("dp", "tp")}
    messages.barh(names, received["dp"], color="tab:orange", label="dp")
    messages.barh(names, received["tp"], left=received["dp"], color="tab:purple", label="tp")
    messages.set(title="MB from other ranks in a step")
    messages.legend(fontsize=7)
    memory.set_yticks([])
    messages.set_yticks([])
    for axes in (speed, memory, messages):
        axes.invert_yaxis()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Run all; non-zero when one failed or trained otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="leave larger meshes out")
    parser.add_argument("--picture", type=Path, default=Path("runs/meshes.png"))
    arguments, more = parser.parse_known_args()
    rows: dict[str, dict[str, Any]] = {}
    for ranks, mesh in MESHES:
        if ranks <= arguments.ranks:
            print(f"{name_of(ranks, mesh)} …", file=sys.stderr, flush=True)
            rows[name_of(ranks, mesh)] = run(ranks, mesh, more)
    good = {name: row for name, row in rows.items() if "losses" in row}
    first = next(iter(good.values()), {"losses": [0.0]})["losses"]
    print(f"{'mesh':16} {'loss':>8} {'largest difference':>19} {'tokens/s':>9} {'MB on the fullest rank':>23}"
          f" {'MB a step over dp':>18} {'over tp':>8}")  # fmt: skip
    apart = 0.0
    for name, row in rows.items():
        if name not in good:
            print(f"{name:16} {row['note']}")
            continue
        gap = max(abs(a - b) / b for a, b in zip(row["losses"], first, strict=True))
        apart = max(apart, gap)
        dp, tp = (row["received"][axis] / 1e6 for axis in ("dp", "tp"))
        print(f"{name:16} {row['losses'][-1]:8.4f} {gap:19.1e} {row['tokens_per_s']:9.0f} {row['bytes'] / 1e6:23.2f}"
              f" {dp:18.2f} {tp:8.2f}")  # fmt: skip
    if good:
        draw(good, arguments.picture)
        print(f"picture: {arguments.picture}")
    return 0 if len(good) == len(rows) and apart < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
