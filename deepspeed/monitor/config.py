"""The blocks of the monitors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.config.sections.monitor import MonitorSections as DeepSpeedMonitorConfig

__all__ = ["DeepSpeedMonitorConfig", "get_monitor_config"]


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The monitors' blocks out of a whole configuration, checked.

    Args:
        param_dict: the configuration as a dict; other blocks are not looked at.

    Raises:
        pydantic.ValidationError: a name, type or value is wrong.
    """
    blocks = DeepSpeedMonitorConfig.model_fields
    return DeepSpeedMonitorConfig(**{name: value for name, value in param_dict.items() if name in blocks})
