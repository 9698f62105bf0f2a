"""Monitors through their own packages, offline, read back; `make monitors` has an environment with them."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed.monitor import monitor_process
from deepspeed.monitor.monitor import MonitorMaster
from tests.harness.pool import PATIENCE, free_port
from tests.unit.monitor.test_monitors import master, until, warnings

EVENTS = [("Train/Samples/lr", 0.5, 4), ("Train/Samples/train_loss", 2.0, 4)]
LATER = [("Train/Samples/lr", 0.25, 8)]


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages take long to import beside other work."""
    monkeypatch.setattr(monitor_process, "LIMIT", monitor_process.LIMIT * PATIENCE)


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"needs {module}: make monitors")


def write(monitor: MonitorMaster) -> None:
    with warnings() as said:
        monitor.write_events(EVENTS)
        monitor.write_events(LATER)
        monitor.close()
    assert said == []


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a W&B file, in LevelDB's log format behind a header of seven bytes."""
    at, block, kept = 7, 1 << 15, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # the rest of a block is filled up
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        kept += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield kept
            kept = b""


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    write(master(tmp_path, "tensorboard"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert found.Tags()["scalars"] == ["Train/Samples/lr", "Train/Samples/train_loss"]
    rates = found.Scalars("Train/Samples/lr")
    assert [(e.step, e.value) for e in rates] == [(4, 0.5), (8, 0.25)]
    assert abs(rates[0].wall_time - time.time()) < 600
    assert (tmp_path / "run" / "events.jsonl").read_text().count("\n") == 3


@needs("wandb")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    write(master(tmp_path, "wandb", project="p", group="g"))
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows, project = [], ""
    for data in records_of(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        project = project or record.run.project
        if record.HasField("history"):
            items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            rows.append({name: value for name, value in items.items() if name == "_step" or name.startswith("Train")})
    assert project == "p"
    assert rows == [
        {"_step": 4, "Train/Samples/lr": 0.5, "Train/Samples/train_loss": 2.0},
        {"_step": 8, "Train/Samples/lr": 0.25},
    ]


@needs("comet_ml")
def test_comet_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMET_OFFLINE_DIRECTORY", str(tmp_path))
    write(master(tmp_path, "comet", online=False, samples_log_interval=4, project="p", experiment_name="mine"))
    (archive,) = tmp_path.glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        text = opened.read("messages.json").decode()
    metrics = [m["payload"]["metric"] for m in map(json.loads, text.splitlines()) if m["type"] == "metric_msg"]
    ours = [(m["metricName"], float(m["metricValue"])) for m in metrics if m["metricName"].startswith("Train")]
    assert ours == [("Train/Samples/lr", 0.5), ("Train/Samples/train_loss", 2.0), ("Train/Samples/lr", 0.25)]
    assert '"mine"' in text


@needs("mlflow")
def test_mlflow(tmp_path: Path) -> None:
    before = dict(os.environ)
    write(master(tmp_path, "mlflow", tracking_uri=str(tmp_path / "runs"), experiment="e", run_name="r"))
    assert dict(os.environ) == before
    (lr,) = tmp_path.glob("runs/*/*/metrics/Train/Samples/lr")
    assert [line.split()[1:3] for line in lr.read_text().splitlines()] == [["0.5", "4"], ["0.25", "8"]]


@needs("prometheus_client")
def test_prometheus(tmp_path: Path) -> None:
    port = free_port()
    monitor = master(tmp_path, "prometheus", port=port, job_name="mine")

    def page() -> str:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except OSError:
            return ""

    monitor.write_events(EVENTS)
    until(lambda: "train_loss" in page())
    assert 'deepspeed_train_samples_lr{job="mine"} 0.5' in page() and 'deepspeed_step{job="mine"} 4.0' in page()
    monitor.close()
    assert page() == ""


@needs("prometheus_client")
def test_a_port_that_is_taken_costs_one_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, warnings() as said:
        monitor = master(tmp_path, "prometheus", port=taken.getsockname()[1])

        def ended() -> bool:
            monitor.write_events(EVENTS)
            return bool(said)

        until(ended)
        monitor.close()
    assert len(said) == 1 and "Address already in use" in said[0]
