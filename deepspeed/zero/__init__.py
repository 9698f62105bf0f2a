"""Which training state is split over the ranks, and when it is whole."""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "Init": "deepspeed.zero.init_context",
    "GatheredParameters": "deepspeed.zero.gathered",
    "register_external_parameter": "deepspeed.zero.gathered",
    "unregister_external_parameter": "deepspeed.zero.gathered",
    "unwrap_model_for_generation": "deepspeed.zero.gathered",
    "ZeroParamStatus": "deepspeed.zero.client_surface",
    "set_z3_leaf_modules": "deepspeed.zero.leaf",
}
__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'deepspeed.zero' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
