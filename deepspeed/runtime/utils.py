"""Old address of small tools for training scripts."""

from __future__ import annotations

from deepspeed.accelerator.instruments import empty_cache, get_ma_status, memory_status, see_memory_usage
from deepspeed.comm.collectives.partitioned_tensor import PartitionedTensor
from deepspeed.foundation.partition import partition_balanced, partition_uniform
from deepspeed.foundation.script_helpers import (
    DummyOptim,
    call_to_str,
    ensure_directory_exists,
    move_to_device,
    noop_decorator,
    set_random_seed,
)
from deepspeed.optim.grad_norm import CheckOverflow, clip_grad_norm_, get_global_norm, get_grad_norm

__all__ = [
    "CheckOverflow",
    "DummyOptim",
    "PartitionedTensor",
    "call_to_str",
    "clip_grad_norm_",
    "empty_cache",
    "ensure_directory_exists",
    "get_global_norm",
    "get_grad_norm",
    "get_ma_status",
    "memory_status",
    "move_to_device",
    "noop_decorator",
    "partition_balanced",
    "partition_uniform",
    "see_memory_usage",
    "set_random_seed",
]
