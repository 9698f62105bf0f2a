"""Read-only accessors of an engine, as mixins: ranks, batch sizes, learning rates, bytes and configuration values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm.process_groups.axis import get_own_group, has_group
from deepspeed.comm.process_groups.mesh import MODEL, Mesh
from deepspeed.comm.process_groups.process_group import get_local_rank
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.offload_plan import accumulator_dtype
from deepspeed.engine.state_size import state_bytes
from deepspeed.optim.precision import DTYPES


class MeshAccessors:
    """Ranks and process groups of an engine."""

    _state: EngineState

    @property
    def mesh(self) -> Mesh:
        """Return the device mesh: the coordinates of all ranks."""
        return self._state.axes.mesh

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the run."""
        return self._state.axes.mesh.world

    @property
    def dp_world_size(self) -> int:
        """Return the number of data-parallel ranks, which train on different samples."""
        return self._state.axes.data.size

    @property
    def seq_dp_world_size(self) -> int:
        """Return the number of ranks with the same model slice: data-parallel times sequence-parallel ranks."""
        return self._state.axes.dp_sp_group.size

    @property
    def mp_world_size(self) -> int:
        """Return the number of ranks that together have one copy of the model: pipeline times tensor-parallel ranks."""
        return self._state.axes.mesh.size(*MODEL)

    @property
    def sequence_parallel_size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self._state.axes.mesh.size("sp")

    @property
    def global_rank(self) -> int:
        """Return the global rank of this process."""
        return self._state.axes.mesh.rank

    @property
    def local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return get_local_rank()

    @property
    def data_parallel_group(self) -> Any:
        """Return the process group of the data-parallel ranks; None without any process group."""
        group = self._state.axes.data.group
        return get_own_group() if group is None and has_group() else group

    def get_data_parallel_rank(self) -> int:
        """Return this rank's position among the data-parallel ranks."""
        return self._state.axes.data.rank

    def get_model_parallel_rank(self) -> int:
        """Return this rank's position among the ranks that together have one copy of the model."""
        return self._state.axes.mesh.axis(*MODEL).rank

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's position among the tensor-parallel ranks, which have slices of the same matrices."""
        return self._state.axes.mesh.axis("tp").rank

    def get_sequence_parallel_group(self) -> Any:
        """Return the process group of the ranks that share sequences with this one."""
        return self._state.axes.mesh.get_sequence_parallel_group()


class StateAccessors:
    """Batch sizes, learning rates, loss scale and memory figures of an engine."""

    _state: EngineState

    @property
    def config(self) -> Any:
        """Return the user's configuration as a dict, without defaults."""
        return self._state.ds_config.raw

    def train_batch_size(self) -> int:
        """Return the samples per update, over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self._state.window.steps * self._state.axes.data.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per rank and micro-batch."""
        return self._state.window.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per update."""
        return self._state.window.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self._state.window.steps

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Return whether a `no_sync` context is open."""
        return self._state.window.holding

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """Return the name of every parameter of the module, by parameter."""
        return {param: name for name, param in self._state.module.named_parameters()}

    def get_lr(self) -> list[float]:
        """Return the learning rate of each optimizer group; [] without an optimizer."""
        optimizer = self._state.basic_optimizer
        return [] if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Return the betas, else the momentum, else None, of each optimizer group; [] without an optimizer."""
        optimizer = self._state.basic_optimizer
        return [] if optimizer is None else [g.get("betas", g.get("momentum")) for g in optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """Return the `type` entry of each optimizer group, None for groups without one; [] without an optimizer."""
        optimizer = self._state.basic_optimizer
        return [] if optimizer is None else [group.get("type") for group in optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of all gradients of the last update, before clipping.

        Infinity if fp16 gradients overflowed; None before the first update, without an optimizer, or if no norm was
        needed (`compute_grad_norm: false`).
        """
        return None if self._state.components.optimizer is None else self._state.components.optimizer._global_grad_norm

    def loss_scale(self) -> float:
        """Return the factor by which losses are multiplied under fp16; 1 otherwise."""
        return self._state.window.loss_scale

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the compute dtype of parameters, and the dtype of gradient accumulators."""
        return self._state.components.dtype, accumulator_dtype(self._state.ds_config)

    @property
    def communication_data_type(self) -> torch.dtype:
        """Return the dtype of gradients in messages: that of the JSON's key, else the compute dtype.

        Without the key, gradients that are summed over micro-batches before the message have the accumulators' dtype.
        """
        name = self._state.ds_config.communication_data_type or ""
        return DTYPES.get(name, self._state.components.dtype)

    def torch_autocast_dtype(self) -> torch.dtype:
        """Return the dtype that `torch_autocast` of the JSON selects, also if autocast is disabled."""
        return DTYPES[self._state.ds_config.torch_autocast.dtype]

    def state_bytes(self) -> dict[str, int]:
        """Return this rank's bytes by kind: parameters, masters, gradients, optimizer and gathered (buffers)."""
        return state_bytes(self._state.components)

    def zero_report(self) -> dict[str, int]:
        """Return statistics of stage 3, all 0 at other stages.

        Returns:
            "live" and "peak" (gathered elements now and at most), "gathers" (their number), "late" (gathers that were
            not prefetched although the order of modules was known) and "groups" (number of sharded groups).
        """
        lifecycle = self._state.components.lifecycle
        if lifecycle is None:
            return {"live": 0, "peak": 0, "gathers": 0, "late": 0, "groups": 0}
        prefetch = lifecycle.prefetcher
        counts = {"live": prefetch.live(), "peak": prefetch.peak, "gathers": prefetch.gathers}
        return {**counts, "late": prefetch.late, "groups": len(prefetch.groups)}


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
    """Getters of configuration values: one for each entry of `GETTERS`, and some that derive a value."""

    ds_config: DeepSpeedConfig

    def zero_optimization(self) -> bool:
        """Return whether a ZeRO stage above 0 is set."""
        return self.ds_config.zero.stage > 0

    def zero_cpu_offload(self) -> bool:
        """Return whether optimizer state is offloaded to host memory."""
        return self.ds_config.zero.offload_optimizer.device == "cpu"

    def zero_overlap_comm(self) -> bool:
        """Return whether gradients are reduced during backward."""
        return self.ds_config.zero.overlap_comm is not False

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded (ZeRO stages 2 and 3)."""
        return self.ds_config.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded (ZeRO stage 3)."""
        return self.ds_config.zero.stage >= 3

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return self.ds_config.fp16.enabled and self.ds_config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """Return the initial loss scale of dynamic scaling, 2 ** `fp16.initial_scale_power`."""
        return 2.0**self.ds_config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Return the settings of dynamic loss scaling, as arguments of `DynamicLossScaler`."""
        fp16 = self.ds_config.fp16
        return {
            "init_scale": 2.0**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def postscale_gradients(self) -> bool:
        """Return whether `prescale_gradients` is off."""
        return not self.ds_config.prescale_gradients


for _name, _path in GETTERS.items():
    setattr(ConfigAccessors, _name, _getter(_name, _path))
