"""`fp16`, `bf16`, `torch_autocast`, `data_types`, `amp`: the dtypes of a training run."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.base_model import Dtype, Int, LowDtype, Names, Section, key, later, moot


class FP16(Section):
    """Block `fp16`: fp16 parameters with a loss scale."""

    enabled: bool = key(False, "fp16 parameters, fp32 master weights, loss scaling")
    auto_cast: bool = moot(False, "cast floating inputs to fp16", "the top-level auto_cast, on by default")
    loss_scale: float = key(0.0, "static loss scale; 0 is dynamic", ge=0)
    initial_scale_power: Int = key(16, "the first dynamic scale is 2 to this power", ge=0, le=127)
    loss_scale_window: Int = key(1000, "steps without overflow before the scale doubles", ge=1)
    hysteresis: Int = key(2, "overflows tolerated before the scale halves", ge=1)
    consecutive_hysteresis: bool = key(False, "every good step restores the hysteresis")
    min_loss_scale: float = key(1.0, "the scale never falls below", ge=0)
    fp16_master_weights_and_grads: bool = key(False, "update fp16 parameters directly, from fp16 gradient sums")


class BF16(Section):
    """Block `bf16` (alias `bfloat16`): bf16 parameters."""

    enabled: bool = key(False, "bf16 parameters, fp32 master weights")
    check_grad_overflow: bool = key(True, "skip the step when a gradient is not finite")
    immediate_grad_update: bool = moot(
        False, "accumulate as soon as a gradient is ready", "gradients enter the fp32 accumulator as they arrive"
    )
    bf16_master_weights_and_grads: bool = key(False, "update bf16 parameters directly, from bf16 gradient sums")
    bf16_optimizer_states: bool = key(
        False, "bf16 moments of the JSON's optimizer with offload; needs bf16_master_weights_and_grads"
    )


class TorchAutocast(Section):
    """Block `torch_autocast`: forward under torch.autocast, without a cast of the parameters."""

    open_names = True
    enabled: bool = key(False, "run forward under torch.autocast")
    dtype: LowDtype = key("bf16", "the autocast dtype")
    lower_precision_safe_modules: Names | None = moot(
        None, "classes whose parameters may travel in the autocast dtype", "communication_data_type decides for all"
    )


class DataTypes(Section):
    """Block `data_types`: dtypes besides the compute dtype."""

    open_names = True
    grad_accum_dtype: Dtype = key("fp32", "dtype in which gradients are summed over micro-batches")
    keep_in_fp32_modules: Names | Literal["auto"] = key(
        "auto", "modules that stay fp32; auto: those whose kernels pair buffers with parameters, and the model's list"
    )
    param_dtype: Dtype | None = later(None, "dtype of parameters, apart from fp16 and bf16")
    buffer_dtype: Dtype | None = key(
        None, "dtype of floating buffers, but of modules that stay fp32; null: as the model has them"
    )


class Amp(Section):
    """Block `amp`: NVIDIA Apex, which is replaced by torch's autocast."""

    enabled: bool = moot(False, "mixed precision by NVIDIA Apex", "torch_autocast runs, with one warning")
    opt_level: Literal["O0", "O1", "O2", "O3"] | None = moot(
        None, "Apex's optimization level", "O0 is fp32, all others are torch_autocast"
    )
