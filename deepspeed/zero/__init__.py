"""ZeRO: sharding of parameters, gradients and optimizer state."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Init": "deepspeed.zero.api.init_context",
    "GatheredParameters": "deepspeed.zero.api.gathered_parameters",
    "register_external_parameter": "deepspeed.zero.api.gathered_parameters",
    "unregister_external_parameter": "deepspeed.zero.api.gathered_parameters",
    "unwrap_model_for_generation": "deepspeed.zero.api.gathered_parameters",
    "ZeroParamStatus": "deepspeed.zero.parameters.ds_attributes",
    "set_z3_leaf_modules": "deepspeed.zero.layout.units",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'deepspeed.zero' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
