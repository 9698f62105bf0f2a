"""Configuration blocks of the monitors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.config.sections.monitor import MonitorSections as DeepSpeedMonitorConfig

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Return the checked monitor blocks of a whole configuration.

    Args:
        param_dict: the configuration as a dict; other blocks are not checked.

    Raises:
        pydantic.ValidationError: a name, type or value is wrong.
    """
    blocks = DeepSpeedMonitorConfig.model_fields
    return DeepSpeedMonitorConfig(**{name: value for name, value in param_dict.items() if name in blocks})
