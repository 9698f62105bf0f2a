"""Run the rows of `table.py` from a checkout of DeepSpeedExamples, unedited, and write docs/programs.md.

python -m tests.programs.run --checkout FOLDER --work FOLDER                     # this package
python -m tests.programs.run --checkout FOLDER --work FOLDER --side reference    # 0.19.8, as a black box
python -m tests.programs.run --checkout FOLDER --work FOLDER --page              # the page, from what both gave
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.programs import environment, stand_ins
from tests.programs.page import page
from tests.programs.table import PROGRAMS, Program

LAUNCH = "import sys; from deepspeed.launcher.runner import main; sys.exit(main(sys.argv[1:]))"


def place_of(program: Program, checkout: Path, data: Path, place: Path) -> Path:
    """A fresh folder with links to the program's files and to the stand-ins; what it writes stays there."""
    subprocess.run(["rm", "-rf", place], check=True)
    place.mkdir(parents=True)
    for entry in [*(checkout / program.folder).iterdir(), *data.iterdir()]:
        link = place / entry.name
        if not link.exists():
            link.symlink_to(entry)
    return place


def commands_of(program: Program, python: Path, port: int, side: str) -> list[tuple[list[str], dict[str, str]]]:
    """The processes to start: our launcher, which starts the ranks; or the ranks of the reference, or one process."""
    arguments = shlex.split(program.command)
    if program.ranks == 0:
        return [([str(python), *arguments], {})]
    if side == "here":
        launch = ["-c", LAUNCH, "--num_gpus", str(program.ranks), "--master_port", str(port)]
        return [([str(python), *launch, *arguments], {})]
    world = {"WORLD_SIZE": str(program.ranks), "LOCAL_WORLD_SIZE": str(program.ranks), "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(port)}  # fmt: skip
    return [([str(python), arguments[0], f"--local_rank={rank}", *arguments[1:]],
             world | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(program.ranks)]  # fmt: skip


def variables_of(program: Program, work: Path, side: str, record: Path) -> dict[str, str]:
    """The environment of a run: patches first, then the package of the side."""
    found = {"PYTHONPATH": environment.paths(work, side, program.older), "PROGRAM_CUDA": str(int(program.cuda)),
             "PROGRAM_RECORD": str(record), "PROGRAM_STEPS": str(program.steps), "PROGRAM_DATA": str(work / "data"),
             "HF_HOME": str(work / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DS_ACCELERATOR": "cpu",
             "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
             "TORCH_EXTENSIONS_DIR": str(work / "extensions")}  # fmt: skip
    if side == "reference":  # its launcher counts sockets as devices, and ranks find their number in this
        found |= {"LOCAL_SIZE": str(max(program.ranks, 1)), "CXX": "g++"}
    return os.environ | found | program.variables


def losses_of(record: Path) -> list[float]:
    """What rank 0 handed to `backward`, in order."""
    file = record / "rank0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["loss"] for row in rows if "loss" in row]


def steps_of(record: Path) -> int:
    """The optimizer steps of the engine that made most."""
    file = record / "rank0.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return max([row["step"] for row in rows if "step" in row], default=0)


def run(program: Program, checkout: Path, work: Path, side: str, port: int = 29611) -> dict[str, Any]:
    """Run one program to its end; its outcome, losses and the end of what it printed."""
    python, data = environment.interpreter(work), stand_ins.make(work / "data")
    own = work / "places" / side / program.name.replace(" ", "_")
    place = place_of(program, checkout, data, own / Path(program.folder).name)
    record = place / "record"
    record.mkdir()
    variables = variables_of(program, work, side, record)
    variables["PYTHONPATH"] += f"{os.pathsep}{checkout / program.package}" if program.package else ""
    if program.before:
        paths = f"{variables['PYTHONPATH']}{os.pathsep}{checkout / program.folder}"
        subprocess.run(program.before.replace("{python}", str(python)), cwd=place, shell=True, check=True,
                       env=variables | {"PYTHONPATH": paths})  # fmt: skip
    for lock in (work / "extensions").rglob("lock"):  # of a run that was ended: others would wait for it without end
        lock.unlink()
    started = time.time()
    with (place / "log").open("w") as log:
        processes = [subprocess.Popen(command, cwd=place, env=variables | own, stdout=log, stderr=subprocess.STDOUT,
                                      start_new_session=True)
                     for command, own in commands_of(program, python, port, side)]  # fmt: skip
        code = ended(processes, started + program.seconds)
    text = (place / "log").read_text(errors="replace")
    why = f"not done within {program.seconds} s" if code == -1 else last_error(text) if code else ""
    return {"name": program.name, "code": code, "losses": losses_of(record), "steps": steps_of(record),
            "seconds": round(time.time() - started), "outcome": outcome(program, code, record, text),
            "error": why}  # fmt: skip


def ended(processes: list[subprocess.Popen[bytes]], latest: float) -> int:
    """The first code other than 0, once all have ended; all are ended when one has failed, or at `latest`."""
    while True:
        codes = [process.poll() for process in processes]
        failed = [code for code in codes if code]
        if all(code == 0 for code in codes):
            return 0
        if failed or time.time() > latest:
            time.sleep(5)  # the others may say why
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return failed[0] if failed else -1
        time.sleep(0.5)


def outcome(program: Program, code: int, record: Path, text: str) -> str:
    """ "trains", "runs", "refused", "cannot" or "fails"."""
    if code == 0 and (program.says in text or program.expected in ("trains", "refused", "cannot")):
        return "trains" if steps_of(record) >= 2 else "runs"
    stops = program.expected in ("refused", "cannot") and code and program.says in text
    return program.expected if stops else "fails"


def last_error(text: str) -> str:
    """The line that names the error."""
    lines = [line.strip() for line in text.splitlines() if "Error" in line and ": " in line]
    return lines[-1][:300] if lines else " ".join(text.split()[-30:])[:300]


def figures(losses: list[float]) -> str:
    """First and last of the losses."""
    return f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else ""


def main() -> int:
    """Run what is asked for; non-zero where an outcome is not the expected one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=os.environ.get("DEEPSPEED_EXAMPLES"))
    parser.add_argument("--work", type=Path, required=True, help="environments, stand-ins and results lie here")
    parser.add_argument("--side", choices=["here", "reference"], default="here")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name has one of these words")
    parser.add_argument("--port", type=int, default=29611)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    results = options.work / "results"
    if options.page:
        (environment.REPOSITORY / "docs" / "programs.md").write_text(page(results))
        return 0
    bad = 0
    for program in PROGRAMS:
        if options.only and not any(word in program.name for word in options.only):
            continue
        result = run(program, options.checkout, options.work, options.side, options.port)
        (results / options.side).mkdir(parents=True, exist_ok=True)
        (results / options.side / f"{program.name.replace(' ', '_')}.json").write_text(json.dumps(result))
        bad += options.side == "here" and result["outcome"] != program.expected
        print(f"{program.name}: {result['outcome']} {figures(result['losses'])} {result['seconds']} s"
              f" {result['error']}", flush=True)  # fmt: skip
    return bad


if __name__ == "__main__":
    sys.exit(main())
