"""What to change when something limits the step, by category."""

from __future__ import annotations

from deepspeed.foundation.recorder import BACKWARD, COPY, DISK, FORWARD, LOADER, RECOMPUTE, SAVE, STEP, UPDATE
from deepspeed.profiling.timeline.pieces import COMMUNICATION, OUTSIDE, WAITING

ADVICE = {
    FORWARD: "the model computes; a larger train_micro_batch_size_per_gpu or a lower precision (bf16) uses it better",
    BACKWARD: "the model computes; a larger train_micro_batch_size_per_gpu or a lower precision (bf16) uses it better",
    RECOMPUTE: "activation_checkpointing computes forward twice; recompute fewer blocks, if memory allows",
    UPDATE: "the optimizer: fused or native kernels, offload_optimizer.device none, "
    "or more gradient_accumulation_steps",
    STEP: "agreement, norm and rounding around the update: more gradient_accumulation_steps makes them rarer",
    COMMUNICATION: "messages: zero_optimization.overlap_comm true, a larger reduce_bucket_size or (stage 3) "
    "stage3_prefetch_bucket_size and stage3_max_live_parameters, or more gradient_accumulation_steps",
    WAITING: "ranks wait for each other in turns: see that their batches are of one size",
    DISK: "nvme: offload to cpu if it fits, or offload_optimizer.pipeline_read and pipeline_write true, a larger "
    "buffer_count, and aio as ds_nvme_tune measures it",
    COPY: "copies between host and device: offload less, or pin_memory true",
    LOADER: "the loader: more num_local_io_workers of deepspeed_io, or prepare the data ahead",
    SAVE: "saving: checkpoint.async_save true, or save less often",
    OUTSIDE: "time outside of the engine, between its calls: the script itself, or a loader that is not the engine's",
}
