"""`optimizer`, `scheduler`: the class that updates parameters, the learning-rate schedule, and their arguments."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict

from deepspeed.config.base_model import Int, Kwargs, NumberOrList, Section, key, later, moot

# Their class-default learning rate, for `"lr": "auto"`; every other class takes 1e-3.
DEFAULT_LR = {"adagrad": 1e-2, "lion": 1e-4}


class OptimizerParams(Section):
    """Block `optimizer.params`: arguments of the optimizer class; unlisted names are passed to the class unchecked."""

    model_config = ConfigDict(extra="allow")
    lr: float = key(1e-3, "learning rate", ge=0)
    betas: list[float] = key([0.9, 0.999], "decay rates of the moments", min_length=2, max_length=3)
    eps: float | list[float | None] = key(1e-8, "added to the denominator; a pair for Adafactor")
    weight_decay: float = key(0.0, "weight decay; the default is the class's own", ge=0)
    bias_correction: bool = key(True, "correct the moments' start at zero (Adam, LAMB)")
    amsgrad: bool = key(False, "keep the largest second moment (Adam)")
    adam_w_mode: bool = key(True, "for Adam: decoupled weight decay unless false")
    momentum: float = key(0.95, "momentum (Muon, SGD); the default is the class's own", ge=0)
    muon_lr: float = key(1e-3, "learning rate of the matrices (Muon); default lr", ge=0)
    adam_lr: float = key(1e-3, "learning rate of everything else (Muon); default lr", ge=0)
    ns_method: str = key("gram", "Newton-Schulz iteration (Muon): gram or standard")
    max_coeff: float = key(10.0, "largest trust ratio (LAMB)", ge=0)
    min_coeff: float = key(0.01, "smallest trust ratio (LAMB)", ge=0)
    eps_inside_sqrt: bool = key(False, "add eps inside the square root (LAMB)")
    foreach: bool = key(False, "passed to torch's class")
    torch_adam: bool = key(False, "torch's own class rather than the fused one (Adam)")
    fp32_optimizer_states: bool = key(True, "fp32 moments with offload, also where fp16 or bf16 is updated")
    per_head_muon: bool | dict[str, Any] | None = later(None, "Muon per attention head", idle=[False])
    freeze_step: Int = later(100000, "warm-up steps (1-bit Adam, 1-bit LAMB)")
    cuda_aware: bool = later(False, "CUDA-aware MPI (1-bit)")
    comm_backend_name: str = later("nccl", "transport (1-bit)")
    var_freeze_step: Int = later(100000, "steps until the variance is frozen (0/1 Adam)")
    var_update_scaler: Int = later(16, "interval of variance updates (0/1 Adam)")
    local_step_scaler: Int = later(32678, "interval of local steps (0/1 Adam)")
    local_step_clipper: Int = later(16, "largest interval of local steps (0/1 Adam)")
    coeff_beta: float = later(0.9, "moving average of the trust ratio (1-bit LAMB)")
    factor_max: float = later(4.0, "largest scaling factor (1-bit LAMB)")
    factor_min: float = later(0.5, "smallest scaling factor (1-bit LAMB)")
    factor_threshold: float = later(0.1, "largest change of the scaling factor (1-bit LAMB)")


class Optimizer(Section):
    open_names = True
    type: str | None = key(None, "Adam, AdamW, Lion, Adagrad, LAMB, SGD, Muon in any case, or a class of torch.optim")
    params: Annotated[dict[str, Any], Kwargs(OptimizerParams)] = key({}, "keyword arguments of the class")
    legacy_fusion: bool = moot(False, "the old fused fp16 wrapper", "one step serves every precision")


_WARMUP = {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration"}
_TEST = {f"lr_range_test_{name}" for name in ("min_lr", "step_size", "step_rate", "staircase")}
_CYCLE = {
    "cycle_min_lr", "cycle_max_lr", "decay_lr_rate", "cycle_first_step_size", "cycle_second_step_size",
    "cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size", "cycle_momentum", "cycle_min_mom",
    "cycle_max_mom", "decay_mom_rate",
}  # fmt: skip
# What each schedule takes; any other type is a class of torch and checks its own arguments.
ARGUMENTS = {
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": _WARMUP | {"total_num_steps"},
    "WarmupCosineLR": {
        "total_num_steps", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type",
        "last_batch_iteration",
    },
    "LRRangeTest": _TEST | {"last_batch_iteration"},
    "OneCycle": _CYCLE | {"last_batch_iteration"},
}  # fmt: skip
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


class SchedulerParams(Section):
    """Block `scheduler.params`: arguments of the schedule; for a torch class, unlisted names are unchecked."""

    model_config = ConfigDict(extra="allow")
    warmup_min_lr: NumberOrList = key(0.0, "learning rate at the start (WarmupLR, WarmupDecayLR)")
    warmup_max_lr: NumberOrList = key(1e-3, "learning rate after warm-up (WarmupLR, WarmupDecayLR)")
    warmup_num_steps: Int = key(1000, "steps of warm-up; 0: none", ge=0)
    warmup_type: str = key("log", "log or linear")
    total_num_steps: Int | None = key(None, "steps of the whole run (WarmupDecayLR, WarmupCosineLR)", ge=1)
    last_batch_iteration: Int = key(-1, "step to start from", ge=-1)
    warmup_min_ratio: float = key(0.0, "share of the learning rate at the start (WarmupCosineLR)", ge=0)
    cos_min_ratio: float = key(1e-4, "share of the learning rate at the end (WarmupCosineLR)", ge=0)
    lr_range_test_min_lr: NumberOrList = key(1e-3, "learning rate at the start (LRRangeTest)")
    lr_range_test_step_size: Int = key(2000, "steps per increase (LRRangeTest)", ge=1)
    lr_range_test_step_rate: float = key(1.0, "increase per interval (LRRangeTest)")
    lr_range_test_staircase: bool = key(False, "increase in stairs (LRRangeTest)")
    cycle_min_lr: NumberOrList | None = key(None, "lowest learning rate (OneCycle)")
    cycle_max_lr: NumberOrList | None = key(None, "highest learning rate (OneCycle)")
    decay_lr_rate: float = key(0.0, "decay after the cycle (OneCycle)", ge=0)
    cycle_first_step_size: Int = key(2000, "steps of the first half (OneCycle)", ge=1)
    cycle_second_step_size: Int | None = key(None, "steps of the second half; default as the first (OneCycle)", ge=1)
    cycle_first_stair_count: Int = key(0, "stairs of the first half (OneCycle)", ge=0)
    cycle_second_stair_count: Int | None = key(None, "stairs of the second half; default as the first", ge=0)
    decay_step_size: Int = key(0, "steps per decay after the cycle (OneCycle)", ge=0)
    cycle_momentum: bool = key(True, "cycle momentum as well (OneCycle)")
    cycle_min_mom: float = key(0.8, "lowest momentum (OneCycle)", ge=0)
    cycle_max_mom: float = key(0.9, "highest momentum (OneCycle)", ge=0)
    decay_mom_rate: float = key(0.0, "decay of momentum after the cycle (OneCycle)", ge=0)


class SchedulerConfig(Section):
    open_names = True
    type: str | None = key(
        None, "WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle, or a class of torch.optim.lr_scheduler"
    )
    params: Annotated[dict[str, Any], Kwargs(SchedulerParams)] = key({}, "keyword arguments of the schedule")
