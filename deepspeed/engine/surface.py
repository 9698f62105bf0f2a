"""The engine's public names that its components carry out: one line each, no logic.

What a name does is documented where it is done; `help(engine.save_checkpoint)` shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from deepspeed.engine.accessors import MeshAccessors, StateAccessors
from deepspeed.engine.checkpoint_io import CheckpointIO
from deepspeed.engine.compressing import Compressing
from deepspeed.engine.config_accessors import GETTERS, ConfigAccessors
from deepspeed.engine.feeding import Feeding
from deepspeed.engine.instruments import Instruments
from deepspeed.engine.offload_states import OffloadStates
from deepspeed.engine.state import EngineState
from deepspeed.engine.weights_io import WeightsIO

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C")


def by(part: str, method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that the component under `part` carries out, with its signature and documentation."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, part), *args, **kwargs)

    return call


def read(part: str, of: Any) -> Any:
    """A property that the component under `part` answers."""
    return property(lambda self: of.fget(getattr(self, part)), doc=of.__doc__)


def shared(name: str) -> Any:
    """A field of `EngineState`, which users may set too."""

    def put(self: Any, value: Any) -> None:
        setattr(self._state, name, value)

    return property(lambda self: getattr(self._state, name), put, doc=f"See `EngineState.{name}`.")


class EngineSurface:
    """What an engine's components answer and do, under the engine's name."""

    _state: EngineState

    ds_config, basic_optimizer, mpu, timers = map(shared, ("ds_config", "basic_optimizer", "mpu", "timers"))
    lr_scheduler, training_dataloader = shared("lr_scheduler"), shared("training_dataloader")
    global_steps, micro_steps = shared("global_steps"), shared("micro_steps")
    global_samples, skipped_steps = shared("global_samples"), shared("skipped_steps")
    device, compression = shared("device"), shared("compression")
    _components, _axes, _window = shared("components"), shared("axes"), shared("window")

    config = read("_facts", StateAccessors.config)
    mesh = read("_mesh", MeshAccessors.mesh)
    world_size = read("_mesh", MeshAccessors.world_size)
    dp_world_size = read("_mesh", MeshAccessors.dp_world_size)
    seq_dp_world_size = read("_mesh", MeshAccessors.seq_dp_world_size)
    mp_world_size = read("_mesh", MeshAccessors.mp_world_size)
    sequence_parallel_size = read("_mesh", MeshAccessors.sequence_parallel_size)
    global_rank = read("_mesh", MeshAccessors.global_rank)
    local_rank = read("_mesh", MeshAccessors.local_rank)
    data_parallel_group = read("_mesh", MeshAccessors.data_parallel_group)
    inside_no_sync_ctxt = read("_facts", StateAccessors.inside_no_sync_ctxt)
    param_names = read("_facts", StateAccessors.param_names)
    communication_data_type = read("_facts", StateAccessors.communication_data_type)
    train_batch_size = by("_facts", StateAccessors.train_batch_size)
    train_micro_batch_size_per_gpu = by("_facts", StateAccessors.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = by("_facts", StateAccessors.gradient_accumulation_steps)
    get_batch_info = by("_facts", StateAccessors.get_batch_info)
    get_lr = by("_facts", StateAccessors.get_lr)
    get_mom = by("_facts", StateAccessors.get_mom)
    get_type = by("_facts", StateAccessors.get_type)
    get_global_grad_norm = by("_facts", StateAccessors.get_global_grad_norm)
    loss_scale = by("_facts", StateAccessors.loss_scale)
    get_data_types = by("_facts", StateAccessors.get_data_types)
    get_wall_clock_timers = by("_instruments", Instruments.get_wall_clock_timers)
    get_data_parallel_rank = by("_mesh", MeshAccessors.get_data_parallel_rank)
    get_model_parallel_rank = by("_mesh", MeshAccessors.get_model_parallel_rank)
    get_sequence_parallel_group = by("_mesh", MeshAccessors.get_sequence_parallel_group)
    get_tensor_parallel_rank = by("_mesh", MeshAccessors.get_tensor_parallel_rank)
    torch_autocast_dtype = by("_facts", StateAccessors.torch_autocast_dtype)
    state_bytes = by("_facts", StateAccessors.state_bytes)
    zero_report = by("_facts", StateAccessors.zero_report)

    zero_optimization = by("_settings", ConfigAccessors.zero_optimization)
    zero_cpu_offload = by("_settings", ConfigAccessors.zero_cpu_offload)
    zero_overlap_comm = by("_settings", ConfigAccessors.zero_overlap_comm)
    zero_optimization_partition_gradients = by("_settings", ConfigAccessors.zero_optimization_partition_gradients)
    zero_optimization_partition_weights = by("_settings", ConfigAccessors.zero_optimization_partition_weights)
    dynamic_loss_scale = by("_settings", ConfigAccessors.dynamic_loss_scale)
    initial_dynamic_scale = by("_settings", ConfigAccessors.initial_dynamic_scale)
    dynamic_loss_scale_args = by("_settings", ConfigAccessors.dynamic_loss_scale_args)
    postscale_gradients = by("_settings", ConfigAccessors.postscale_gradients)

    deepspeed_io = by("_feeding", Feeding.deepspeed_io)
    loop = by("_feeding", Feeding.loop)

    offload_states = by("_offload", OffloadStates.offload_states)
    reload_states = by("_offload", OffloadStates.reload_states)

    monitor = read("_instruments", Instruments.monitor)
    tput_timer = property(lambda self: self._instruments.throughput, doc="See `Instruments.throughput`.")
    flops_profiler = read("_instruments", Instruments.flops_profiler)
    memory_by_category = by("_instruments", Instruments.memory_by_category)
    timeline = read("_instruments", Instruments.timeline)
    gradient_norms = by("_instruments", Instruments.gradient_norms)

    compression_scheduler = read("_compressing", Compressing.compression_scheduler)
    set_teacher = by("_compressing", Compressing.set_teacher)
    export_compressed = by("_compressing", Compressing.export_compressed)

    save_checkpoint = by("_checkpoints", CheckpointIO.save_checkpoint)
    load_checkpoint = by("_checkpoints", CheckpointIO.load_checkpoint)
    wait_for_checkpoint = by("_checkpoints", CheckpointIO.wait_for_checkpoint)
    register_for_checkpointing = by("_checkpoints", CheckpointIO.register_for_checkpointing)

    save_16bit_model = save_fp16_model = by("_weights", WeightsIO.save_16bit_model)
    module_state_dict = by("_weights", WeightsIO.module_state_dict)
    load_module_state_dict = by("_weights", WeightsIO.load_module_state_dict)
    load_state_dict = by("_weights", WeightsIO.load_state_dict)
    load_pretrained = by("_weights", WeightsIO.load_pretrained)
    _consolidated_16bit_state_dict = by("_weights", WeightsIO._consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = by("_weights", WeightsIO._zero3_consolidated_16bit_state_dict)


for _name in GETTERS:
    setattr(EngineSurface, _name, by("_settings", getattr(ConfigAccessors, _name)))
