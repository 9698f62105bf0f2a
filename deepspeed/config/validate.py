"""Validation of a configuration: types, ranges, conflicts and unsupported features."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from deepspeed.config.base_model import Section, is_number, note_of
from deepspeed.config.errors import Problem, nearest, show, wrong
from deepspeed.config.keys import Reading
from deepspeed.config.schema import child_of, default_of, kind_of, sections_by_path
from deepspeed.config.sections.compression import (
    CompressionTraining,
    ExpertShared,
    QuantizeTraining,
    SparseShared,
    Technique,
    WeightTechnique,
)
from deepspeed.config.sections.optimizer import ARGUMENTS, REQUIRED, OptimizerParams, SchedulerParams
from deepspeed.config.sections.top import TopLevel, wire_of
from deepspeed.config.unavailable_keys import REFUSED_OPTIMIZERS, outlook

_PATTERN = re.compile(r"(\d+):(\d+)|(\d+)x(\d+)")


def pattern_of(text: str) -> tuple[str, int, int] | None:
    """Parse a sparsity pattern: "2:4" to ("of", 2, 4), "4x1" to ("block", 4, 1), other texts to None."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        return None
    n, m, rows, columns = (int(part) if part else 0 for part in match.groups())
    if m:
        return ("of", n, m) if 0 < n <= m else None
    return ("block", rows, columns) if rows and columns else None


def compression_conflicts(section: CompressionTraining, training: QuantizeTraining) -> Iterator[Problem]:
    """Yield missing, invalid and contradictory values of `compression_training` and `quantize_training`."""
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
            try:
                re.compile(expression if expression != "*" else "")
            except re.error:
                yield wrong(f"{path}.different_groups.{name}.modules", expression, "is no regular expression")
        related = group.related_modules
        if related is not None and len(related) != len(group.modules):
            text = f"needs one list per entry of modules: {len(related)} lists, {len(group.modules)} entries"
            yield wrong(f"{path}.different_groups.{name}.related_modules", related, text)


def _pruning_problems(path: str, technique: Technique) -> Iterator[Problem]:
    shared = technique.shared_parameters
    shared_path = f"{path}.shared_parameters"
    alone = isinstance(shared, SparseShared) and shared.method == "snip_momentum"
    if technique.different_groups or not alone:
        yield from _grouped(path, technique.different_groups, "dense_ratio")
    end = shared.schedule_offset_end
    if end is not None and end < shared.schedule_offset:
        yield wrong(f"{shared_path}.schedule_offset_end", end, f"is before schedule_offset = {shared.schedule_offset}")
    if shared.schedule == "cubic" and end is None:
        yield Problem(f"{shared_path}.schedule is cubic: schedule_offset_end is missing")
    if isinstance(shared, SparseShared):
        if pattern_of(shared.block_pattern) is None:
            yield wrong(f"{shared_path}.block_pattern", shared.block_pattern, 'write N:M as "2:4", or a block as "4x1"')
    elif isinstance(shared, ExpertShared) and (end is not None or shared.scope == "global"):
        what, value = ("schedule_offset_end", end) if end is not None else ("scope", "global")
        yield wrong(f"{shared_path}.{what}", value, "experts leave at schedule_offset, as many in every layer")
    elif isinstance(shared, ExpertShared) and shared.criterion == "movement":
        yield wrong(f"{shared_path}.criterion", "movement", "experts are not brought back; use magnitude or taylor")
    elif shared.criterion == "activation":
        yield wrong(f"{shared_path}.criterion", "activation", "scores single weights; use it in sparse_pruning")


def _quantization_problems(path: str, technique: WeightTechnique) -> Iterator[Problem]:
    shared = technique.shared_parameters
    yield from _grouped(path, technique.different_groups, "target_bits")
    for name, group in technique.different_groups.items():
        params, params_path = group.params, f"{path}.different_groups.{name}.params"
        start, target = params.start_bits, params.target_bits
        if start is None:
            yield Problem(f"{params_path}.start_bits is missing")
        elif target is not None and target > start:
            yield wrong(f"{params_path}.target_bits", target, f"is above start_bits = {start}")
        elif target != start and params.quantization_period == 0 and not shared.quantize_weight_in_forward:
            yield wrong(f"{params_path}.quantization_period", 0, "bits fall once per period; name one of 1 or more")
        if target is not None and target < 3 and shared.quantization_type == "asymmetric":
            yield wrong(f"{params_path}.target_bits", target, "ternary and binary weights are symmetric")
    if shared.rounding == "stochastic" and shared.quantize_weight_in_forward:
        yield wrong(f"{path}.shared_parameters.rounding", "stochastic", "needs quantize_weight_in_forward = false")


_LIMITS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    "too_short": "needs at least {min_length} entries",
    "too_long": "takes at most {max_length} entries",
}


def to_sections(reading: Reading) -> TopLevel:
    """Create the typed sections; values of a wrong type or range become defaults, and problems in `reading`."""
    while True:
        try:
            top = TopLevel.model_validate(reading.tree)
        except ValidationError as error:
            for path in _report(error.errors(include_url=False), reading):
                # The wrong element of a list takes the whole list with it, so that indices stay true.
                end = next((place for place, part in enumerate(path) if isinstance(part, int)), len(path))
                *blocks, last = path[:end]
                tree = reading.tree
                for block in blocks:
                    tree = tree.get(block, {})  # it is gone when another wrong value has taken it along
                tree.pop(last, None)
            continue
        reading.warnings += _without_effect(top, reading)
        return top


def _without_effect(section: Section, reading: Reading, path: str = "") -> Iterator[str]:
    """Yield a line for each number of 0 or below, except the default, of a key that has no effect."""
    for name, field in type(section).model_fields.items():
        value, here, note = getattr(section, name), f"{path}.{name}" if path else name, note_of(field)
        if isinstance(value, Section):
            yield from _without_effect(value, reading, here)
        elif note.status == "moot by design" and is_number(value) and value <= 0 and _differs(field, value):
            yield f"{reading.name(here)} = {show(value)} has no effect: {note.instead}"


def _report(errors: list[ErrorDetails], reading: Reading) -> list[tuple[Any, ...]]:
    bad: dict[tuple[Any, ...], list[ErrorDetails]] = {}
    for error in errors:
        bad.setdefault(_existing(error["loc"], reading.tree), []).append(error)
    for path, details in bad.items():
        dotted = ".".join(str(part) for part in path)
        value: Any = reading.tree
        for part in path:
            value = value[part]
        texts = list(dict.fromkeys(_words(error, dotted) for error in details))
        reading.problems.append(wrong(reading.name(dotted), value, " or ".join(texts)))
    return list(bad)


def _words(error: ErrorDetails, path: str) -> str:
    limit = _LIMITS.get(error["type"])
    if limit is not None:
        return limit.format(**error.get("ctx", {}))
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    parent, _, name = path.rpartition(".")
    section = sections_by_path().get(parent)
    field = None if section is None else section.model_fields.get(name)
    if field is None:
        return error["msg"][0].lower() + error["msg"][1:]
    child = child_of(field)
    if child is not None and child.shape == "block":
        return f'expected an object with keys such as "{next(iter(child.section.model_fields))}"'
    return "expected " + kind_of(field.annotation)


def _existing(location: tuple[Any, ...], tree: Any) -> tuple[Any, ...]:
    """Return the part of pydantic's location that names values, without union and validator entries."""
    path: list[Any] = []
    for part in location:
        if not (isinstance(tree, dict) and part in tree) and not (isinstance(tree, list) and isinstance(part, int)):
            break
        path.append(part)
        tree = cast(Any, tree)[part]
    return tuple(path)


def conflicts(top: TopLevel, reading: Reading, ranks: tuple[int, int] | None) -> Iterator[Problem]:
    """Yield contradictions between values that are valid alone, and missing values that others need.

    Args:
        top: the typed sections.
        reading: the configuration as the user wrote it, for the names of keys; gets warnings.
        ranks: (data-parallel ranks, ranks with the same model slice); None: unknown.
    """
    if top.fp16.enabled and (top.bf16.enabled or top.torch_autocast.enabled):
        other = "bf16" if top.bf16.enabled else "torch_autocast"
        paths = f"{reading.name('fp16.enabled')} and {reading.name(f'{other}.enabled')}"
        yield Problem(f"{paths} are all true: enable one precision, fp32 being the one without any of them")
    zero = top.zero_optimization
    if not zero.compute_grad_norm and top.gradient_clipping > 0:
        yield wrong(
            "zero_optimization.compute_grad_norm",
            False,
            f"gradient_clipping = {top.gradient_clipping} needs the norm; set it to 0 or compute the norm",
        )
    if zero.mics_shard_size != -1:
        if zero.stage != 3:
            yield wrong("zero_optimization.mics_shard_size", zero.mics_shard_size, f"needs stage 3, not {zero.stage}")
        if zero.mics_shard_size < 1 or (ranks and ranks[1] % zero.mics_shard_size):
            count = f"{ranks[1]} rank(s)" if ranks else "number of ranks"
            yield wrong("zero_optimization.mics_shard_size", zero.mics_shard_size, f"must divide the {count}")
    if top.sparse_gradients and zero.stage == 3:
        yield wrong(
            "sparse_gradients",
            True,
            "needs stage 0, 1 or 2, not 3: sharded tables are gathered whole; leave it out, or lower the stage",
        )
    yield from _secondary_conflicts(top, ranks)
    if ranks and top.data_parallel_size not in (None, ranks[0]):
        yield wrong("data_parallel_size", top.data_parallel_size, f"this run has {ranks[0]} data-parallel rank(s)")
    if top.mesh.dp_replicate not in (None, 1) and zero.stage != 3:
        yield wrong("mesh.dp_replicate", top.mesh.dp_replicate, f"hybrid sharding needs stage 3, not {zero.stage}")
    if top.flops_profiler.enabled and top.flops_profiler.profile_step < 0:
        reading.warnings.append(f"flops_profiler.profile_step = {top.flops_profiler.profile_step}: no step is profiled")
    yield from _offload_conflicts(top, reading)
    yield from _wire_conflicts(top, reading)
    yield from _optimizer_and_scheduler_conflicts(top, reading)
    yield from compression_conflicts(top.compression_training, top.quantize_training)


def _offload_conflicts(top: TopLevel, reading: Reading) -> Iterator[Problem]:
    zero = top.zero_optimization
    for name, section in (("optimizer", zero.offload_optimizer), ("param", zero.offload_param)):
        path = f"zero_optimization.offload_{name}"
        if section.device != "none" and name == "param" and zero.stage < 3:
            reading.warnings.append(
                f'{path}.device = "{section.device}" has no effect: at stage {zero.stage} parameters are whole on '
                "every rank, and stay where the model computes"
            )
            continue
        if section.device != "none" and zero.stage < 1:
            text = f"needs stage 1, 2 or 3, and zero_optimization.stage = {zero.stage}"
            yield wrong(f"{path}.device", section.device, text)
        if section.device == "nvme" and not section.nvme_path:
            yield Problem(f"{path}.nvme_path is missing: device nvme needs a folder on a local disk")
    if top.bf16.bf16_optimizer_states and not top.bf16.bf16_master_weights_and_grads:
        yield wrong("bf16.bf16_optimizer_states", True, "needs bf16.bf16_master_weights_and_grads = true")


def _secondary_conflicts(top: TopLevel, ranks: tuple[int, int] | None) -> Iterator[Problem]:
    zero, size = top.zero_optimization, top.zero_optimization.zero_hpz_partition_size
    path = "zero_optimization.zero_hpz_partition_size"
    if size <= 1:
        return
    if zero.stage != 3:
        yield wrong(path, size, f"needs stage 3, not {zero.stage}")
        return
    sharing = ranks[1] // max(top.mesh.dp_replicate or 1, 1) if ranks else None
    if zero.mics_shard_size > 0:
        sharing = zero.mics_shard_size
    if sharing is not None and sharing % size:
        fitting = [number for number in range(1, sharing + 1) if sharing % number == 0]
        closest = min(fitting, key=lambda number: (abs(number - size), number))
        yield wrong(path, size, f"must divide the {sharing} rank(s) that share the weights; {closest} does")


def _wire_conflicts(top: TopLevel, reading: Reading) -> Iterator[Problem]:
    wire, zero, loco = top.wire, top.zero_optimization, top.zero_optimization.zeropp_loco_param
    resolved, dtype = wire_of(top), top.communication_data_type
    rivals = [("communication_data_type", dtype)] if dtype is not None else []
    rivals += [("zero_optimization.zero_quantized_gradients", "int4")] if zero.zero_quantized_gradients else []
    rivals += [("wire.gradients", wire.gradients)] if "gradients" in wire.model_fields_set else []
    if len({value for _, value in rivals}) > 1:
        words = " and ".join(f"{reading.name(path)} ({value})" for path, value in rivals)
        yield Problem(f"{words} are two encodings of gradients: keep one; wire.gradients says it all")
    rivals = [("zero_optimization.zero_quantized_weights", "int8")] if zero.zero_quantized_weights else []
    rivals += [("wire.weights", wire.weights)] if "weights" in wire.model_fields_set else []
    if len({value for _, value in rivals}) > 1:
        yield Problem(
            f"{reading.name(rivals[0][0])} (int8) and wire.weights ({wire.weights}) are two encodings of weights: keep "
            f"one; wire.weights says it all"
        )
    encoded = [name for name in ("weights", "weights_within_host") if getattr(wire, name) not in ("none", "measured")]
    if zero.stage == 0 and encoded:
        name = encoded[0]
        yield wrong(f"wire.{name}", getattr(wire, name), "needs stage 1, 2 or 3: stage 0 sends no weights")
    elif zero.stage == 0 and zero.zero_quantized_weights:
        reading.warnings.append("zero_optimization.zero_quantized_weights has no effect: stage 0 sends no weights")
    blocks = {resolved.gradients, resolved.gradients_within_host} & {"int8", "int4"}
    if not blocks and (wire.error_memory or loco.model_fields_set):
        path = "wire.error_memory" if wire.error_memory else "zero_optimization.zeropp_loco_param"
        yield Problem(f'{reading.name(path)} needs gradients in int8 or int4, as {{"wire": {{"gradients": "int4"}}}}')
    if zero.stage < 3 and wire.frozen_weights not in (None, "none"):
        yield wrong("wire.frozen_weights", wire.frozen_weights, f"needs stage 3, not {zero.stage}: others send none")
    if loco.model_fields_set and {"error_beta", "error_reset"} & wire.model_fields_set:
        yield Problem(
            f"{reading.name('zero_optimization.zeropp_loco_param')} and wire.error_beta or wire.error_reset are two "
            f"settings of the error memory: keep the one in wire"
        )


def _optimizer_and_scheduler_conflicts(top: TopLevel, reading: Reading) -> Iterator[Problem]:
    if top.optimizer is not None and not top.optimizer.type:
        yield Problem('optimizer.type is missing: name one, such as "AdamW", or leave the block out')
    elif top.optimizer is not None and (top.optimizer.type or "").lower() in REFUSED_OPTIMIZERS:
        reason = REFUSED_OPTIMIZERS[(top.optimizer.type or "").lower()]
        yield Problem(f"optimizer.type = {show(top.optimizer.type)}: is refused for good: {reason}", "unavailable")
    if top.scheduler is None:
        return
    kind, params = top.scheduler.type, top.scheduler.params
    if not kind:
        reading.warnings.append("scheduler has no type: no schedule is made of it; one given to initialize counts")
    for name in params:
        if kind in ARGUMENTS and name not in ARGUMENTS[kind]:
            hint = "" if name in SchedulerParams.model_fields else f"; {nearest(name, SchedulerParams)}"
            yield wrong(f"scheduler.params.{name}", params[name], f"not an argument of {kind}{hint}")
    for name in REQUIRED.get(kind or "", ()):
        if name not in params and f"scheduler.params.{name}" not in reading.autos:
            yield Problem(f"scheduler.params.{name} is missing: {kind} needs it")


def unavailable(section: Section, reading: Reading, path: str = "") -> Iterator[Problem]:
    """Yield problems for values of a section, at JSON path `path`, that request unavailable features."""
    if section.switch:  # is the key that turns the block on away from its default?
        *blocks, switch = section.switch.split(".")
        block = section
        for part in blocks:
            block = cast(Section, getattr(block, part))
        if not _differs(type(block).model_fields[switch], getattr(block, switch)):
            return
    for name, field in type(section).model_fields.items():
        here = f"{path}.{name}" if path else name
        value: Any = getattr(section, name)
        if note_of(field).status == "not available yet" and _differs(field, value):
            setting = value if "[]" in here else reading.find(here)
            yield Problem(f"{reading.name(here)} = {show(setting)}: {_refusal(field, here)}", "unavailable")
            if section.switch == name:
                return
        elif isinstance(value, Section):
            yield from unavailable(value, reading, here)
        elif isinstance(value, list):
            for item in cast("list[object]", value):
                if isinstance(item, Section):
                    yield from unavailable(item, reading, f"{here}[]")
        elif here == "optimizer.params":
            yield from _unavailable_params(value)


def _unavailable_params(params: dict[str, Any]) -> Iterator[Problem]:
    for name, value in params.items():
        field = OptimizerParams.model_fields.get(name)
        if field is not None and note_of(field).status == "not available yet" and _differs(field, value):
            path = f"optimizer.params.{name}"
            yield Problem(f"{path} = {show(value)}: {_refusal(field, path)}", "unavailable")


def _refusal(field: FieldInfo, path: str) -> str:
    text = f"is {outlook(path)} (the key: {note_of(field).meaning})"
    return f"{text}; leave it out or at {show(default_of(field))}"


def _differs(field: FieldInfo, value: Any) -> bool:
    return value != default_of(field) and value not in note_of(field).idle
