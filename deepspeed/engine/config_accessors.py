"""The engine's getters for configuration values, made from one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.config import DeepSpeedConfig

# getter: JSON path of the resolved value
GETTERS = {
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_gather_16bit_weights_on_model_save": "zero_optimization.gather_16bit_weights_on_model_save",
    "zero_reduce_scatter": "zero_optimization.reduce_scatter",
    "zero_reduce_bucket_size": "zero_optimization.reduce_bucket_size",
    "zero_allgather_bucket_size": "zero_optimization.allgather_bucket_size",
    "zero_allgather_partitions": "zero_optimization.allgather_partitions",
    "zero_sub_group_size": "zero_optimization.sub_group_size",
    "zero_contiguous_gradients": "zero_optimization.contiguous_gradients",
    "zero_load_from_fp32_weights": "zero_optimization.load_from_fp32_weights",
    "zero_ignore_unused_parameters": "zero_optimization.ignore_unused_parameters",
    "zero_round_robin_gradients": "zero_optimization.round_robin_gradients",
    "zero_hpz_partition_size": "zero_optimization.zero_hpz_partition_size",
    "zero_quantized_weights": "zero_optimization.zero_quantized_weights",
    "zero_quantized_gradients": "zero_optimization.zero_quantized_gradients",
    "zero_prefetch_bucket_size": "zero_optimization.prefetch_bucket_size",
    "zero_param_persistence_threshold": "zero_optimization.param_persistence_threshold",
    "zero_max_live_parameters": "zero_optimization.max_live_parameters",
    "zero_max_reuse_distance": "zero_optimization.max_reuse_distance",
    "zero_offload_optimizer": "zero_optimization.offload_optimizer",
    "zero_offload_param": "zero_optimization.offload_param",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "fp16_enabled": "fp16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "bfloat16_enabled": "bf16.enabled",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "dump_state": "dump_state",
    "memory_breakdown": "memory_breakdown",
    "log_level": "log_level",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "aio_config": "aio",
    "autotp_size": "tensor_parallel.autotp_size",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "autotuning_enabled": "autotuning.enabled",
    "dataloader_drop_last": "dataloader_drop_last",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
}


def _getter(name: str, path: str) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.ds_config.get(path)

    get.__name__ = get.__qualname__ = name
    get.__doc__ = f"The resolved value of `{path}`."
    return get


class ConfigAccessors:
    """Getters of `GETTERS`, and those that combine several values.

    Args:
        config: resolved configuration.
    """

    def __init__(self, config: DeepSpeedConfig) -> None:
        self.ds_config = config

    def zero_optimization(self) -> bool:
        """Whether a stage above 0 is on."""
        return self.ds_config.zero.stage > 0

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer state rests on the host."""
        return self.ds_config.zero.offload_optimizer.device == "cpu"

    def zero_overlap_comm(self) -> bool:
        """Whether gradients travel while backward runs."""
        return self.ds_config.zero.overlap_comm is not False

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are split."""
        return self.ds_config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are split."""
        return self.ds_config.zero.stage >= 3

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale adapts."""
        return self.ds_config.fp16.enabled and self.ds_config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """The first dynamic loss scale."""
        return 2.0**self.ds_config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Arguments of `DynamicLossScaler`."""
        fp16 = self.ds_config.fp16
        return {
            "init_scale": 2.0**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def postscale_gradients(self) -> bool:
        """Whether the mean is formed after the wire."""
        return not self.ds_config.prescale_gradients


for _name, _path in GETTERS.items():
    setattr(ConfigAccessors, _name, _getter(_name, _path))
