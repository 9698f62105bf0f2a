"""Old address of the groups by parallel dimension: data parallelism spans the world, the others have one rank."""

from __future__ import annotations

from deepspeed.comm import get_rank, get_world_group, get_world_size
from deepspeed.comm.alone import get_own_group, get_own_rank, get_own_world_size

_get_data_parallel_group = get_data_parallel_group = get_world_group
_get_data_parallel_rank = get_data_parallel_rank = get_rank
_get_data_parallel_world_size = get_data_parallel_world_size = get_world_size

_get_sequence_data_parallel_group = get_sequence_data_parallel_group = get_world_group
_get_sequence_data_parallel_rank = get_sequence_data_parallel_rank = get_rank
_get_sequence_data_parallel_world_size = get_sequence_data_parallel_world_size = get_world_size

_get_model_parallel_group = get_model_parallel_group = get_own_group
_get_model_parallel_rank = get_model_parallel_rank = get_own_rank
_get_model_parallel_world_size = get_model_parallel_world_size = get_own_world_size

_get_tensor_model_parallel_group = get_tensor_model_parallel_group = get_own_group
_get_tensor_model_parallel_rank = get_tensor_model_parallel_rank = get_own_rank
_get_tensor_model_parallel_world_size = get_tensor_model_parallel_world_size = get_own_world_size

_get_sequence_parallel_group = get_sequence_parallel_group = get_own_group
_get_sequence_parallel_rank = get_sequence_parallel_rank = get_own_rank
_get_sequence_parallel_world_size = get_sequence_parallel_world_size = get_own_world_size
