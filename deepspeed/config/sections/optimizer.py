"""`optimizer`: the class that updates parameters, and its keyword arguments."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict

from deepspeed.config.base_model import Int, Kwargs, Section, key, later, moot

# Their class-default learning rate, for `"lr": "auto"`; every other class takes 1e-3.
DEFAULT_LR = {"adagrad": 1e-2, "lion": 1e-4}
NOT_YET = ("onebitadam", "zerooneadam", "onebitlamb", "muadam", "muadamw", "musgd")


class OptimizerParams(Section):
    """`optimizer.params`: arguments of the class; names that are not listed here are passed to it as they are."""

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
    """`optimizer`."""

    open_names = True
    type: str | None = key(None, "Adam, AdamW, Lion, Adagrad, LAMB, SGD, Muon in any case, or a class of torch.optim")
    params: Annotated[dict[str, Any], Kwargs(OptimizerParams)] = key({}, "keyword arguments of the class")
    legacy_fusion: bool = moot(False, "the old fused fp16 wrapper", "one step serves every precision")
