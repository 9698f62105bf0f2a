"""Monitor for Comet."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from deepspeed.monitor.base import Event, Monitor


class CometMonitor(Monitor):
    """Monitor for Comet: logs at most one event per name every `samples_log_interval` samples to an experiment.

    Args:
        comet_config: the `comet` block.

    Attributes:
        experiment: Comet's experiment object.
    """

    module, extra = "comet_ml", "comet"

    def __init__(self, comet_config: Any) -> None:
        super().__init__(comet_config)
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        self.experiment = import_module("comet_ml").start(**{name: getattr(comet_config, name) for name in names})
        if comet_config.experiment_name is not None:
            self.experiment.set_name(comet_config.experiment_name)
        self.samples_log_interval = comet_config.samples_log_interval
        self._logged: dict[str, int] = {}

    def write(self, events: list[Event]) -> None:
        """Log each event if `samples_log_interval` samples have passed since the last one of its name."""
        for event in events:
            last = self._logged.get(event.name)
            if last is None or event.step - last >= self.samples_log_interval:
                self._logged[event.name] = event.step
                self.experiment.log_metric(event.name, event.value, step=event.step)

    def close(self) -> None:
        self.experiment.end()
