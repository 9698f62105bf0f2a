"""Live view of all ranks of a run in another terminal: `ds_top RUN`. Each rank writes a memory-mapped status page.

[Note: half a page] A reader may read in the middle of a write. The length is zero during a write, and a page that does
not parse is read again.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "ranks"
_BYTES = 4096
_LENGTH = struct.Struct("=I")
_READS, _BETWEEN_READS = 5, 0.002  # attempts to read a page that is being written; seconds between them
_LATE = 3.0  # multiple of the usual seconds of an update from which a rank is late
_CLEAR = "\x1b[H\x1b[2J"


class LivePage:
    """Status page of one rank, a file in the folder of a run.

    Args:
        folder: folder of the run.
        rank: rank of this process.

    Raises:
        OSError: the folder is not writable.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        path = folder / FOLDER / f"{rank}.page"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb+") as file:
            file.truncate(_BYTES)
            self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._process = os.getpid()

    def write(self, facts: dict[str, Any]) -> None:
        """Replace the content of the page by `facts` (JSON values by name), time and process, if these fit in 4 KiB."""
        if os.getpid() != self._process:  # a forked data loader worker
            return
        data = json.dumps({"time": time.time(), "process": self._process, **facts}).encode()
        if len(data) <= _BYTES - _LENGTH.size:
            _LENGTH.pack_into(self._memory, 0, 0)
            self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
            _LENGTH.pack_into(self._memory, 0, len(data))

    def close(self) -> None:
        self._memory.close()


def read_pages(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the status page of each rank of a run, by rank; incomplete pages are omitted after a few attempts."""
    pages: dict[int, dict[str, Any]] = {}
    for path in (folder / FOLDER).glob("*.page"):
        with suppress(OSError, ValueError):
            rank = int(path.stem)
            for _ in range(_READS):
                data = path.read_bytes()
                with suppress(ValueError, struct.error):  # the file may be new and empty
                    (length,) = _LENGTH.unpack_from(data)
                    page = json.loads(data[_LENGTH.size : _LENGTH.size + length]) if length else None
                    if isinstance(page, dict) and {"time", "process"} <= page.keys():
                        pages[rank] = page
                        break
                time.sleep(_BETWEEN_READS)
    return dict(sorted(pages.items()))


def _is_gone(page: dict[str, Any]) -> bool:
    """Return whether a page's process ran on this host and has ended."""
    if page.get("host") != socket.gethostname():
        return False
    try:
        os.kill(page["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:  # a process of another user
        return False
    return False


def table(folder: Path, now: float | None = None) -> str:
    """Format the status of a run as text: a line for each rank, and a summary.

    Args:
        folder: folder of the run: `output_path`/`job_name` of a monitor's configuration.
        now: seconds since 1970; None: the current time.
    """
    now = time.time() if now is None else now
    pages = read_pages(folder)
    if not pages:
        return f"no rank has written below {folder / FOLDER} yet: name a run's output_path/job_name, after an update"
    lines = [f"{folder}: {len(pages)} rank(s)", "rank  host          process   update   ms/update     age s  memory"]
    for rank, page in pages.items():
        memory = ", ".join(f"{k} {v / 2**20:,.0f}" for k, v in page.get("memory", {}).items() if v >= 2**20)
        age, usual = now - page["time"], page.get("seconds", 0.0)
        late = bool(usual) and age > max(1.0, _LATE * usual)
        state = "  ended" if page.get("ended") or (late and _is_gone(page)) else "  LATE" if late else ""
        lines.append(
            f"{rank:>4}  {str(page.get('host', '?'))[:12]:<12}{page['process']:>9}{page.get('update', 0):>9}"
            f"{1e3 * usual:>12.1f}{age:>10.1f}  {memory + ' MiB' if memory else ''}{state}"
        )
    first = next(iter(pages.values()))
    facts = {name: first.get(name) for name in ("loss", "gradient norm", "samples", "skipped")}
    summary = ", ".join(f"{name} {number:.6g}" for name, number in facts.items() if number is not None)
    if experts := first.get("experts"):
        lines.append(
            f"experts: {experts['layers']} layer(s), busiest expert {experts['max over mean']:.2f} x the mean "
            f"({experts['busiest']}), dropped {experts['dropped']:.1%}, entropy {experts['entropy']:.3f}"
        )
    updates = {rank: page.get("update", 0) for rank, page in pages.items()}
    behind = sorted(rank for rank, update in updates.items() if update < max(updates.values()))
    lines.append(summary + (f"; behind the others: rank(s) {', '.join(map(str, behind))}" if behind else ""))
    return "\n".join(lines)


def main() -> int:
    """Run `ds_top` with the process's command line; returns 0, or 1 if the folder of the run does not exist."""
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
