"""The live line: what it says, where it goes, and that nobody waits for it."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.foundation.progress_line import VARIABLE
from deepspeed.launcher.rank_logs import open_channel
from deepspeed.monitor.progress import Progress

ROOT = Path(__file__).resolve().parents[3]


def shown(stream: Any, total: int | None, updates: int = 3) -> None:
    line = Progress(lambda: 5 << 20, total, stream, every=0.01)
    for update in range(updates):
        line.on_batch()
        line.on_loss(torch.tensor(2.0 - update))
        line.on_update(update + 1, 8)
        time.sleep(0.03)
    line.close()


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    shown(stream, total=100)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 2 and "\r" not in stream.getvalue() and "\x1b" not in stream.getvalue()
    assert re.fullmatch(r"step 3 · loss 0 · [\d,.]+ samples/s · 0:0\d left · 5 MiB", lines[-1]), lines


def test_no_time_left_without_a_number_of_batches() -> None:
    stream = io.StringIO()
    shown(stream, total=None)
    assert "left" not in stream.getvalue() and "samples/s" in stream.getvalue()


def test_one_line_on_a_terminal() -> None:
    reader, writer = open_channel((24, 80))
    with os.fdopen(writer, "w") as stream:
        shown(stream, total=10)
        text = ""
        while "\n" not in text:  # the kernel hands a terminal's output on when it likes
            assert select.select([reader], [], [], 10)[0], text
            text += os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert text.count("\n") == 1 and text.endswith("\n"), text  # the last
    assert text.count("\r") >= 4 and "step 1 " in text and "step 3 " in text


def test_a_terminal_that_takes_nothing_holds_nobody_up() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", buffering=1)
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    line = Progress(lambda: 0, None, stream, every=0.01)
    line.on_loss(1.0)
    line.on_update(1, 1)
    time.sleep(0.1)  # the thread is in its write
    began = time.perf_counter()
    for update in range(1000):
        line.on_batch()
        line.on_loss(1.0)
        line.on_update(update, 1)
    assert time.perf_counter() - began < 0.5
    os.set_blocking(reader, False)
    end = time.monotonic() + 5
    while any(thread.name == "deepspeed-progress" for thread in threading.enumerate()) and time.monotonic() < end:
        threading.Thread(target=line.close).start()
        try:
            os.read(reader, 1 << 20)
        except BlockingIOError:
            time.sleep(0.01)
    os.close(reader)
    stream.close()


SCRIPT = """
import sys, threading
import torch
import deepspeed

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
given = {"progress": True} if "asks" in sys.argv else {}
for x in engine.loop([torch.ones(2, 4)] * 6, **given):
    engine.backward(engine(x).square().mean())
    engine.step()
assert not any(t.name == "deepspeed-progress" for t in threading.enumerate()) or not given
engine.destroy()
assert not any(t.name == "deepspeed-progress" for t in threading.enumerate())
"""


LINE = r"step 6 · loss [\d.e-]+ · [\d,.e+]+ samples/s · 0:00 left · [\d,]+ MiB"


def looped() -> list[str]:
    """What this rank shows while it trains, where the variable of `deepspeed --progress` is set."""
    out = io.StringIO()
    os.environ[VARIABLE] = "1"
    try:
        with contextlib.redirect_stderr(out):
            exec(SCRIPT, {})
    finally:
        del os.environ[VARIABLE]
    return [line for line in out.getvalue().splitlines() if line.startswith("step ")]


def test_rank_0_shows_it_where_the_launcher_asks(workers: Any) -> None:
    (line,), others = workers(2).run(looped)
    assert re.match(LINE, line) and others == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "arguments", "lines"),
    [
        (["--progress"], [], 1),
        ([], ["asks"], 1),
        ([], [], 0),
    ],
)
def test_rank_0_of_a_launched_run_shows_it(
    tmp_path: Path, options: list[str], arguments: list[str], lines: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", *options, "train.py", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if line.startswith("step ")]
    assert len(found) == lines, done.stderr  # the last one: it is over before a plain line is due
    assert all(re.match(LINE, line) for line in found)
