"""`aio`, `activation_checkpointing`, `compile`: keys for NVMe files, recomputation and compilation."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from deepspeed.config.base_model import Int, Names, Section, key, later, moot

_GRAPHS = "communication runs between compiled graphs, not in them"
_FREED = "autograd frees what a compiled graph has saved as its backward ends, as torch.compile does elsewhere"
_OWN_THREAD = "every request in flight has its own thread and is submitted when that one is free"


class Aio(Section):
    """Block `aio`: access to NVMe files; up to `queue_depth` x `intra_op_parallelism` requests are pending."""

    open_names = True
    block_size: Int = key(1048576, "bytes per request", ge=1)
    queue_depth: Int = key(8, "requests in flight per thread of a transfer", ge=1)
    intra_op_parallelism: Int = key(1, "threads of a transfer", aliases=["thread_count"], ge=1)
    single_submit: bool = moot(False, "one request per submission", _OWN_THREAD)
    overlap_events: bool = moot(True, "submit while waiting", _OWN_THREAD)
    use_gds: bool = later(False, "GPUDirect Storage")


class ActivationCheckpointing(Section):
    """Block `activation_checkpointing`: recomputation of activations in backward."""

    open_names = True
    enabled: bool | None = key(
        None, "compute the repeated blocks of the model again in backward; null: when one of the next three is true"
    )
    partition_activations: bool = key(False, "split saved inputs over the model-parallel ranks of `mpu`")
    cpu_checkpointing: bool = key(False, "keep saved inputs on the host")
    contiguous_memory_optimization: bool = key(False, "keep saved inputs in one buffer")
    number_checkpoints: Annotated[Int | None, BeforeValidator(lambda value: value or None)] = key(
        None, "checkpoints the buffer has room for at the start; null, 0 or false: counted from the model", ge=1
    )
    synchronize_checkpoint_boundary: bool = key(False, "wait for the device around each checkpoint")
    profile: bool = key(False, "print the time of each checkpoint")


class Compile(Section):
    """Block `compile`: torch.compile of the model."""

    deepcompile: bool = key(False, "compile the model's forward with torch.compile, as engine.compile() does")
    autoep_non_moe: bool = moot(False, "compile around expert-parallel layers", _GRAPHS)
    free_activation: bool = moot(False, "free activations early", _FREED)
    free_activation_threshold: Int = moot(10 * 1024**2, "bytes from which activations are freed", _FREED)
    offload_activation: bool = later(False, "move activations to the host")
    offload_activation_pin_memory: bool = moot(
        True, "page-locked host memory", "activation_checkpointing.cpu_checkpointing moves saved inputs"
    )
    offload_opt_states: bool = later(False, "move optimizer state to the host")
    offload_parameters: bool = later(False, "move parameters to the host")
    double_buffer: bool = moot(True, "two reduction buffers", _GRAPHS)
    symmetric_memory: bool = later(False, "symmetric memory for collectives")
    debug_log: bool = moot(False, "log the passes", "TORCH_LOGS of torch logs graphs, breaks and recompilations")
    sync_before_reduce: bool = moot(False, "wait before a reduction", _GRAPHS)
    sync_after_reduce: bool = moot(False, "wait after a reduction", _GRAPHS)
    sync_before_allgather: bool = moot(False, "wait before a gather", _GRAPHS)
    sync_after_allgather: bool = moot(False, "wait after a gather", _GRAPHS)
    keep_int_input_tensors: bool = moot(True, "keep integer inputs alive", _FREED)
    keep_all_input_tensors: bool = moot(False, "keep all inputs alive", _FREED)
    passes: Names | None = later(None, "passes to run", idle=[[]])
