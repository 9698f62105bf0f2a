"""Resolves `"stage": "plan"` to the plan that `ds_plan` or `deepspeed --autotuning` stored."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from deepspeed.config.batch import MICRO, STEPS, TRAIN
from deepspeed.config.load import load_raw
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.foundation.log import log_once

PLAN = "plan"
VARIABLE = "DS_PLAN"
"""Names the answer's file, before the places where it is looked for."""
_ZERO, _RECOMPUTE, _TUNING = "zero_optimization", "activation_checkpointing", "autotuning"
_OF_ZERO = (
    "stage", "offload_optimizer", "offload_param", "reduce_bucket_size", "allgather_bucket_size", "mics_shard_size",
)  # fmt: skip
_TENSOR, _SLICES, _SEQUENCE = "tensor_parallel", "autotp_size", "sequence_parallel_size"
_PIPELINE, _STAGES = "pipeline", "stages"


def with_plan(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the answer in it, where its stage is "plan"; else the same object.

    Args:
        raw: as the user wrote it; it is not changed.

    Raises:
        DeepSpeedConfigError: there is no answer, it is not one, or it is for another global batch.
    """
    zero = _block(raw, _ZERO)
    if zero.get("stage") != PLAN:
        return raw
    path = _answer(raw)
    plan = load_raw(str(path))
    planned = _block(plan, _ZERO)
    if not isinstance(planned.get("stage"), int) or not all(isinstance(plan.get(key), int) for key in (MICRO, STEPS)):
        raise DeepSpeedConfigError(f"{path} is no plan: it lacks {_ZERO}.stage, {MICRO} or {STEPS} as numbers")
    _check_batch(raw, plan, path)
    config = {**raw, MICRO: plan[MICRO], STEPS: plan[STEPS]}
    config |= {TRAIN: plan[TRAIN]} if TRAIN in plan else {}
    own = {key: value for key, value in zero.items() if key not in ("offload_optimizer", "offload_param")}
    config[_ZERO] = own | {key: planned[key] for key in _OF_ZERO if key in planned}
    if _SLICES in _block(plan, _TENSOR):
        config[_TENSOR] = {**_block(raw, _TENSOR), _SLICES: _block(plan, _TENSOR)[_SLICES]}
    if _STAGES in _block(plan, _PIPELINE):
        config[_PIPELINE] = {**_block(raw, _PIPELINE), _STAGES: _block(plan, _PIPELINE)[_STAGES]}
    if _SEQUENCE in plan:
        config[_SEQUENCE] = plan[_SEQUENCE]
    if _RECOMPUTE in raw or _RECOMPUTE in plan:
        config[_RECOMPUTE] = {
            **_block(raw, _RECOMPUTE),
            "enabled": bool(_block(plan, _RECOMPUTE).get("enabled", False)),
        }
    log_once(f'"stage": "plan" takes {path}: stage {planned["stage"]}, micro-batch {plan[MICRO]} x {plan[STEPS]}')
    return config


def _block(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    block = raw.get(name)
    return dict(cast("Mapping[str, Any]", block)) if isinstance(block, Mapping) else {}


def _answer(raw: Mapping[str, Any]) -> Path:
    results = str(_block(raw, _TUNING).get("results_dir") or "autotuning_results")
    named = os.environ.get(VARIABLE)
    places = [Path(named)] if named else [Path(results, "ds_config_optimal.json"), Path("ds_plan.json")]
    for place in places:
        if place.is_file():
            return place
    raise DeepSpeedConfigError(
        f'{_ZERO}.stage = "plan", and there is no plan: {" and ".join(map(str, places))} looked for in {Path.cwd()}. '
        f"Run `ds_plan` or `deepspeed --autotuning tune` first, or name its file in {VARIABLE}"
    )


def _same_samples(raw: Mapping[str, Any]) -> int:
    """Ranks that are given the same samples, as far as these keys say."""
    sizes = _block(raw, _TENSOR).get(_SLICES), raw.get(_SEQUENCE), _block(raw, _PIPELINE).get(_STAGES)
    return math.prod(size for size in sizes if isinstance(size, int) and size > 1)


def _check_batch(raw: Mapping[str, Any], plan: Mapping[str, Any], path: Path) -> None:
    """The global batch stays: what the user says of it is what was planned for."""
    pairs = [("train_batch_size", raw.get(TRAIN), plan.get(TRAIN))]
    if isinstance(raw.get(MICRO), int) and isinstance(raw.get(STEPS), int):
        share = _same_samples(plan) / _same_samples(raw)  # ranks that share samples take more of them together
        pairs.append((f"{MICRO} x {STEPS}", raw[MICRO] * raw[STEPS], int(plan[MICRO] * plan[STEPS] / share)))
    for name, own, planned in pairs:
        if isinstance(own, int) and isinstance(planned, int) and own != planned:
            raise DeepSpeedConfigError(
                f"{name} is {own}, and the plan in {path} is for {planned}: plan again for this global batch"
            )
