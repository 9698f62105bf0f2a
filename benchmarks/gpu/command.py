"""The command: which rows fit, a process for each part, what becomes of one that ends too early or not at all."""

from __future__ import annotations

import argparse
import datetime
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.plan import PARTS, START, Part, choose
from benchmarks.gpu.results import BEGUN, ENDED, MISSING, OK, Key, Results
from benchmarks.gpu.work import BROKEN, REPOSITORY, probe

DEFAULT = REPOSITORY / "benchmarks" / "results" / "gpu"
NO_GPU, LEFT = 2, 3
GRACE = 10.0  # seconds beyond its time after which a part's process is ended
SLACK = 30.0  # seconds beyond twice the expected ones after which a row ends its process
SLOW = 20.0  # factor of these for a rehearsal, on a busy machine without a card
LOOK = 0.5  # seconds between looks at a process
OVERDUE = -signal.SIGKILL
REPORT = 15.0  # seconds kept for the table and the pictures
LOG = "log.txt"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="What a card shows; see docs/gpu.md.")
    parser.add_argument("--minutes", type=float, default=30.0, help="time of this call")
    parser.add_argument("--out", type=Path, default=DEFAULT, help="folder of the results, by card and date")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--retry", action="store_true", help="measure again what is not ok")
    parser.add_argument("--fresh", action="store_true", help="begin a new folder")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the emulated device")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, or draw a folder's report again.

    Returns:
        0: all rows are there and as they should be, or missing with a reason; 1: some are not; 2: torch sees no card;
        3: rows are left for a later call.
    """
    if arguments[:1] == ["report"]:
        return _report(Path(arguments[1]))
    if arguments[:1] == ["probe"]:
        print(probe("--rehearse" in arguments))
        return 0
    options, began = parse(arguments), time.time()
    name, version = _card(options.rehearse)
    if not name:
        print("make gpu: torch sees no GPU here, so nothing was run and nothing was shown", file=sys.stderr)
        return NO_GPU
    results = Results(_folder(options.out, name, options.fresh))
    print(f"{name}, torch {version}: {results.path}", flush=True)
    parts = [part for part in PARTS if not options.parts or part.name in options.parts]
    until = began + 60 * options.minutes - REPORT
    call = Call(results, began if options.retry else 0.0, until, options.rehearse)
    for part in parts:
        call.run(part, parts)
    _report(results.folder)
    return _verdict(parts, results)


def _card(rehearse: bool) -> tuple[str, str]:
    """Return the card's name and torch's version as another process sees them; empty where there is none."""
    command = [sys.executable, "-m", "benchmarks.gpu", "probe", *(["--rehearse"] if rehearse else [])]
    told = subprocess.run(
        command, cwd=REPOSITORY, env=_environment(rehearse), stdout=subprocess.PIPE, text=True, check=False
    )
    name, _, version = told.stdout.strip().partition("\n")
    return (name, version) if told.returncode == 0 else ("", "")


def _folder(out: Path, card: str, fresh: bool) -> Path:
    """Return the newest folder of this card, or a new one of today."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", card).strip("-")
    dated = re.compile(re.escape(name) + r"-\d{4}-\d\d-\d\d(-\d+)?")
    known = sorted(path for path in out.glob(f"{name}-*") if dated.fullmatch(path.name))
    today = f"{name}-{datetime.date.today().isoformat()}"
    if known and not fresh:
        return known[-1]
    same = [path for path in known if path.name.startswith(today)]
    return out / (f"{today}-{len(same) + 1}" if same else today)


def _environment(rehearse: bool) -> dict[str, str]:
    """The variables of a part's process: one rank, this repository's package first, the card as its device."""
    with socket.socket() as probed:
        probed.bind(("127.0.0.1", 0))
        port = probed.getsockname()[1]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    ranks = {name: "1" for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")} | {"RANK": "0", "LOCAL_RANK": "0"}
    ranks |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"} if rehearse else {}
    return os.environ | ranks | {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                 "DS_ACCELERATOR": "cuda", "HF_HUB_OFFLINE": "1"}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One call of the command.

    Args:
        results: rows of the card.
        again: rows that are not ok and older than this time are measured again.
        until: time after which no row may go on.
        rehearse: on the emulated device.
    """

    results: Results
    again: float
    until: float
    rehearse: bool

    def _done(self) -> set[Key]:
        return {key for key, line in self.results.rows().items() if line["state"] == OK or line["when"] >= self.again}

    def run(self, part: Part, parts: list[Part]) -> None:
        """Run a part's process, again where it ended before its rows were done, while rows of it fit into the time."""
        following = parts[parts.index(part) :]
        while keys := choose(following, done := self._done(), self.until - time.time()).get(part.name, []):
            code, why = self._process(part, keys)
            if code == 0 and self._done() == done:  # the rest takes longer than is left
                return
            open_row = self.results.open_row(part.name)
            if open_row is not None:
                key, final = open_row["key"], code == OVERDUE
                self.results.append(part.name, key, ENDED, says=f"the process ended in this row: {why}", final=final)
                print(f"{part.name}: {key}: {ENDED}: {why}", flush=True)
            elif code not in (0, BROKEN):
                self.results.append(part.name, keys[0], ENDED, says=f"the process ended before this row: {why}")
                print(f"{part.name}: {ENDED} before its first row: {why}", flush=True)
                return

    def _process(self, part: Part, keys: list[str]) -> tuple[int, str]:
        """Return the exit code of a part's process, and what there is to say of it; `OVERDUE` if it was ended."""
        limit, folder = min(self.until - time.time(), part.limit), self.results.folder
        command = [sys.executable, "-m", "benchmarks.gpu.work", part.name, "--folder", str(folder)]
        command += ["--until", str(time.time() + limit), *(["--rehearse"] if self.rehearse else []), "--keys", *keys]
        folder.mkdir(parents=True, exist_ok=True)
        began = time.time()
        with (folder / LOG).open("a") as log:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=_environment(self.rehearse), stderr=log, start_new_session=True
            )
            try:
                while True:
                    try:
                        code = process.wait(timeout=LOOK)
                        return code, f"exit code {code}, see {LOG}"
                    except subprocess.TimeoutExpired:
                        over = self._overdue(part, began)
                        if over or time.time() > began + limit + GRACE:
                            return OVERDUE, over or f"not over after {limit + GRACE:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _overdue(self, part: Part, began: float) -> str:
        """Return the reason to end a part's process: its row, or its start, takes several times what it should."""
        last = next((line for line in reversed(self.results.lines()) if line["part"] == part.name), None)
        expected, since = START, began if last is None else last["when"]
        if last is not None and last["state"] == BEGUN:
            expected = next(row.seconds for row in part.rows if row.key == last["key"])
        allowed = (2 * expected + SLACK) * (SLOW if self.rehearse else 1)
        return f"not over after {allowed:.0f} s" if time.time() - max(since, began) > allowed else ""


def _report(folder: Path) -> int:
    from benchmarks.gpu.report import write

    for path in write(folder):
        print(f"written: {path}", flush=True)
    return 0


def _verdict(parts: list[Part], results: Results) -> int:
    rows = results.rows()
    left = [f"{part.name}: {row.key}" for part in parts for row in part.rows if (part.name, row.key) not in rows]
    bad = [
        f"{line['part']}: {line['key']}: {line['state']}: {line.get('says', '')}"
        for line in rows.values()
        if line["state"] not in (OK, MISSING)
    ]
    for line in bad:
        print(f"not as it should be: {line}")
    if left:
        print(f"left for a later call, {len(left)}: {'; '.join(left)}")
    return LEFT if left else 1 if bad else 0
