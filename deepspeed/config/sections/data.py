"""`data_efficiency`, `curriculum_learning`, `progressive_layer_drop`, `eigenvalue`: data, layer drop, curvature."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.base_model import Int, Section, key, later, moot


class CurriculumMetric(Section):
    """Block `data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.<metric>`: measure of difficulty."""

    open_names = True
    index_to_sample_path: str | None = key(None, "file of the data analysis: row i lists the samples of difficulty i")
    index_to_metric_path: str | None = key(None, "file of the data analysis: row i holds the number of difficulty i")
    difficulty_type: Literal["value", "percentile"] | None = key(None, "what the numbers are")
    clustering_type: Literal["schedule_based", "single_cluster"] = key("schedule_based", "how samples are dealt")
    min_difficulty: Int | None = key(None, "difficulty at the start")
    max_difficulty: Int | None = key(None, "difficulty at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: dict[str, Any] | None = key(None, "numbers of the schedule")


class DataCurriculum(Section):
    """Block `data_efficiency.data_sampling.curriculum_learning`: easy samples first."""

    open_names = True
    switch = "enabled"
    enabled: bool = key(False, "easy samples first")
    data_cluster_path: str | None = moot(
        None, "folder of the sample lists", "lists of samples are computed from the indexes again when a run resumes"
    )
    curriculum_metrics: dict[str, CurriculumMetric] = key({}, "what makes a sample hard")


class DynamicBatching(Section):
    """Block `data_efficiency.data_sampling.dynamic_batching`: batches with equal numbers of tokens."""

    open_names = True
    switch = "enabled"
    enabled: bool = key(False, "batches of equal token count")
    metrics_path: str | None = key(None, "file of sample lengths")
    lr_scaling_method: Literal["linear", "sqrt", "none"] | None = key("linear", "learning rate by batch size")
    min_batch_size: Int = key(1, "fewest samples", ge=1)
    max_batch_size: Int | None = key(None, "maximum number of samples", ge=1)
    sequence_picking_order: Literal["dataloader", "random", "seqlen", "bucketed"] = key(
        "dataloader", "order of samples"
    )
    max_tokens: Int | None = key(
        None, "most tokens of a pack; a micro-batch has train_micro_batch_size_per_gpu packs", ge=1
    )
    verbose: bool = key(False, "print each batch")


class DataSampling(Section):
    """Block `data_efficiency.data_sampling`: sampling by difficulty or length."""

    open_names = True
    switch = "enabled"
    enabled: bool | None = key(None, "sample by difficulty or length; null: the blocks inside decide")
    num_epochs: Int = key(1000, "epochs", ge=1)
    num_workers: Int = key(0, "loader processes", ge=0)
    pin_memory: bool = key(False, "page-locked host memory")
    curriculum_learning: DataCurriculum = key(DataCurriculum, "easy samples first")
    dynamic_batching: DynamicBatching = key(DynamicBatching, "batches of equal token count")


class RandomLtd(Section):
    """Block `data_efficiency.data_routing.random_ltd`: random layerwise token dropping (arXiv:2211.11586)."""

    open_names = True
    switch = "enabled"
    enabled: bool = key(
        False, "layers process a random part of the tokens while training; call `convert_to_random_ltd` too"
    )
    total_layer_num: Int | None = key(None, "layers of the model")
    random_ltd_layer_num: Int | None = key(None, "layers that leave tokens out: the length of `random_ltd_layer_id`")
    random_ltd_layer_id: list[int] | None = key(None, "their numbers, from 0; the first and last layer stay whole")
    model_mask_name: str | None = moot(None, "name of the mask argument", "masks are found by name and shape")
    model_type: Literal["encoder", "decoder"] | None = moot(
        None, "kind of model", "masks are cut to the kept tokens in both kinds"
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = key(
        None, "order of the dims of hidden states; null is batch_seq_dim"
    )
    random_ltd_schedule: dict[str, Any] | None = key(
        None, "tokens kept: `min_value`, `max_value`, `schedule_type` fixed_linear, and in `schedule_config` "
        "`require_steps` and `seq_per_step`",
    )  # fmt: skip
    layer_token_lr_schedule: dict[str, Any] | None = key(
        None, "learning rate by tokens of layers; only `enabled` false is available"
    )


class DataRouting(Section):
    """Block `data_efficiency.data_routing`: dropping of tokens inside the model."""

    open_names = True
    switch = "enabled"
    enabled: bool | None = key(None, "drop tokens inside the model; null: the block inside decides")
    random_ltd: RandomLtd = key(RandomLtd, "layers process a random part of the tokens")


class DataEfficiency(Section):
    open_names = True
    switch = "enabled"
    enabled: bool | None = key(None, "curriculum, dynamic batches, token dropping; null: the blocks inside decide")
    seed: Int = key(1234, "seed of the draws", ge=0)
    data_sampling: DataSampling = key(DataSampling, "which samples")
    data_routing: DataRouting = key(DataRouting, "which tokens")


class CurriculumLearning(Section):
    """Block `curriculum_learning`: training begins with short sequences."""

    switch = "enabled"
    enabled: bool = key(False, "short sequences first: the model's forward gets `curriculum_seqlen`")
    curriculum_type: str | None = key(None, "only seqlen")
    min_difficulty: Int | None = key(None, "length at the start")
    max_difficulty: Int | None = key(None, "length at the end")
    schedule_type: str | None = key(None, "fixed_linear, fixed_root, fixed_discrete or custom")
    schedule_config: dict[str, Any] | None = key(None, "numbers of the schedule")


class ProgressiveLayerDrop(Section):
    switch = "enabled"
    enabled: bool = key(
        False, "layers are skipped at random: forward gets `pld_theta`, or call `enable_layer_drop(engine)`"
    )
    theta: float = key(1.0, "probability of keeping the last layer, in the end", ge=0, le=1)
    gamma: float = key(0.001, "speed at which it falls from 1, per update", ge=0)


class Eigenvalue(Section):
    switch = "enabled"
    enabled: bool = later(False, "curvature per block, for the quantization schedule")
    verbose: bool = later(False, "print them")
    max_iter: Int = later(100, "power iterations", ge=1)
    tol: float = later(1e-2, "change at which the iteration ends", ge=0)
    stability: float = later(1e-6, "added to the norm", ge=0)
    gas_boundary_resolution: Int = later(1, "steps between computations", ge=1)
    layer_name: str = later("bert.encoder.layer", "name of the repeated block")
    layer_num: Int = later(0, "number of blocks", ge=0)
