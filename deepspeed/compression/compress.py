"""Public functions of compression: `init_compression`, `redundancy_clean`, `student_initialization`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.compression.basic_layer import plain_module
from deepspeed.compression.controller import CALLED, TEACHER
from deepspeed.compression.fake_quantize import FakeQuantizers
from deepspeed.compression.helper import compression_preparation, recursive_getattr
from deepspeed.compression.pruning.layer_selection import REDUCED
from deepspeed.compression.pruning.masks import Masks
from deepspeed.compression.pruning.pruning_plan import PruningPlan
from deepspeed.compression.pruning.rules import matched, rules_of
from deepspeed.compression.pruning.structured_removal import remove_from
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.sections.compression import CompressionTraining, LayerReduction, QuantizeTraining
from deepspeed.errors import ArgumentError, CompressionError
from deepspeed.zero.parameters.parameter import ShardedParameter, is_managed

_LAST_STEP = 1 << 40  # a step after the end of every schedule


def check_deepspeed_config(config: Any) -> dict[str, Any]:
    """Return a config, which is a dict or the path of a JSON file, as a dict.

    Raises:
        ArgumentError: the config is neither.
        json.JSONDecodeError: the file is not valid JSON.
    """
    if isinstance(config, dict):
        return config
    if isinstance(config, (str, Path)) and Path(config).is_file():
        return json.loads(Path(config).read_text())
    raise ArgumentError(f"a compression config is a dict or the path of a JSON file, not {config!r}")


def section_of(config: Any) -> tuple[CompressionTraining, QuantizeTraining]:
    """Parse the sections `compression_training` and `quantize_training` of a dict or JSON file.

    Raises:
        ValueError: a key, type or value is wrong.
    """
    whole = check_deepspeed_config(config)
    known = {name: whole[name] for name in ("compression_training", "quantize_training") if name in whole}
    top = DeepSpeedConfig({"train_batch_size": 1, **known}, world=1).top
    return top.compression_training, top.quantize_training


def _inner(model: Any) -> nn.Module:
    return model.module if hasattr(model, "module") and isinstance(model.module, nn.Module) else model


def init_compression(model: nn.Module, deepspeed_config: Any, teacher_model: Any = None, mpu: Any = None) -> nn.Module:
    """Prepare a model before `deepspeed.initialize`: copy teacher layers into a student, and add quantizers to modules.

    Args:
        model: changed in place.
        deepspeed_config: dict or path of a JSON file with `compression_training`.
        teacher_model: needed for `layer_reduction`. It is marked as a teacher: an engine with the same configuration
            does not compress it.
        mpu: no effect.

    Returns:
        The model.

    Raises:
        ArgumentError: layer reduction without a teacher, or the config is neither a dict nor a file.
        CompressionError: a module in the config does not exist or does not support its technique.
        ValueError: a key, type or value in the config is wrong.
    """
    section, training = section_of(deepspeed_config)
    inner = _inner(model)
    if section.layer_reduction.enabled:
        if teacher_model is None:
            raise ArgumentError("layer_reduction is enabled: init_compression needs the teacher_model")
        _copy_layers(inner, _inner(teacher_model), section.layer_reduction)
    compression_preparation(inner)
    FakeQuantizers(inner, section, training)  # names and shapes are checked now
    if any(technique.shared_parameters.enabled for technique in section.pruning.values()):
        rules_of(inner, section, PruningPlan(inner), called=True)
    vars(inner)[CALLED] = section
    if teacher_model is not None:
        vars(_inner(teacher_model))[TEACHER] = True
    return model


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> None:
    """Copy parameters, not buffers, of teacher layers into a student (`layer_reduction`). Collective if sharded.

    Args:
        student_model: changed in place; its layer i gets the parameters of layer `teacher_layer[i]`.
        teacher_model: not changed.
        deepspeed_config: dict or path of a JSON file with `compression_training.layer_reduction`.

    Raises:
        CompressionError: a layer does not exist, its parameters differ, or `module_name_prefix` or `teacher_layer` is
            missing.
    """
    student = _inner(student_model)
    _copy_layers(student, _inner(teacher_model), section_of(deepspeed_config)[0].layer_reduction)
    vars(student)[REDUCED] = True


def _copy_layers(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    from deepspeed.zero.api.gathered_parameters import GatheredParameters

    prefix, layers = section.module_name_prefix, section.teacher_layer
    if not prefix or layers is None:
        raise CompressionError("layer_reduction: module_name_prefix and teacher_layer say what is copied")
    pairs = [(f"{prefix}.{new}", f"{prefix}.{old}") for new, old in enumerate(layers)]
    pairs += [(name, name) for name in section.other_module_name or []]
    for name, source in pairs:
        try:
            module, teacher_module = recursive_getattr(student, name), recursive_getattr(teacher, source)
        except (AttributeError, IndexError) as error:
            raise CompressionError(
                f"layer_reduction: {name} of the student or {source} of the teacher: {error}"
            ) from error
        params, teacher_params = dict(module.named_parameters()), dict(teacher_module.named_parameters())
        if params.keys() != teacher_params.keys():
            others = sorted(params.keys() ^ teacher_params.keys())[:4]
            raise CompressionError(f"layer_reduction: {name} has other parameters: {others}")
        for key, param in params.items():
            origin = teacher_params[key]
            both = [p for p in (param, origin) if is_managed(p)]
            modifier = 0 if is_managed(param) else None
            with torch.no_grad(), GatheredParameters(both, modifier_rank=modifier, enabled=bool(both)):
                if param.shape != origin.shape:
                    shapes = f"{tuple(param.shape)}, the teacher's {tuple(origin.shape)}"
                    raise CompressionError(f"layer_reduction: {name}.{key} is {shapes}")
                param.data.copy_(origin.data)


def redundancy_clean(model: nn.Module, deepspeed_config: Any, mpu: Any = None) -> nn.Module:
    """Apply masks and quantization permanently to the weights of a trained model, and remove pruned units.

    Units are removed if all coupled parameters are known; otherwise their parameters become zero. Masks are recomputed
    from the magnitudes of the weights, since masked weights are zero after training.

    Args:
        model: model with trained weights, not sharded; changed in place. Its engine (ZeRO stages 0 to 2) cannot be used
            for training afterwards.
        deepspeed_config: as in `init_compression`.
        mpu: no effect.

    Returns:
        The model.

    Raises:
        ArgumentError: the model is sharded (stage 3).
        CompressionError: as in `init_compression`.
    """
    section, training = section_of(deepspeed_config)
    inner = _inner(model)
    _take_out(inner)
    quantizers = FakeQuantizers(inner, section, training)
    quantizers.at_step(_LAST_STEP)
    with torch.no_grad():
        for module in inner.modules():
            quantizer = module.__dict__.pop("_weight_quantizer", None)
            if quantizer is not None and quantizer.bits:
                weight: Any = module._parameters["weight"]
                weight.data.copy_(quantizer(weight))
            if "_activation" not in module.__dict__:
                plain_module(module)
    plan = PruningPlan(inner)
    rules = rules_of(inner, section, plan, called=True)
    for rule in rules:
        rule.criterion, rule.offset, rule.end = "magnitude", 0, None
    masks = Masks(inner, rules, Axis("alone", (0,), 0, None, True), None)
    masks.after_step(0)
    removable = [rule for rule in rules if rule.removable]
    chosen = [pair for rule in removable for pair in zip(rule.families, masks.units[rule.name], strict=True)]
    if chosen:
        remove_from(inner, plan.removal_of(chosen))
    vars(inner).pop(CALLED, None)
    return model


def _take_out(inner: nn.Module) -> None:
    """Replace an engine's parameters in its module by plain copies; ties are preserved. ArgumentError if sharded."""
    if any(isinstance(param, ShardedParameter) for param in inner.parameters()):
        raise ArgumentError("redundancy_clean works on a whole model: load the weights into a fresh one first")
    managed = [param for param in inner.parameters() if is_managed(param)]
    own = {param: nn.Parameter(param.detach().clone(), param.requires_grad) for param in managed}
    for module in inner.modules():
        for name, param in module._parameters.items():
            if param is not None and param in own:
                module._parameters[name] = own[param]


def get_module_name(
    group_name: str, model: nn.Module, key_word: str, exist_module_name: set[str], mpu: Any = None, verbose: bool = True
) -> tuple[list[str], set[str]]:  # noqa: E501
    """Return the names of compressible modules that match an expression, and the names of all matches so far.

    Args:
        group_name: name of the compression group, for the error message.
        model: model to search.
        key_word: regular expression; `*` matches all.
        exist_module_name: names of earlier matches; the new ones are added in place.
        mpu: no effect.
        verbose: no effect.

    Raises:
        ValueError: a module is in `exist_module_name` already.
        CompressionError: no module matches.
    """
    names = [name for _, name, _ in matched(_inner(model), [key_word])]
    for name in names:
        if name in exist_module_name:
            raise ValueError(f"{name} is already added to the compression group {group_name}: check the expressions")
        exist_module_name.add(name)
    return names, exist_module_name


def get_compress_methods(model: nn.Module, compress_methods: dict[str, Any], mpu: Any = None) -> list[Any]:
    """Return the modules and parameters of all enabled compression techniques except `layer_reduction`.

    Args:
        model: model to search.
        compress_methods: value of `compression_training`.
        mpu: no effect.

    Returns:
        [module names, names of related modules or None, {technique: parameters}] for each expression in `modules`.

    Raises:
        ValueError: a module matches two expressions of one group.
    """
    methods = []
    for method, content in compress_methods.items():
        shared = (content.get("shared_parameters") or {}) if isinstance(content, dict) else {}
        if method == "layer_reduction" or not shared.get("enabled"):
            continue
        for name, group in (content.get("different_groups") or {}).items():
            seen: set[str] = set()
            parameters = {**shared, **(group.get("params") or {})}
            expressions = group.get("modules") or "*"
            related = group.get("related_modules") or [None] * len(expressions)
            listed = [expressions] if isinstance(expressions, str) else expressions
            for expression, partners in zip(listed, related, strict=False):
                names, seen = get_module_name(name, model, expression, seen)
                partner_names = [
                    [other for other, _ in _inner(model).named_modules() if re.search(partner, other)]
                    for partner in partners or []
                ]
                methods.append([names, partner_names or None, {method: parameters}])
    return methods
