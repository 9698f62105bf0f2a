"""Events for MLflow."""

from __future__ import annotations

import os
import re
from importlib import import_module
from typing import Any

from deepspeed.monitor.base import Event, Monitor

_MOST = 1000  # metrics in a batch, by MLflow's own limit
_ODD = re.compile(r"[^\w\-. /:]")  # what names of metrics may not have


class MLflowMonitor(Monitor):
    """Logs to a run of its own, in one batch for all events that have come."""

    module = extra = "mlflow"

    def __init__(self, mlflow_config: Any) -> None:
        super().__init__(mlflow_config)
        uri = mlflow_config.tracking_uri
        if uri is not None and ("://" not in uri or uri.startswith("file:")):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder was asked for by name
        self._metric = import_module("mlflow.entities").Metric
        self._client = import_module("mlflow.tracking").MlflowClient(uri)
        found = self._client.get_experiment_by_name(mlflow_config.experiment)
        number = self._client.create_experiment(mlflow_config.experiment) if found is None else found.experiment_id
        self.run_id = self._client.create_run(number, run_name=mlflow_config.run_name).info.run_id

    def write(self, events: list[Event]) -> None:
        """Log metrics, `step` as the step."""
        metrics = [self._metric(_ODD.sub("_", e.name), e.value, int(1000 * e.time), e.step) for e in events]
        for first in range(0, len(metrics), _MOST):
            self._client.log_batch(self.run_id, metrics=metrics[first : first + _MOST])

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self.run_id)
