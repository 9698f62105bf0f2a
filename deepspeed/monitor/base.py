"""Interface of all monitors, and monitors for JSON lines, MLflow and Prometheus.

Monitor modules do not import torch. The package of a monitor is imported only when the monitor is created.
"""

from __future__ import annotations

import abc
import importlib.util
import json
import math
import os
import re
import time
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from deepspeed.errors import NotAvailableError

_MLFLOW_BATCH = 1000  # metrics in a batch, by MLflow's own limit
_MLFLOW_ILLEGAL = re.compile(r"[^\w\-. /:]")  # characters that names of metrics must not have


class Event(NamedTuple):
    """One metric value of a run.

    Attributes:
        name: name with slashes between its parts.
        value: the number; it may be infinite or NaN.
        step: x axis; for the engine's events, samples over all ranks.
        time: seconds since 1970 when the event was queued.
    """

    name: str
    value: float
    step: int
    time: float


class Monitor(abc.ABC):
    """Base class of monitors, which write events to one target. An engine runs each monitor in its own process.

    Args:
        config: block of the configuration, or any object with its keys as attributes.

    Raises:
        NotAvailableError: the monitor's package is not installed.
    """

    module: ClassVar[str] = ""  # module of the monitor's package
    extra: ClassVar[str] = ""  # extra of this package that installs it

    def __init__(self, config: Any) -> None:
        self.monitor_config, self.enabled = config, bool(config.enabled)
        self.require()

    @classmethod
    def require(cls) -> None:
        """Raise NotAvailableError unless the monitor's package is installed, without importing it."""
        if cls.module and importlib.util.find_spec(cls.module) is None:
            raise NotAvailableError(f"{cls.__name__} writes through {cls.module}: pip install 'deepspeed[{cls.extra}]'")

    def write_events(self, event_list: Iterable[tuple[Any, ...]], flush: bool = True) -> None:
        """Write events.

        Args:
            event_list: (name, value, step) tuples, or `Event`s.
            flush: accepted for old scripts without effect.
        """
        now = time.time()
        self.write([Event(str(e[0]), float(e[1]), int(e[2]), e[3] if len(e) > 3 else now) for e in event_list])

    @abc.abstractmethod
    def write(self, events: list[Event]) -> None:
        """Write events and flush to the operating system or the package."""

    def close(self) -> None:  # noqa: B027  # files that are flushed may stay open
        """Close the target; `write` must not be called afterwards."""


def folder_of(config: Any) -> Path:
    """Return the folder `output_path`/`job_name` of a monitor's block; no path: in the working directory."""
    return Path(config.output_path or ".").absolute() / config.job_name


class JsonlMonitor(Monitor):
    """Monitor that appends a line of JSON per event to `events.jsonl`; infinite and NaN values become strings.

    Args:
        jsonl_config: the `jsonl_monitor` block; the file is in `folder_of` it.
    """

    def __init__(self, jsonl_config: Any) -> None:
        super().__init__(jsonl_config)
        self.path = folder_of(jsonl_config) / "events.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)

    def write(self, events: list[Event]) -> None:
        """Write all events with one call, so that a reader never sees half a line."""
        rows = (e._asdict() | {"value": e.value if math.isfinite(e.value) else str(e.value)} for e in events)
        self._file.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    def close(self) -> None:
        self._file.close()


class MLflowMonitor(Monitor):
    """Monitor for MLflow: logs to a new run, pending events in batches.

    Args:
        mlflow_config: the `mlflow` block; `tracking_uri` None means MLflow's default.
    """

    module = extra = "mlflow"

    def __init__(self, mlflow_config: Any) -> None:
        super().__init__(mlflow_config)
        uri = mlflow_config.tracking_uri
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the user configured a folder
        self._metric = import_module("mlflow.entities").Metric
        self._client = import_module("mlflow.tracking").MlflowClient(uri)
        name, experiment = mlflow_config.experiment, self._client.get_experiment_by_name(mlflow_config.experiment)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self.run_id = self._client.create_run(experiment_id, run_name=mlflow_config.run_name).info.run_id

    def write(self, events: list[Event]) -> None:
        metrics = [self._metric(_MLFLOW_ILLEGAL.sub("_", e.name), e.value, int(1000 * e.time), e.step) for e in events]
        for first in range(0, len(metrics), _MLFLOW_BATCH):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MLFLOW_BATCH])

    def close(self) -> None:
        self._client.set_terminated(self.run_id)


class PrometheusMonitor(Monitor):
    """Monitor for Prometheus: serves gauges over HTTP.

    `Train/Samples/lr` becomes `deepspeed_train_samples_lr{job="…"}`; `deepspeed_step` is the newest step.

    Args:
        prometheus_config: the `prometheus` block, with the host and port to listen on.
    """

    module, extra = "prometheus_client", "prometheus"

    def __init__(self, prometheus_config: Any) -> None:
        super().__init__(prometheus_config)
        package = import_module("prometheus_client")
        self._gauge, self._registry = package.Gauge, package.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._job = prometheus_config.job_name
        self._server, _ = package.start_http_server(prometheus_config.port, prometheus_config.host, self._registry)

    def _set(self, name: str, meaning: str, value: float) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._gauge(name, meaning, ["job"], registry=self._registry).labels(self._job)
        self._gauges[name].set(value)

    def write(self, events: list[Event]) -> None:
        for event in events:
            name = "deepspeed_" + re.sub(r"\W", "_", event.name).lower()
            self._set(name, event.name, event.value)
            self._set("deepspeed_step", "x axis of the newest event", event.step)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
