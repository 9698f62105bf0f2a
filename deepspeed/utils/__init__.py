"""Old addresses of logging, tensor access, leaf modules and small tools."""

from __future__ import annotations

from deepspeed.accelerator.instruments import instrument_w_nvtx
from deepspeed.comm import init_distributed
from deepspeed.engine.data_loading import RepeatingLoader
from deepspeed.foundation.log import log_dist, logger
from deepspeed.foundation.script_helpers import OnDevice
from deepspeed.utils import comms_logging, groups, logging, timer, torch
from deepspeed.zero.api.tensor_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from deepspeed.zero.layout.units import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "OnDevice",
    "RepeatingLoader",
    "comms_logging",
    "get_z3_leaf_modules",
    "groups",
    "init_distributed",
    "instrument_w_nvtx",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "timer",
    "torch",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
