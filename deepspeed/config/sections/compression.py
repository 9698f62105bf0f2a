"""`compression_training`, `quantize_training`: smaller weights by training."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.fields import Int, Names, Section, key, later

_TECHNIQUE_SWITCH = "shared_parameters.enabled"


class LayerReduction(Section):
    """`compression_training.layer_reduction`."""

    switch = "enabled"
    enabled: bool = later(False, "build a student with fewer layers")
    keep_number_layer: Int | None = later(None, "layers of the student", ge=1)
    module_name_prefix: str | None = later(None, "name of the repeated block")
    teacher_layer: list[int] | None = later(None, "which layers of the teacher are taken")
    other_module_name: Names | None = later(None, "modules copied as they are")


class MixedQuantize(Section):
    """`fp16_mixed_quantize`: blend full and quantized weights."""

    enabled: bool = later(False, "blend full and quantized weights")
    quantize_change_ratio: float = later(0.001, "change of the blend per step", ge=0)


class WeightShared(Section):
    """`compression_training.weight_quantization.shared_parameters`."""

    enabled: bool = later(False, "quantize weights while training")
    quantizer_kernel: bool = later(False, "quantize by kernel")
    schedule_offset: Int = later(0, "step at which it starts", ge=0)
    quantize_groups: Int = later(1, "groups with their own scale", ge=1)
    quantize_verbose: bool = later(False, "print progress")
    quantization_type: Literal["symmetric", "asymmetric"] = later("symmetric", "scale, or scale and offset")
    rounding: Literal["nearest", "stochastic"] = later("nearest", "rounding")
    quantize_weight_in_forward: bool = later(False, "quantize in forward rather than in the step")
    fp16_mixed_quantize: MixedQuantize = key(MixedQuantize, "blend full and quantized weights")


class ActivationShared(Section):
    """`compression_training.activation_quantization.shared_parameters`."""

    enabled: bool = later(False, "quantize activations")
    quantization_type: Literal["symmetric", "asymmetric"] = later("symmetric", "scale, or scale and offset")
    range_calibration: Literal["dynamic", "static"] = later("dynamic", "where the range comes from")
    schedule_offset: Int = later(1000, "step at which it starts", ge=0)


class SparseShared(Section):
    """`compression_training.sparse_pruning.shared_parameters`."""

    enabled: bool = later(False, "prune single weights")
    schedule_offset: Int = later(1000, "step at which it starts", ge=0)
    schedule_offset_end: Int | None = later(None, "step at which it ends", ge=0)
    schedule_offset_stride: Int = later(1, "steps between prunings", ge=1)
    method: Literal["l1", "topk", "snip_momentum"] = later("l1", "how weights are picked")
    block_pattern: str = later("4x1", "shape of a pruned block")
    dense_ratio: float = later(0.1, "share of weights kept", ge=0, le=1)
    excluded_modules: list[str] = later([], "modules left alone")


class RowShared(Section):
    """`compression_training.row_pruning.shared_parameters`, and of `channel_pruning`."""

    enabled: bool = later(False, "prune rows or channels")
    method: Literal["l1", "topk"] = later("l1", "how they are picked")
    schedule_offset: Int = later(1000, "step at which it starts", ge=0)


class HeadShared(Section):
    """`compression_training.head_pruning.shared_parameters`."""

    enabled: bool = later(False, "prune attention heads")
    method: Literal["topk"] = later("topk", "how heads are picked")
    schedule_offset: Int = later(1000, "step at which it starts", ge=0)
    num_heads: Int | None = later(None, "heads of the model", ge=1)


class Group(Section):
    """Modules that share numbers."""

    modules: list[str] = later(["*"], "regular expressions on module names")
    related_modules: list[Any] | None = later(None, "partners shrunk together")


class QuantizeParams(Section):
    """`params` of a group of quantized weights."""

    start_bits: Int | None = later(None, "bits at the start", ge=1)
    target_bits: Int | None = later(None, "bits at the end", ge=1)
    quantization_period: Int = later(1, "steps between reductions", ge=1)


class BitsParams(Section):
    """`params` of a group of quantized activations."""

    bits: Int | None = later(None, "bits", ge=1)


class PruneParams(Section):
    """`params` of a pruned group."""

    dense_ratio: float | None = later(None, "share kept", ge=0, le=1)


class QuantizeGroup(Group):
    """A group of modules with its own numbers."""

    params: QuantizeParams = key(QuantizeParams, "numbers of the group")


class BitsGroup(Group):
    """A group of modules with its own numbers."""

    params: BitsParams = key(BitsParams, "numbers of the group")


class PruneGroup(Group):
    """A group of modules with its own numbers."""

    params: PruneParams = key(PruneParams, "numbers of the group")


class WeightTechnique(Section):
    """`compression_training.weight_quantization`."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: WeightShared = key(WeightShared, "numbers of all groups")
    different_groups: dict[str, QuantizeGroup] = later({}, "groups of modules")


class ActivationTechnique(Section):
    """`compression_training.activation_quantization`."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: ActivationShared = key(ActivationShared, "numbers of all groups")
    different_groups: dict[str, BitsGroup] = later({}, "groups of modules")


class SparseTechnique(Section):
    """`compression_training.sparse_pruning`."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: SparseShared = key(SparseShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = later({}, "groups of modules")


class RowTechnique(Section):
    """`compression_training.row_pruning` and `channel_pruning`."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: RowShared = key(RowShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = later({}, "groups of modules")


class HeadTechnique(Section):
    """`compression_training.head_pruning`."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: HeadShared = key(HeadShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = later({}, "groups of modules")


class CompressionTraining(Section):
    """`compression_training`."""

    layer_reduction: LayerReduction = key(LayerReduction, "a student with fewer layers")
    weight_quantization: WeightTechnique = key(WeightTechnique, "quantized weights")
    activation_quantization: ActivationTechnique = key(ActivationTechnique, "quantized activations")
    sparse_pruning: SparseTechnique = key(SparseTechnique, "pruned weights")
    row_pruning: RowTechnique = key(RowTechnique, "pruned rows")
    head_pruning: HeadTechnique = key(HeadTechnique, "pruned heads")
    channel_pruning: RowTechnique = key(RowTechnique, "pruned channels")


class QuantizeBits(Section):
    """`quantize_training.quantize_bits`."""

    start_bits: Int = later(16, "bits at the start", ge=1)
    target_bits: Int = later(8, "bits at the end", ge=1)


class QuantizeSchedule(Section):
    """`quantize_training.quantize_schedule`."""

    quantize_period: Int = later(100, "steps between reductions", ge=1)
    schedule_offset: Int = later(100, "step at which it starts", ge=0)


class QuantizeTraining(Section):
    """`quantize_training`: mixture of quantization."""

    switch = "enabled"
    enabled: bool = later(False, "fewer bits as training goes on")
    quantize_verbose: bool = later(False, "print progress")
    quantizer_kernel: bool = later(False, "quantize by kernel")
    quantize_type: Literal["symmetric", "asymmetric"] = later("symmetric", "scale, or scale and offset")
    quantize_bits: QuantizeBits = key(QuantizeBits, "from how many bits to how many")
    quantize_schedule: QuantizeSchedule = key(QuantizeSchedule, "when")
    quantize_groups: Int = later(1, "groups with their own scale", ge=1)
    fp16_mixed_quantize: MixedQuantize = key(MixedQuantize, "blend full and quantized weights")
