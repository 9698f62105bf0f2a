"""Old address of the groups by parallel dimension: what the mesh of the newest engine answers."""

from __future__ import annotations

from deepspeed.comm.process_groups.mesh import ask_current

_get_data_parallel_group = get_data_parallel_group = ask_current("data_parallel", "group")
_get_data_parallel_rank = get_data_parallel_rank = ask_current("data_parallel", "rank")
_get_data_parallel_world_size = get_data_parallel_world_size = ask_current("data_parallel", "world_size")

_get_sequence_data_parallel_group = get_sequence_data_parallel_group = ask_current("sequence_data_parallel", "group")
_get_sequence_data_parallel_rank = get_sequence_data_parallel_rank = ask_current("sequence_data_parallel", "rank")
_get_sequence_data_parallel_world_size = get_sequence_data_parallel_world_size = ask_current(
    "sequence_data_parallel", "world_size"
)

_get_model_parallel_group = get_model_parallel_group = ask_current("model_parallel", "group")
_get_model_parallel_rank = get_model_parallel_rank = ask_current("model_parallel", "rank")
_get_model_parallel_world_size = get_model_parallel_world_size = ask_current("model_parallel", "world_size")

_get_tensor_model_parallel_group = get_tensor_model_parallel_group = ask_current("tensor_model_parallel", "group")
_get_tensor_model_parallel_rank = get_tensor_model_parallel_rank = ask_current("tensor_model_parallel", "rank")
_get_tensor_model_parallel_world_size = get_tensor_model_parallel_world_size = ask_current(
    "tensor_model_parallel", "world_size"
)

_get_sequence_parallel_group = get_sequence_parallel_group = ask_current("sequence_parallel", "group")
_get_sequence_parallel_rank = get_sequence_parallel_rank = ask_current("sequence_parallel", "rank")
_get_sequence_parallel_world_size = get_sequence_parallel_world_size = ask_current("sequence_parallel", "world_size")
