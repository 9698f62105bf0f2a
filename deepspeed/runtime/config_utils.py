"""Old address of the base of typed sections, and of small readers of dicts."""

from __future__ import annotations

from deepspeed.config.base_model import (
    DeepSpeedConfigModel,
    dict_raise_error_on_duplicate_keys,
    get_dict_param,
    get_list_param,
    get_scalar_param,
)

__all__ = [
    "DeepSpeedConfigModel",
    "dict_raise_error_on_duplicate_keys",
    "get_dict_param",
    "get_list_param",
    "get_scalar_param",
]
