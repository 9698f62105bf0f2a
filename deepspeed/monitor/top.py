"""`ds_top RUN`: all ranks of a run, live, from another terminal."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from deepspeed.monitor.live_status import FOLDER, read_pages

_LATE = 3.0  # times the usual seconds of an update: then a rank is called late
_CLEAR = "\x1b[H\x1b[2J"


def table(folder: Path, now: float | None = None) -> str:
    """One line for each rank.

    Args:
        folder: of the run (`output_path`/`job_name` of a monitor).
        now: seconds since 1970; None: now.
    """
    now = time.time() if now is None else now
    pages = read_pages(folder)
    if not pages:
        return f"no rank has written below {folder / FOLDER} yet: name a run's output_path/job_name, after an update"
    lines = [f"{folder}: {len(pages)} rank(s)", "rank  host          process   update   ms/update     age s  memory"]
    for rank, page in pages.items():
        memory = ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in page.get("memory", {}).items() if v >= 2**20)
        age, usual = now - page["time"], page.get("seconds", 0.0)
        lines.append(
            f"{rank:>4}  {str(page.get('host', '?'))[:12]:<12}{page['process']:>9}{page.get('update', 0):>9}"
            f"{1e3 * usual:>12.1f}{age:>10.1f}  {memory + ' MiB' if memory else ''}{_state(page, age, usual)}"
        )
    lines.append(_summary(pages))
    return "\n".join(lines)


def _state(page: dict[str, Any], age: float, usual: float) -> str:
    if page.get("ended"):
        return "  ended"
    return "  LATE" if usual and age > max(1.0, _LATE * usual) else ""


def _summary(pages: dict[int, dict[str, Any]]) -> str:
    first = next(iter(pages.values()))
    told = {name: first.get(name) for name in ("loss", "gradient norm", "samples", "skipped")}
    ahead = max(page.get("update", 0) for page in pages.values())
    behind = {rank for rank, page in pages.items() if page.get("update", 0) < ahead}
    words = ", ".join(f"{name} {value:.6g}" for name, value in told.items() if value is not None)
    return words + (f"; behind the others: rank(s) {', '.join(map(str, sorted(behind)))}" if behind else "")


def main() -> int:
    """The command; 0, or 1 when there is no such run."""
    parser = argparse.ArgumentParser(prog="ds_top", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run: output_path/job_name of one of its monitors")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once")
    arguments = parser.parse_args()
    if not arguments.run.is_dir():
        print(f"{arguments.run} is no folder: name output_path/job_name of one of the run's monitors", file=sys.stderr)
        return 1
    try:
        while True:
            clear = _CLEAR if sys.stdout.isatty() and not arguments.once else ""
            print(clear + table(arguments.run), flush=True)
            if arguments.once:
                return 0
            time.sleep(arguments.interval)
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `ds_top RUN | head`
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
