"""`ds_top`: what ranks write, read while they write, and the command."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepspeed.monitor.top import LivePage, read_pages, table
from tests.unit.monitor.test_monitors import master, warnings


def test_pages_are_whole_while_they_are_written(tmp_path: Path) -> None:
    page, over = LivePage(tmp_path, 3), threading.Event()

    def write() -> None:
        number = 0
        while not over.is_set():
            number += 1
            page.write({"update": number, "padding": "x" * (number % 2000), "again": number})

    assert read_pages(tmp_path) == {}  # nothing was written yet
    thread = threading.Thread(target=write)
    thread.start()
    try:
        end, seen = time.monotonic() + 0.5, set()
        while time.monotonic() < end:
            for found in read_pages(tmp_path).values():
                assert found["update"] == found["again"] and len(found["padding"]) == found["update"] % 2000
                seen.add(found["update"])
        assert len(seen) > 10
    finally:
        over.set()
        thread.join()
        page.close()


def test_who_is_late_behind_or_ended_is_said(tmp_path: Path) -> None:
    for rank, facts in enumerate(({"update": 7}, {"update": 6}, {"update": 7, "ended": True})):
        page = LivePage(tmp_path, rank)
        page.write({"host": "here", "seconds": 0.5, "samples": 56, "memory": {"parameters": 3 << 20}, **facts})
        page.close()
    lines = table(tmp_path).splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "2"]
    assert "parameters 3 MiB" in lines[2] and "500.0" in lines[2] and "LATE" not in lines[2]
    assert lines[4].endswith("ended") and lines[5] == "samples 56; behind the others: rank(s) 1"
    late = table(tmp_path, time.time() + 5).splitlines()
    assert [line.endswith("LATE") for line in late[2:5]] == [True, True, False]


def test_a_run_whose_process_is_gone_has_ended(tmp_path: Path) -> None:
    """Killed, or over without `destroy`: no rank of it is late."""
    write = (
        "import socket, sys; from pathlib import Path; from deepspeed.monitor.top import LivePage\n"
        "LivePage(Path(sys.argv[1]), 0).write({'host': socket.gethostname(), 'seconds': 0.5, 'update': 7})"
    )
    subprocess.run([sys.executable, "-c", write, str(tmp_path)], check=True)
    LivePage(tmp_path, 1).write({"host": socket.gethostname(), "seconds": 0.5, "update": 7})
    lines = table(tmp_path, time.time() + 60).splitlines()
    assert lines[2].endswith("ended") and lines[3].endswith("LATE")


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    monitor = master(tmp_path, "jsonl_monitor")
    monitor.tell({"update": 1})
    assert read_pages(tmp_path / "run")[0]["update"] == 1
    monitor.close()
    (tmp_path / "run2").write_text("no folder")
    other = master(tmp_path, "jsonl_monitor", job_name="run2")
    with warnings() as said:
        for _ in range(3):
            other.tell({"update": 1})
        assert len(said) == 1 and "ds_top will not see rank 0" in said[0]
        other.close()


@pytest.mark.parametrize("there", [True, False])
def test_the_command(tmp_path: Path, there: bool) -> None:
    if there:
        page = LivePage(tmp_path, 0)
        page.write({"update": 5})
        page.close()
    folder = tmp_path if there else tmp_path / "none"
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.monitor.top", str(folder), "--once"], capture_output=True, text=True
    )
    assert done.returncode == (0 if there else 1)
    assert ("1 rank(s)" in done.stdout) if there else ("is no folder" in done.stderr)
