"""Registry of monitoring back ends.

A new back end needs a subclass of `Monitor` (`base.py`), a block in `MonitorSections` (`config/sections/monitor.py`), a
row here under the name of the block, and the attribute of its feed in `MonitorMaster` (`monitor.py`).
"""

from __future__ import annotations

from importlib import import_module

from deepspeed.monitor.base import Monitor

# block of the configuration: module and class of its monitor
MONITORS = {
    "tensorboard": ("deepspeed.monitor.tensorboard", "TensorBoardMonitor"),
    "wandb": ("deepspeed.monitor.wandb", "WandbMonitor"),
    "comet": ("deepspeed.monitor.comet", "CometMonitor"),
    "csv_monitor": ("deepspeed.monitor.csv_monitor", "csvMonitor"),
    "jsonl_monitor": ("deepspeed.monitor.base", "JsonlMonitor"),
    "mlflow": ("deepspeed.monitor.base", "MLflowMonitor"),
    "prometheus": ("deepspeed.monitor.base", "PrometheusMonitor"),
}


def monitor_class(block: str) -> type[Monitor]:
    """Return the monitor class of a block of the configuration (a key of `MONITORS`); its package is not imported."""
    module, name = MONITORS[block]
    return getattr(import_module(module), name)
