"""`make newest`: the newest releases of the clients in an environment of their own, what runs there, and its table.

python -m tests.clients.newest                      # beside the torch that is here
python -m tests.clients.newest --torch torch        # beside the newest torch of pip's index: CUDA's is several GB
python -m tests.clients.newest --only generation    # one part, and no row
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

from tests.clients.versions import REPOSITORY, layered, torch_line

FOLDER = REPOSITORY / ".venv" / "newest"
PAGE = REPOSITORY / "docs" / "clients.md"
PACKAGES = ("transformers", "accelerate", "lightning", "peft", "trl", "pydantic", "safetensors", "fastapi")
COLUMNS = ("torch", *PACKAGES)
BEGIN, END = "<!-- rows of `make newest` -->", "<!-- end of rows -->"
QUICK = ["-m", "not slow and not gpu"]
PARTS = {  # of the suite, by what they show
    "clients": ["tests/clients"],
    "generation": ["tests/unit/inference", "tests/unit/inference_surface", "tests/unit/serving"],
    "sequences and matrices": [
        "tests/parallel/test_sequence_models.py", "tests/parallel/test_sequence_scripts.py",
        "tests/parallel/test_tensor_models.py", "tests/parallel/test_tensor_generating.py",
        "tests/parallel/test_tensor_heads.py",
    ],
    "compression": ["tests/unit/compression", "tests/parallel/test_compression_removal.py"],
    "test": ["tests/unit/config", "tests/unit/engine", "tests/unit/checkpoint", "tests/parallel/test_engine.py"],
}  # fmt: skip
TRAIN = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "examples/bytes_lm/train.py", "--train_bytes", "300000",
         "--heldout_bytes", "20000", "--output", "build/newest"]  # fmt: skip


def installed(python: Path) -> dict[str, str]:
    """Releases of the packages in an environment."""
    program = "import sys; from importlib import metadata; print(*map(metadata.version, sys.argv[1:]))"
    done = subprocess.run([python, "-c", program, *COLUMNS], check=True, capture_output=True, text=True)
    return dict(zip(COLUMNS, done.stdout.split(), strict=True))


def environment(torch: str) -> Path:
    """The interpreter of an environment with the newest releases over the one this runs in.

    Args:
        torch: what pip is asked for; empty: the torch that is here stays.
    """
    python = layered(FOLDER)
    pip = [python, "-m", "pip", "install", "-q", "-U"]
    if torch:
        subprocess.run([*pip, torch], check=True)
    bound = FOLDER / "constraints.txt"
    bound.write_text("" if torch else torch_line())
    subprocess.run([*pip, "-c", bound, *PACKAGES], check=True)
    return python


def outcome(python: Path, part: str) -> str:
    """What became of a part: the last line of its tests, or how the training ended."""
    command = (
        [python, *TRAIN] if part == "train" else [python, "-m", "pytest", "-q", "--tb=short", *QUICK, *PARTS[part]]
    )
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    ran = re.search(r"(\d+ failed)?(, )?(\d+ passed)?(?=.* in [\d.]+s)", (done.stdout.splitlines() or [""])[-1])
    said = ran[0] if ran and ran[0] and part != "train" else "" if done.returncode else "ends well"
    return f"{said} (ends with {done.returncode})".strip() if done.returncode else said


def with_row(page: str, versions: dict[str, str], day: str, told: str) -> str:
    """The page with a row for these releases; one of the same releases is replaced."""
    key = " | ".join(versions[name].partition("+")[0] for name in COLUMNS)
    head, rest = page.split(BEGIN)
    rows, tail = rest.split(END)
    kept = [row for row in rows.strip().splitlines() if not row.startswith(f"| {key} |")]
    return f"{head}{BEGIN}\n" + "\n".join([*kept, f"| {key} | {day} | {told} |"]) + f"\n{END}{tail}"


def main() -> int:
    """Install, run, write the row; non-zero when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="", help="what pip is asked for; empty: the torch that is here")
    parser.add_argument("--only", choices=[*PARTS, "train"], help="one part, and no row")
    asked = parser.parse_args()
    python = environment(asked.torch)
    versions = installed(python)
    print(*(f"{name} {version}" for name, version in versions.items()), sep=", ", flush=True)
    told = {}
    for part in [asked.only] if asked.only else [*PARTS, "train"]:
        told[part] = outcome(python, part)
        print(f"{part}: {told[part]}", flush=True)
    if not asked.only:
        text = "; ".join(f"{part}: {said}" for part, said in told.items())
        PAGE.write_text(with_row(PAGE.read_text(), versions, datetime.date.today().isoformat(), text))
    return sum("ends with" in said for said in told.values())


if __name__ == "__main__":
    sys.exit(main())
