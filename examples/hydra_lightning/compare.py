"""Train the model under every strategy of the config group, one after the other, and print a table.

python examples/hydra_lightning/compare.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ORDER = ("ddp", "fsdp", *(f"deepspeed_stage_{kind}" for kind in ("1", "2", "2_offload", "3", "3_offload")))


def run(strategy: str, ranks: int, overrides: list[str]) -> dict[str, object]:
    """One row, or the last line of what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        command = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), str(HERE / "train.py")]
        command += [f"strategy={strategy}", f"result={result}", *overrides]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if result.exists():
            return json.loads(result.read_text())
    lines = [line for line in (done.stderr + done.stdout).splitlines() if "Error" in line] or ["failed without a word"]
    return {"strategy": strategy, "note": lines[-1][:150]}


def main() -> int:
    """Run all, print the table; non-zero when one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="of the config, as model.width=512 steps=40")
    arguments = parser.parse_args()
    rows = []
    for strategy in ORDER:
        print(f"{strategy} …", file=sys.stderr, flush=True)
        rows.append(run(strategy, arguments.ranks, arguments.overrides))
    columns = list(dict.fromkeys(name for row in rows for name in row if name != "note"))
    widths = {name: max(len(name), *(len(str(row.get(name, "–"))) for row in rows)) for name in columns}
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        cells = [str(row.get(name, "–")).rjust(width) for name, width in widths.items()]
        print("  ".join(cells), row.get("note", ""))
    print(
        "next: one strategy alone: deepspeed --num_gpus 2 examples/hydra_lightning/train.py strategy=deepspeed_stage_3"
    )
    return 1 if any("loss" not in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
