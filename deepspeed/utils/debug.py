"""Old address of names and prints for the search of a fault."""

from __future__ import annotations

from deepspeed.profiling.debug_names import (
    debug_clear_module_and_param_names,
    debug_extract_module_and_param_names,
    debug_module2name,
    debug_module2name_class,
    debug_module2name_id,
    debug_param2name,
    debug_param2name_id,
    debug_param2name_id_numel,
    debug_param2name_id_shape,
    debug_param2name_id_shape_device,
    debug_param2name_id_shape_status,
    ds_id,
    ds_shape,
    log_rank_file,
    print_backward_tensors,
    print_rank,
    print_rank0,
    printflock,
)

__all__ = [
    "debug_clear_module_and_param_names",
    "debug_extract_module_and_param_names",
    "debug_module2name",
    "debug_module2name_class",
    "debug_module2name_id",
    "debug_param2name",
    "debug_param2name_id",
    "debug_param2name_id_numel",
    "debug_param2name_id_shape",
    "debug_param2name_id_shape_device",
    "debug_param2name_id_shape_status",
    "ds_id",
    "ds_shape",
    "log_rank_file",
    "print_backward_tensors",
    "print_rank",
    "print_rank0",
    "printflock",
]
