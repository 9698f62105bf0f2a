"""`aio`, `activation_checkpointing`, `compile`: memory traded for time or for another device."""

from __future__ import annotations

from deepspeed.config.fields import Int, Names, Section, later, moot

_NO_NVME = "read only when state rests on NVMe"


class Aio(Section):
    """`aio`: how files on NVMe are read and written."""

    block_size: Int = moot(1048576, "bytes per request", _NO_NVME, ge=1)
    queue_depth: Int = moot(8, "requests in flight", _NO_NVME, ge=1)
    intra_op_parallelism: Int = moot(1, "threads per request", _NO_NVME, aliases=["thread_count"], ge=1)
    single_submit: bool = moot(False, "one request per submission", _NO_NVME)
    overlap_events: bool = moot(True, "submit while waiting", _NO_NVME)
    use_gds: bool = later(False, "GPUDirect Storage")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`: recompute activations in backward."""

    enabled: bool = later(False, "recompute the repeated blocks of the model in backward")
    partition_activations: bool = later(False, "split saved inputs over model-parallel ranks")
    cpu_checkpointing: bool = later(False, "keep saved inputs on the host")
    contiguous_memory_optimization: bool = later(False, "keep saved inputs in one buffer")
    number_checkpoints: Int | None = moot(None, "checkpoints in the buffer", "counted from the model", ge=0)
    synchronize_checkpoint_boundary: bool = later(False, "wait for the device at each checkpoint")
    profile: bool = later(False, "time each checkpoint")


class Compile(Section):
    """`compile`: whole-graph compilation."""

    deepcompile: bool = later(False, "plan communication on the compiled graph")
    autoep_non_moe: bool = later(False, "compile around expert-parallel layers")
    free_activation: bool = later(False, "free activations early")
    free_activation_threshold: Int = later(10 * 1024**2, "bytes from which activations are freed", ge=0)
    offload_activation: bool = later(False, "move activations to the host")
    offload_activation_pin_memory: bool = later(True, "page-locked host memory")
    offload_opt_states: bool = later(False, "move optimizer state to the host")
    offload_parameters: bool = later(False, "move parameters to the host")
    double_buffer: bool = later(True, "two reduction buffers")
    symmetric_memory: bool = later(False, "symmetric memory for collectives")
    debug_log: bool = later(False, "log the passes")
    sync_before_reduce: bool = later(False, "wait before a reduction")
    sync_after_reduce: bool = later(False, "wait after a reduction")
    sync_before_allgather: bool = later(False, "wait before a gather")
    sync_after_allgather: bool = later(False, "wait after a gather")
    keep_int_input_tensors: bool = later(True, "keep integer inputs alive")
    keep_all_input_tensors: bool = later(False, "keep all inputs alive")
    passes: Names | None = later(None, "passes to run", idle=[[]])
