"""Reasons why keys are unavailable: the feature that will add a key, or the reason of a permanent refusal."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Outlook:
    """Reason why several keys are unavailable.

    Attributes:
        patterns: JSON paths of the keys, separated by spaces; `*` matches any text.
        feature: feature that will add the keys; "" for permanently refused keys.
        reason: reason for a permanent refusal; "" for other keys.
    """

    patterns: str
    feature: str = ""
    reason: str = ""

    @property
    def text(self) -> str:
        """Text for the configuration reference and for error messages."""
        return f"not available yet: comes with {self.feature}" if self.feature else f"refused for good: {self.reason}"

    def covers(self, path: str) -> bool:
        """Return whether one of the patterns matches a path."""
        return any(fnmatchcase(path, pattern) for pattern in self.patterns.split())


_ONE_BIT = "DeepSpeed 0.19 has ended the one-bit optimizers; gradients in 16 bits are communication_data_type"
_MUP = "pass the optimizer that the package mup makes to initialize"
# types of `optimizer.type`, in lower case, that are refused for good, and why
REFUSED_OPTIMIZERS: dict[str, str] = {
    **dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), _ONE_BIT),
    **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
}

OUTLOOKS = (
    Outlook("expert_parallel.* use_data_before_expert_parallelism", "mixture of experts"),
    Outlook("zero_optimization.mics_hierarchical_params_gather", "quantized communication"),
    Outlook(
        "compile.passes", reason="communication runs between compiled graphs, so they have none that passes could move"
    ),
    Outlook("compile.offload_activation", reason="activation_checkpointing.cpu_checkpointing moves saved inputs"),
    Outlook("compile.offload_opt_states", reason="zero_optimization.offload_optimizer moves optimizer state"),
    Outlook("compile.offload_parameters", reason="zero_optimization.offload_param moves parameters"),
    Outlook("sparse_attention sparse_attention.*", "science and sparse blocks"),
    Outlook(
        "aio.use_gds graph_harvesting tensor_parallel.tp_overlap_comm compile.symmetric_memory",
        "generation and training on GPUs",
    ),
    Outlook(
        "managed_gradient_accumulation",
        reason="engine.set_gradient_accumulation_boundary lets the caller decide the boundary",
    ),
    Outlook("datastates_ckpt nebula.*", reason="asynchronous, atomic saves are built in: checkpoint.async_save"),
    Outlook(
        "optimizer.params.freeze_step optimizer.params.cuda_aware optimizer.params.comm_backend_name "
        "optimizer.params.var_* optimizer.params.local_step_* optimizer.params.coeff_beta optimizer.params.factor_*",
        reason=_ONE_BIT,
    ),
    Outlook(
        "optimizer.params.per_head_muon",
        reason="Muon orthogonalizes each parameter whole; a model that holds one parameter for each head gets the same",
    ),
    Outlook(
        "data_types.param_dtype",
        reason="fp16 and bf16 choose the dtype of parameters, and data_types.keep_in_fp32_modules the exceptions",
    ),
    Outlook(
        "zero_optimization.offload_optimizer.super_offload",
        reason="it updates before the norm of all gradients is known and rolls back; "
        "an offloaded update here begins when the norm is known",
    ),
    Outlook(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        reason="OMP_NUM_THREADS and the launcher's --bind_cores_to_rank share the cores out",
    ),
    Outlook(
        "zero_optimization.pipeline_loading_checkpoint",
        reason="each rank reads only its own slices of a checkpoint, before the first step",
    ),
    Outlook(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        reason="the state of an optimizer rests in one place; offload_optimizer.device cpu keeps Muon's in memory",
    ),
    Outlook(
        "zero_optimization.zenflow zero_optimization.zenflow.*",
        reason="updates from gradients of earlier steps do not equal torch's",
    ),
    Outlook(
        "pipeline.seed_layers pipeline.activation_checkpoint_interval",
        reason="it is an argument of PipelineModule; give it there",
    ),
    Outlook(
        "pipeline.use_reentrant",
        reason="checkpoints are never reentrant; PipelineModule(activation_checkpoint_func=…) takes another function",
    ),
    Outlook(
        "pipeline.pipe_partitioned pipeline.grad_partitioned",
        reason="stages send whole activations and gradients; PipelineModule has no such argument",
    ),
    Outlook("tensor_parallel.dtype", reason="fp16 and bf16 choose the dtype"),
    Outlook("tensor_parallel.vocab_parallel_ce_backend", reason="vocab_parallel_lm_head has one loss of its own"),
    Outlook(
        "tensor_parallel.tp.*",
        reason="autotp_size says how many ranks share a layer; an mpu with groups is an argument of initialize",
    ),
    Outlook(
        "tensor_parallel.injection_policy_tuple tensor_parallel.preset_model tensor_parallel.partition_config.*",
        reason="the plan is found from the model's own forward; layer_specs[].partition_type and plan_file change it",
    ),
    Outlook("tensor_parallel.keep_module_on_host", reason="weights are split on the device where the model holds them"),
    Outlook(
        "tensor_parallel.replace_with_kernel_inject", reason="layers that are trained keep the forward of the model"
    ),
    Outlook(
        "eigenvalue.* quantize_training.eigenvalue",
        reason="DeepSpeed 0.19 refuses it, too; quantization_period sets the periods of groups",
    ),
)


def outlook(path: str) -> str:
    """Return the text of the reason for an unavailable key, by its path in the table of keys."""
    return next(row.text for row in OUTLOOKS if row.covers(path))
