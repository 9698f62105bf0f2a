"""What cannot hold together in `compression_training` and `quantize_training`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deepspeed.config.problems import Problem, wrong
from deepspeed.config.sections.compression import (
    CompressionTraining,
    ExpertShared,
    QuantizeTraining,
    SparseShared,
    Technique,
    WeightTechnique,
)

_PATTERN = re.compile(r"(\d+):(\d+)|(\d+)x(\d+)")


def pattern_of(text: str) -> tuple[str, int, int] | None:
    """`2:4` as ("of", 2, 4), `4x1` as ("block", 4, 1); None when it is neither."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        return None
    n, m, rows, columns = (int(part) if part else 0 for part in found.groups())
    if m:
        return ("of", n, m) if 0 < n <= m else None
    return ("block", rows, columns) if rows and columns else None


def compression_conflicts(section: CompressionTraining, training: QuantizeTraining) -> Iterator[Problem]:
    """Values that are fine alone and cannot hold together.

    Args:
        section: `compression_training`.
        training: `quantize_training`.

    Yields:
        One problem per conflict.
    """
    base = "compression_training"
    for name, technique in section.pruning.items():
        if technique.shared_parameters.enabled:
            yield from _pruning_problems(f"{base}.{name}", technique)
    if section.weight_quantization.shared_parameters.enabled:
        yield from _quantization_problems(f"{base}.weight_quantization", section.weight_quantization)
        if training.enabled:
            yield Problem("quantize_training and compression_training.weight_quantization are both enabled: keep one")
    if section.activation_quantization.shared_parameters.enabled:
        groups = section.activation_quantization.different_groups
        yield from _grouped(f"{base}.activation_quantization", groups, "bits")
    layers = section.layer_reduction
    if layers.enabled and not layers.teacher_layer and not layers.keep_number_layer:
        yield Problem(
            f"{base}.layer_reduction: name teacher_layer, or keep_number_layer to pick that many by influence"
        )
    named = layers.teacher_layer or []
    if layers.enabled and (len(set(named)) != len(named) or min(named, default=0) < 0):
        yield wrong(f"{base}.layer_reduction.teacher_layer", named, "name each layer that stays once, from 0")
    elif layers.enabled and named and layers.keep_number_layer not in (None, len(named)):
        text = f"is not the number of layers that teacher_layer names, {len(named)}"
        yield wrong(f"{base}.layer_reduction.keep_number_layer", layers.keep_number_layer, text)
    if training.enabled and training.quantize_bits.start_bits < training.quantize_bits.target_bits:
        yield wrong(
            "quantize_training.quantize_bits.target_bits", training.quantize_bits.target_bits, "above start_bits"
        )


def _grouped(path: str, groups: dict[str, Any], needed: str) -> Iterator[Problem]:
    if not groups:
        yield Problem(f"{path}.different_groups is missing: name the modules and their {needed}")
    for name, group in groups.items():
        if getattr(group.params, needed) is None:
            yield Problem(f"{path}.different_groups.{name}.params.{needed} is missing")
        for expression in group.modules:
            if expression != "*" and not _compiles(expression):
                yield wrong(f"{path}.different_groups.{name}.modules", expression, "is no regular expression")
        related = group.related_modules
        if related is not None and len(related) != len(group.modules):
            text = f"needs one list per entry of modules: {len(related)} lists, {len(group.modules)} entries"
            yield wrong(f"{path}.different_groups.{name}.related_modules", related, text)


def _compiles(expression: str) -> bool:
    try:
        re.compile(expression)
    except re.error:
        return False
    return True


def _pruning_problems(path: str, technique: Technique) -> Iterator[Problem]:
    shared = technique.shared_parameters
    at = f"{path}.shared_parameters"
    alone = isinstance(shared, SparseShared) and shared.method == "snip_momentum"
    if technique.different_groups or not alone:
        yield from _grouped(path, technique.different_groups, "dense_ratio")
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        yield wrong(f"{at}.schedule_offset_end", end, f"is before schedule_offset = {shared.schedule_offset}")
    if shared.schedule == "cubic" and end is None:
        yield Problem(f"{at}.schedule is cubic: schedule_offset_end is missing")
    if isinstance(shared, SparseShared):
        if pattern_of(shared.block_pattern) is None:
            yield wrong(f"{at}.block_pattern", shared.block_pattern, 'write N:M as "2:4", or a block as "4x1"')
    elif isinstance(shared, ExpertShared) and (end is not None or shared.scope == "global"):
        what, value = ("schedule_offset_end", end) if end is not None else ("scope", "global")
        yield wrong(f"{at}.{what}", value, "experts leave at schedule_offset, as many in every layer")
    elif isinstance(shared, ExpertShared) and shared.criterion == "movement":
        yield wrong(f"{at}.criterion", "movement", "experts are not brought back; use magnitude or taylor")
    elif shared.criterion == "activation":
        yield wrong(f"{at}.criterion", "activation", "scores single weights; use it in sparse_pruning")


def _quantization_problems(path: str, technique: WeightTechnique) -> Iterator[Problem]:
    shared = technique.shared_parameters
    yield from _grouped(path, technique.different_groups, "target_bits")
    for name, group in technique.different_groups.items():
        params, at = group.params, f"{path}.different_groups.{name}.params"
        start, target = params.start_bits, params.target_bits
        if start is None:
            yield Problem(f"{at}.start_bits is missing")
        elif target is not None and target > start:
            yield wrong(f"{at}.target_bits", target, f"is above start_bits = {start}")
        elif target != start and params.quantization_period == 0 and not shared.quantize_weight_in_forward:
            yield wrong(f"{at}.quantization_period", 0, "bits fall once per period; name one of 1 or more")
        if target is not None and target < 3 and shared.quantization_type == "asymmetric":
            yield wrong(f"{at}.target_bits", target, "ternary and binary weights are symmetric")
    if shared.rounding == "stochastic" and shared.quantize_weight_in_forward:
        yield wrong(f"{path}.shared_parameters.rounding", "stochastic", "needs quantize_weight_in_forward = false")
