"""The newest value of each event, for Prometheus to fetch."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from deepspeed.monitor.base import Event, Monitor


class PrometheusMonitor(Monitor):
    """Serves gauges over HTTP: `Train/Samples/lr` is `deepspeed_train_samples_lr{job="…"}`, the step is a gauge too."""

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
        """Set the gauges."""
        for event in events:
            name = "deepspeed_" + re.sub(r"\W", "_", event.name).lower()
            self._set(name, event.name, event.value)
            self._set("deepspeed_step", "x axis of the newest event", event.step)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
