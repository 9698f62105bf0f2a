"""`compression_training`, `quantize_training`: compression during training."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from deepspeed.config.base_model import Int, Names, Section, key, later, moot

_TECHNIQUE_SWITCH = "shared_parameters.enabled"

Criterion = Literal["magnitude", "movement", "taylor", "activation"]
Schedule = Literal["step", "cubic"]


def _partners(value: object) -> object:
    """Replace each string in a list by a list of one string; other values are returned unchanged."""
    if isinstance(value, list):
        return [[entry] if isinstance(entry, str) else entry for entry in value]  # pyright: ignore[reportUnknownVariableType]
    return value


class LayerReduction(Section):
    """Block `compression_training.layer_reduction`: a student model with some of the teacher's layers."""

    switch = "enabled"
    enabled: bool = key(
        False, "a student with some of the teacher's layers: the others leave the running engine, or the old calls copy"
    )
    schedule_offset: Int = key(0, "applied steps before layers leave the running engine", ge=0)
    keep_number_layer: Int | None = key(
        None, "layers of the student; with no teacher_layer they are picked by block influence", ge=1
    )
    module_name_prefix: str | None = key(None, "name of the list of repeated blocks; found when left out")
    teacher_layer: list[int] | None = key(None, "which layers of the teacher are taken")
    other_module_name: Names | None = key(None, "modules that the old calls copy as they are")


class MixedQuantize(Section):
    """Block `fp16_mixed_quantize`: gradual blend from full-precision to quantized weights."""

    enabled: bool = key(False, "blend full and quantized weights (the form that steps its bits)")
    quantize_change_ratio: float = key(0.001, "by how much the full part falls per step", ge=0)


class WeightShared(Section):
    """Block `compression_training.weight_quantization.shared_parameters`: settings of all groups of weights."""

    enabled: bool = key(False, "quantize weights while training")
    quantizer_kernel: bool = moot(False, "quantize by kernel", "one implementation on every device")
    schedule_offset: Int = key(0, "applied steps before it starts", ge=0)
    quantize_groups: Int = key(1, "equal pieces of the flattened weight with their own scale", ge=1)
    quantize_verbose: bool = key(False, "say when bits change")
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "scale, or scale and offset")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "rounding; stochastic where bits step only")
    quantize_weight_in_forward: bool = key(
        False, "true: always target_bits; false: from start_bits to target_bits, one bit per period, periods doubling"
    )
    fp16_mixed_quantize: MixedQuantize = key(MixedQuantize, "blend full and quantized weights")


class ActivationShared(Section):
    """Block `compression_training.activation_quantization.shared_parameters`: settings of all groups of modules."""

    enabled: bool = key(False, "quantize the inputs of modules")
    quantization_type: Literal["symmetric", "asymmetric"] = key("symmetric", "scale, or scale and offset")
    range_calibration: Literal["dynamic", "static"] = key("dynamic", "range of each token, or a running one")
    schedule_offset: Int = key(1000, "applied steps before it starts", ge=0)


class _Pruning(Section):
    """Keys common to all pruning techniques."""

    enabled: bool = key(False, "prune")
    schedule_offset: Int = key(1000, "applied steps before masks act", ge=0)
    schedule_offset_end: Int | None = key(None, "applied steps until the mask is final; default: the offset", ge=0)
    schedule_offset_stride: Int = key(1, "applied steps between two masks", ge=1)
    schedule: Schedule = key("step", "how the kept share decreases from offset to end: in one step, or by a cubic ramp")
    criterion: Criterion | None = key(None, "how units are scored; default: by method")
    scope: Literal["layer", "global"] = key("layer", "the ratio holds in each layer, or over all layers of a group")


class SparseShared(_Pruning):
    """Block `compression_training.sparse_pruning.shared_parameters`: masks of single weights or small blocks."""

    method: Literal["l1", "topk", "snip_momentum"] = key(
        "l1", "l1: magnitude; topk: movement; snip_momentum: Taylor, in blocks"
    )
    block_pattern: str = key("4x1", "N:M of each M inputs, or blocks of N x M; read with snip_momentum or when given")
    dense_ratio: float = key(0.1, "share kept, of snip_momentum without groups", gt=0, le=1)
    excluded_modules: Names = key([], "expressions of modules left alone")


class RowShared(_Pruning):
    """Block `shared_parameters` of `row_pruning` and `channel_pruning`: pruning of outputs of layers."""

    method: Literal["l1", "topk"] = key("l1", "l1: magnitude; topk: movement")
    physical: bool | None = key(
        None, "take them out of the running engine when the schedule ends; default: unless init_compression was called"
    )


class HeadShared(RowShared):
    """Block `compression_training.head_pruning.shared_parameters`: pruning of attention heads."""

    method: Literal["l1", "topk"] = key("topk", "l1: magnitude; topk: movement")
    num_heads: Int | None = key(None, "heads of the model; default: from its config", ge=1)


class ExpertShared(_Pruning):
    """Block `compression_training.expert_pruning.shared_parameters`: experts are removed at `schedule_offset`."""

    method: Literal["l1", "snip_momentum"] = key("l1", "l1: magnitude of an expert's weights; snip_momentum: Taylor")


class CompressionGroup(Section):
    """Block `different_groups.<name>` of a technique: modules with the same compression parameters."""

    modules: Names = key(["*"], "regular expressions on module names; * is all")
    related_modules: Annotated[list[Names] | None, BeforeValidator(_partners)] = key(
        None, "per entry of modules: partners that lose the matching dimension; default: found"
    )


class QuantizeParams(Section):
    """Block `params` of a group of quantized weights: the numbers of bits, and when they fall."""

    start_bits: Int | None = key(None, "bits at the start", ge=1, le=16)
    target_bits: Int | None = key(None, "bits at the end", ge=1, le=16)
    quantization_period: Int = key(1, "steps between reductions; 0 is legal where start_bits is target_bits", ge=0)


class BitsParams(Section):
    """Block `params` of a group of quantized activations: the number of bits."""

    bits: Int | None = key(None, "bits", ge=2, le=16)


class PruneParams(Section):
    """Block `params` of a group of pruned modules: the fraction of weights or units to keep."""

    dense_ratio: float | None = key(None, "share kept", gt=0, le=1)


class QuantizeGroup(CompressionGroup):
    params: QuantizeParams = key(QuantizeParams, "numbers of the group")


class BitsGroup(CompressionGroup):
    params: BitsParams = key(BitsParams, "numbers of the group")


class PruneGroup(CompressionGroup):
    params: PruneParams = key(PruneParams, "numbers of the group")


class WeightTechnique(Section):
    """Block `compression_training.weight_quantization`: quantized weights in training."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: WeightShared = key(WeightShared, "numbers of all groups")
    different_groups: dict[str, QuantizeGroup] = key({}, "groups of modules")


class ActivationTechnique(Section):
    """Block `compression_training.activation_quantization`: quantized inputs of modules in training."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: ActivationShared = key(ActivationShared, "numbers of all groups")
    different_groups: dict[str, BitsGroup] = key({}, "groups of modules")


class SparseTechnique(Section):
    """Block `compression_training.sparse_pruning`: pruning of single weights or small blocks."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: SparseShared = key(SparseShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = key({}, "groups of modules")


class RowTechnique(Section):
    """Block `compression_training.row_pruning` or `channel_pruning`: pruning of outputs of layers."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: RowShared = key(RowShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = key({}, "groups of modules")


class HeadTechnique(Section):
    """Block `compression_training.head_pruning`: pruning of attention heads."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: HeadShared = key(HeadShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = key({}, "groups of modules")


class ExpertTechnique(Section):
    """Block `compression_training.expert_pruning`: pruning of experts in packed matrices."""

    switch = _TECHNIQUE_SWITCH
    shared_parameters: ExpertShared = key(ExpertShared, "numbers of all groups")
    different_groups: dict[str, PruneGroup] = key({}, "groups of modules that pack experts")


Technique = SparseTechnique | RowTechnique | HeadTechnique | ExpertTechnique


class Distillation(Section):
    """Block `compression_training.distillation`: losses against a teacher, added to the model's loss."""

    switch = "enabled"
    enabled: bool = key(False, "learn from a teacher too")
    teacher: Literal["given", "before"] = key("given", "set by engine.set_teacher, or the model before pruning")
    temperature: float = key(1.0, "of both distributions", gt=0)
    hard: float = key(0.5, "weight of the model's own loss", ge=0)
    logits: float = key(0.5, "weight of the divergence of the logits", ge=0)
    hidden: float = key(0.0, "weight of the distance of hidden states", ge=0)
    hidden_distance: Literal["squared", "cosine"] = key(
        "squared", "mean squared error of all values, or one minus the cosine of each position, which no channel rules"
    )
    attention: float = key(0.0, "weight of the squared error of attention maps; needs eager attention", ge=0)
    layerwise: float = key(0.0, "weight of each layer's squared error, on the input of the teacher's layer", ge=0)
    layers: list[int] | None = key(
        None, "teacher layer of each student layer; default: spread evenly, for hidden states by removed layers"
    )


class Export(Section):
    """Block `compression_training.export`: the folder that is written after all schedules have ended."""

    folder: str | None = key(None, "where; nothing is written without it")
    after: Int = key(0, "not before this many applied steps", ge=0)
    weights: Literal["float", "int8", "int4", "w8a8"] = key("float", "how linear weights are stored")
    group_size: Int = key(32, "inputs that share a scale of int4", ge=1)


class CompressionTraining(Section):
    layer_reduction: LayerReduction = key(LayerReduction, "a student with fewer layers")
    weight_quantization: WeightTechnique = key(WeightTechnique, "quantized weights")
    activation_quantization: ActivationTechnique = key(ActivationTechnique, "quantized activations")
    sparse_pruning: SparseTechnique = key(SparseTechnique, "pruned weights")
    row_pruning: RowTechnique = key(RowTechnique, "pruned rows")
    head_pruning: HeadTechnique = key(HeadTechnique, "pruned heads")
    channel_pruning: RowTechnique = key(RowTechnique, "pruned channels")
    expert_pruning: ExpertTechnique = key(ExpertTechnique, "experts that leave")
    distillation: Distillation = key(Distillation, "a teacher")
    export: Export = key(Export, "what is handed over")

    @property
    def active(self) -> bool:
        """Whether any technique, distillation, layer reduction or export is enabled."""
        techniques = (self.weight_quantization, self.activation_quantization, *self.pruning.values())
        beside = self.distillation.enabled or self.layer_reduction.enabled or self.export.folder is not None
        return beside or any(technique.shared_parameters.enabled for technique in techniques)

    @property
    def pruning(self) -> dict[str, Technique]:
        """Pruning techniques, by the names of their blocks."""
        return {
            "sparse_pruning": self.sparse_pruning,
            "row_pruning": self.row_pruning,
            "head_pruning": self.head_pruning,
            "channel_pruning": self.channel_pruning,
            "expert_pruning": self.expert_pruning,
        }


class QuantizeBits(Section):
    """Block `quantize_training.quantize_bits`: number of bits at the start and at the end."""

    start_bits: Int = key(16, "bits at the start", ge=1, le=32)
    target_bits: Int = key(8, "bits at the end", ge=1, le=16)


class QuantizeSchedule(Section):
    """Block `quantize_training.quantize_schedule`: steps at which the number of bits falls."""

    quantize_period: Int = key(100, "steps between reductions", ge=1)
    schedule_offset: Int = key(100, "step at which it starts", ge=0)


class QuantizeAlgorithm(Section):
    """Block `quantize_training.quantize_algo`: type and rounding of the quantization."""

    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "scale, or scale and offset")
    rounding: Literal["nearest", "stochastic"] = key("nearest", "rounding")


class QuantizeTraining(Section):
    """Block `quantize_training`: quantization of linear, convolution and embedding weights, with falling bits."""

    switch = "enabled"
    enabled: bool = key(False, "fewer bits as training goes on")
    quantize_verbose: bool = key(False, "say when bits change")
    quantizer_kernel: bool = moot(False, "quantize by kernel", "one implementation on every device")
    quantize_type: Literal["symmetric", "asymmetric"] = key("symmetric", "scale, or scale and offset")
    quantize_bits: QuantizeBits = key(QuantizeBits, "from how many bits to how many")
    quantize_schedule: QuantizeSchedule = key(QuantizeSchedule, "when")
    quantize_groups: Int = key(1, "groups with their own scale", ge=1)
    quantize_algo: QuantizeAlgorithm = key(QuantizeAlgorithm, "how it is rounded", aliases=["quantize-algo"])
    fp16_mixed_quantize: MixedQuantize = key(MixedQuantize, "blend full and quantized weights")
    eigenvalue: dict[str, Any] | None = later(None, "periods by curvature", idle=[{}, {"enabled": False}])
