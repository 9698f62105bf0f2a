"""Old addresses of ZeRO."""

from __future__ import annotations

from deepspeed.runtime.zero import (
    config,
    leaf_module_config,
    offload_config,
    parameter_offload,
    partition_parameters,
    stage3,
    stage_1_and_2,
)
from deepspeed.zero.api.gathered_parameters import (
    GatheredParameters,
    register_external_parameter,
    unregister_external_parameter,
    unwrap_model_for_generation,
)
from deepspeed.zero.api.init_context import Init
from deepspeed.zero.parameters.ds_attributes import ZeroParamStatus, ZeroParamType

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "config",
    "leaf_module_config",
    "offload_config",
    "parameter_offload",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
