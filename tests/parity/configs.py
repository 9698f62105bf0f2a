"""Configurations of the tests: a stage, a precision, and sharding that is real on a small model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

PRECISION_BLOCKS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 5, "hysteresis": 2}},
}


LIMIT_KEYS = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
_freed: list[bool] = []  # while the limits are 0 whatever a test asks for


def everything_freed(run: Callable[..., Any], *args: Any) -> Any:
    """`run(*args)`, with persistence, live, reuse and prefetch limits of 0 in every stage-3 configuration it makes."""
    _freed.append(True)
    try:
        return run(*args)
    finally:
        _freed.pop()


def limits_of_zero() -> dict[str, Any]:
    """The entries of `zero_optimization` that free everything at once, inside `everything_freed`; else none."""
    return dict.fromkeys((*LIMIT_KEYS, "stage3_param_persistence_threshold"), 0) if _freed else {}


def two_groups(model: nn.Module) -> int:
    """Elements in the two largest groups: entries of module lists, and what modules outside of them own."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = [sum(p.numel() for p in block.parameters()) for entries in lists for block in entries]
    inside = {p for entries in lists for p in entries.parameters()}
    outside = [p.numel() for p in model.parameters() if p not in inside]
    return sum(sorted([*blocks, *outside])[-2:])


def config(
    stage: int,
    model: nn.Module,
    precision: str = "fp32",
    accumulation: int = 1,
    clip: float = 0.0,
    sharded: bool = True,
    zero: dict[str, Any] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """A configuration as a user would write it.

    Args:
        stage: 0 to 3.
        model: its sizes give the stage-3 limits.
        precision: a key of `PRECISION_BLOCKS`.
        accumulation: micro-batches per step.
        clip: largest gradient norm; 0 leaves the key out.
        sharded: at stage 3, persistence threshold 0 and live, reuse and prefetch limits of two groups; else defaults.
        zero: more entries of `zero_optimization`.
        extra: more top-level entries.
    """
    block: dict[str, Any] = {"stage": stage}
    if stage == 3 and sharded:
        block["stage3_param_persistence_threshold"] = 0
        block |= dict.fromkeys(LIMIT_KEYS, two_groups(model))
    if stage == 3:
        block |= limits_of_zero()
    entries: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": block | (zero or {}),
        **PRECISION_BLOCKS[precision],
        **extra,
    }
    if clip:
        entries["gradient_clipping"] = clip
    return entries
