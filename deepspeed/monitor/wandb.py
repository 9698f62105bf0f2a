"""Monitor for Weights & Biases."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

from deepspeed.monitor.base import Event, Monitor


class WandbMonitor(Monitor):
    """Monitor for W&B: logs to a new run; WANDB_MODE, WANDB_DIR and WANDB_API_KEY have their usual effect.

    Args:
        wandb_config: the `wandb` block, with `project`, `group` and `team`.
    """

    module = extra = "wandb"

    def __init__(self, wandb_config: Any) -> None:
        super().__init__(wandb_config)
        c = wandb_config
        self._run = import_module("wandb").init(project=c.project, group=c.group, entity=c.team)

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        """Log `data`, values by name, as `wandb.log` does; `step` None: W&B's own step."""
        self._run.log(data, step=step)

    def write(self, events: list[Event]) -> None:
        """Write all events of a step with one call."""
        for step, together in itertools.groupby(events, key=lambda event: event.step):
            self.log({event.name: event.value for event in together}, step)

    def close(self) -> None:
        self._run.finish()
