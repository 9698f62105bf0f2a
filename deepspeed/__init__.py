"""Training and serving models too large for one device: an engine of four changed lines and one JSON."""

from __future__ import annotations

import importlib
from typing import Any

from deepspeed.foundation.duplicate_install import warn_of_others
from deepspeed.foundation.unavailable import install
from deepspeed.version import __version__

# name: (module, attribute or None for the module itself); looked up on first use, so that importing costs nothing
_LAZY: dict[str, tuple[str, str | None]] = {
    "initialize": ("deepspeed.engine.initialize", "initialize"),
    "add_config_arguments": ("deepspeed.engine.initialize", "add_config_arguments"),
    "init_distributed": ("deepspeed.comm.process_groups.init", "init_distributed"),
    "DeepSpeedEngine": ("deepspeed.engine.engine", "DeepSpeedEngine"),
    "PipelineEngine": ("deepspeed.engine.pipeline_engine", "PipelineEngine"),
    "PipelineModule": ("deepspeed.pipe", "PipelineModule"),
    "DeepSpeedDataLoader": ("deepspeed.engine.data_loading", "DeepSpeedDataLoader"),
    "DeepSpeedConfig": ("deepspeed.config", "DeepSpeedConfig"),
    "DeepSpeedConfigError": ("deepspeed.errors", "DeepSpeedConfigError"),
    "DeepSpeedOptimizer": ("deepspeed.zero.optimizer.optimizer", "ZeroOptimizer"),
    "tp_model_init": ("deepspeed.tensor_parallel.init", "tp_model_init"),
    "set_autotp_mode": ("deepspeed.tensor_parallel.init", "set_autotp_mode"),
    "init_inference": ("deepspeed.inference.engine", "init_inference"),
    "InferenceEngine": ("deepspeed.inference.engine", "InferenceEngine"),
    "DeepSpeedInferenceConfig": ("deepspeed.inference.config", "DeepSpeedInferenceConfig"),
    "default_inference_config": ("deepspeed.inference.config", "default_inference_config"),
    "inference": ("deepspeed.inference", None),
    "get_accelerator": ("deepspeed.accelerator", "get_accelerator"),
    "log_dist": ("deepspeed.foundation.log", "log_dist"),
    "logger": ("deepspeed.foundation.log", "logger"),
    "OnDevice": ("deepspeed.foundation.script_helpers", "OnDevice"),
    "zero": ("deepspeed.zero", None),
    "checkpointing": ("deepspeed.activation_checkpointing.checkpointing", None),
    "comm": ("deepspeed.comm", None),
    "dist": ("deepspeed.comm", None),
    "utils": ("deepspeed.utils", None),
    "ops": ("deepspeed.ops", None),
    "pipe": ("deepspeed.pipe", None),
    "runtime": ("deepspeed.runtime", None),
    "accelerator": ("deepspeed.accelerator", None),
    "errors": ("deepspeed.errors", None),
}

# name: the feature it belongs to, which this version does not have
_LATER = {
    "DeepSpeedHybridEngine": "the hybrid engine",
    "moe": "mixture of experts",
}

__all__ = ["__version__", *sorted(_LAZY), "version"]
install()
warn_of_others(__path__[0], __version__)
__version_major__, __version_minor__, __version_patch__ = map(int, __version__.partition("+")[0].split("."))
__git_hash__ = __git_branch__ = None
version = __version__  # a text, as programs compare it; `from deepspeed.version import …` finds the module all the same


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from deepspeed.errors import NotAvailableError

        raise NotAvailableError(f"deepspeed.{name} is not available yet: it belongs to {_LATER[name]}")
    if name not in _LAZY:
        raise AttributeError(f"module 'deepspeed' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    value: Any = importlib.import_module(module)
    if attribute is not None:
        value = getattr(value, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
