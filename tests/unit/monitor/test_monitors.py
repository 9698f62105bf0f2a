"""Monitors without packages: what is written, and that a run is never held up, whatever a writer does."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import logger
from deepspeed.monitor import monitor_process
from deepspeed.monitor.base import Monitor
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
from tests.harness.pool import PATIENCE

FOLDER_KEYS = ("tensorboard", "csv_monitor", "jsonl_monitor")


def master(folder: Path, block: str = "csv_monitor", **settings: object) -> MonitorMaster:
    places = {"output_path": str(folder), "job_name": "run"} if block in FOLDER_KEYS else {}
    return MonitorMaster(get_monitor_config({block: {"enabled": True, **places, **settings}}))


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]


@contextlib.contextmanager
def warnings() -> Iterator[list[str]]:
    """Warnings of the package inside."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def until(true, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds * PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_csv_goes_on_after_a_restart_and_jsonl_comes_with_the_folder(tmp_path: Path) -> None:
    for step in (8, 16):
        monitor = master(tmp_path)
        monitor.write_events([("Train/Samples/lr", 0.5, step), ("my metric", float("nan"), step)])
        monitor.close()
        monitor.close()
    rows = list(csv.reader((tmp_path / "run" / "Train_Samples_lr.csv").open()))
    assert rows == [["step", "lr"], ["8", "0.5"], ["16", "0.5"]]
    assert (tmp_path / "run" / "my_metric.csv").read_text().split() == ["step,my", "metric", "8,nan", "16,nan"]
    found = [(row["name"], row["value"], row["step"]) for row in lines(tmp_path)]
    assert found == [
        ("Train/Samples/lr", 0.5, 8),
        ("my metric", "nan", 8),
        ("Train/Samples/lr", 0.5, 16),
        ("my metric", "nan", 16),
    ]
    assert all(abs(float(str(row["time"])) - time.time()) < 600 for row in lines(tmp_path))


def test_nothing_is_enabled_without_a_block() -> None:
    monitor = MonitorMaster(get_monitor_config({"train_batch_size": 1, "csv_monitor": {"job_name": "x"}}))
    assert not monitor.enabled and monitor.csv_monitor is None
    monitor.write_events([("x", 1.0, 1)])


def test_other_ranks_have_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monitor = master(tmp_path)
    assert monitor.enabled and monitor.csv_monitor is None and not list(tmp_path.iterdir())


def test_a_package_that_is_missing_is_named_with_the_line_that_installs_it() -> None:
    class Odd(Monitor):
        module, extra = "no_such_package", "odd"

    with pytest.raises(NotAvailableError, match=r"no_such_package: pip install 'deepspeed\[odd\]'"):
        Odd.require()


def test_a_writer_that_blocks_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_process, "LIMIT", 1.0)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "events.jsonl")  # to open it waits for a reader, who never comes
    before = psutil.Process().children()
    monitor = master(tmp_path, "jsonl_monitor")
    began = time.monotonic()
    for step in range(300):
        monitor.write_events([("x" * 20_000, 1.0, step)])  # 6 MB: more than the pipe takes
    assert time.monotonic() - began < 2.0 * PATIENCE
    with warnings() as said:
        monitor.close()
    assert len(said) == 1 and "the monitor jsonl_monitor did not finish within" in said[0], said
    assert psutil.Process().children() == before


def test_one_that_cannot_keep_up_loses_events_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_process, "LIMIT", 1.0)
    monkeypatch.setattr(monitor_process, "_PENDING", 1 << 16)
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "events.jsonl")
    monitor = master(tmp_path, "jsonl_monitor")
    with warnings() as said:
        writer = psutil.Process(monitor.jsonl_monitor._writer.pid)  # type: ignore[union-attr]
        writer.suspend()
        for step in range(200):
            monitor.write_events([("x" * 20_000, 1.0, step)])
        assert len(said) == 1 and "does not keep up" in said[0]
        monitor.close()


@pytest.mark.parametrize("how", ["raises", "disk is full", "is killed"])
def test_a_writer_that_fails_costs_one_warning(tmp_path: Path, how: str) -> None:
    if how == "raises":
        (tmp_path / "run").write_text("no folder")
    elif how == "disk is full":
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "events.jsonl").symlink_to("/dev/full")
    monitor = master(tmp_path, "jsonl_monitor")
    writer = monitor.jsonl_monitor
    assert writer is not None
    if how == "is killed":
        os.kill(writer._writer.pid, signal.SIGKILL)  # type: ignore[union-attr]
    with warnings() as said:

        def ended() -> bool:
            monitor.write_events([("x", 1.0, 1)])
            return writer._writer is None

        until(ended)
        monitor.write_events([("x", 1.0, 2)])
        monitor.close()
    reason = {"raises": "FileExistsError", "disk is full": "No space left on device", "is killed": "it said nothing"}
    assert len(said) == 1 and reason[how] in said[0] and said[0].endswith("training goes on"), said


RUN = """
import os, sys, time
from deepspeed.monitor.config import get_monitor_config
from deepspeed.monitor.monitor import MonitorMaster
block = {"enabled": True, "output_path": sys.argv[1], "job_name": "run"}
monitor = MonitorMaster(get_monitor_config({"csv_monitor": block}))
if sys.argv[2] == "fork" and os.fork() == 0:
    monitor.write_events([("child", 1.0, 0)])
    sys.exit()
for step in range(10 if sys.argv[2] != "killed" else 10**9):
    monitor.write_events([("x", time.time(), step)])
    if step == 0:
        print(os.getpid(), flush=True)
    time.sleep(0.005)
"""


def run(folder: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", RUN, str(folder), how], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("how", ["ends", "fork"])
def test_the_end_of_the_run_loses_nothing(tmp_path: Path, how: str) -> None:
    process = run(tmp_path, how)
    process.communicate()
    assert process.returncode == 0
    assert [row["step"] for row in lines(tmp_path)] == list(range(10))
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]


def test_a_killed_run_loses_less_than_a_second(tmp_path: Path) -> None:
    process = run(tmp_path, "killed")
    assert process.stdout is not None and process.stdout.readline()
    writers = psutil.Process(process.pid).children()
    assert len(writers) == 2
    time.sleep(1.0)
    killed = time.time()
    process.kill()
    process.communicate()
    until(lambda: not any(writer.is_running() for writer in writers))
    rows = lines(tmp_path)
    assert killed - float(str(rows[-1]["value"])) < 1.0 * PATIENCE
    assert [row["step"] for row in rows] == list(range(len(rows)))  # none is missing before
    assert len((tmp_path / "run" / "x.csv").read_text().splitlines()) == len(rows) + 1
