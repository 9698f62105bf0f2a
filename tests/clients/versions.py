"""Older releases of the clients: an environment for each, the surfaces and two training cells, and a table.

python tests/clients/versions.py                           # the oldest of twelve months, each beside the newest others
python tests/clients/versions.py trl==0.26.0 peft==0.18.1  # one environment with these
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# Oldest releases between 2025-11-21 and 2026-11-21. TRL's cannot be imported beside Transformers 5, with or without us.
OLDEST = {
    "transformers": "4.57.2",
    "accelerate": "1.12.0",
    "lightning": "2.6.0",
    "peft": "0.18.1",
    "trl": "0.26.0",
}
CELLS = {
    "transformers": ["transformers-2-bf16-2", "transformers-3-fp32-2"],
    "accelerate": ["accelerate-2-fp32-2", "accelerate-3-bf16-2"],
    "lightning": ["lightning-1-fp32-2", "lightning-3-fp32-2", "fabric-2-fp32-2", "fabric-3-bf16-2"],
    "peft": ["peft-2-bf16-2", "peft-3-fp32-2"],
    "trl": ["trl-sft-3-bf16-2", "trl-dpo-3-fp32-2", "trl-grpo-3-fp32-2"],
}


def layered(folder: Path) -> Path:
    """The interpreter of an environment that has what the one this runs in has, and what is installed over it."""
    venv.create(folder, with_pip=True)
    here = sysconfig.get_paths()["purelib"]
    purelib = folder / Path(here).relative_to(sys.prefix)
    (purelib / "rest.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return folder / "bin" / "python"


def torch_line() -> str:
    """The constraint by which pip leaves the torch alone that is here."""
    (line,) = [line for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    return f"{line}\n"


def environment(folder: Path, wanted: list[str]) -> Path:
    """The interpreter of an environment that has `wanted`, and the rest from the environment this runs in."""
    python = layered(folder)
    (folder / "constraints.txt").write_text(torch_line())
    pinned = {line.split("==")[0] for line in wanted}
    rest = sorted({*OLDEST, "datasets"} - pinned)  # in releases that go with those
    command = [python, "-m", "pip", "install", "-q", "-c", folder / "constraints.txt", *wanted, *rest]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return python


def tested(wanted: list[str]) -> str:
    """What became of an environment with `wanted`, in a few words."""
    clients = [line.split("==")[0] for line in wanted]
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        try:
            python = environment(Path(folder), wanted)
        except subprocess.CalledProcessError as error:
            return f"not installed (pip ends with {error.returncode})"
        cells = [f"tests/clients/test_losses.py::test_the_client_trains_as_without[{cell}]"
                 for client in clients for cell in CELLS[client]]  # fmt: skip
        command = [python, "-m", "pytest", "-q", "--tb=short", "tests/clients/test_surfaces.py", *cells]
        if any(line.startswith("transformers==4") for line in wanted):  # it does not patch constructors yet
            command += ["-k", "not wrapper_of_constructors"]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return lines[-1] if lines else f"ends with {done.returncode}"


def main() -> int:
    """Print a line per environment; non-zero when one failed."""
    alone = [[f"{client}=={version}"] for client, version in OLDEST.items() if client != "trl"]
    together = [f"{client}=={version}" for client, version in OLDEST.items()]
    failed = 0
    for wanted in [sys.argv[1:]] if len(sys.argv) > 1 else [*alone, together]:
        outcome = tested(wanted)
        failed += "failed" in outcome or "passed" not in outcome
        print(f"{' '.join(wanted)}: {outcome}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
