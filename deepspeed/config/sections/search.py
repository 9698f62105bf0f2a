"""`autotuning`, `elasticity`, `sparse_attention`: numbers found by search or by the number of devices, and layouts."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.fields import Int, Section, key, later


class Autotuning(Section):
    """`autotuning`."""

    switch = "enabled"
    enabled: bool = later(False, "search for fast settings")
    fast: bool = later(True, "stage and micro-batch only")
    results_dir: str = later("autotuning_results", "folder of results")
    exps_dir: str = later("autotuning_exps", "folder of trials")
    overwrite: bool = later(True, "write over earlier trials")
    start_profile_step: Int = later(3, "first measured step", ge=0)
    end_profile_step: Int = later(5, "last measured step", ge=1)
    metric: Literal["throughput", "latency", "flops"] = later("throughput", "what is made best")
    metric_path: str | None = later(None, "file with the trial's figure")
    tuner_type: Literal["gridsearch", "random", "model_based"] = later("gridsearch", "order of trials")
    tuner_early_stopping: Int = later(5, "trials without gain before it ends", ge=0)
    tuner_num_trials: Int = later(50, "most trials", ge=1)
    arg_mappings: dict[str, Any] | None = later(None, "key to flag of the user's script")
    model_info: dict[str, Any] | None = later(None, "size of the model")
    model_info_path: str | None = later(None, "file with the size of the model")
    mp_size: Int = later(1, "model-parallel ranks", ge=1)
    max_train_batch_size: Int | None = later(None, "largest global batch", ge=1)
    min_train_batch_size: Int = later(1, "smallest global batch", ge=1)
    max_train_micro_batch_size_per_gpu: Int = later(1024, "largest micro-batch", ge=1)
    min_train_micro_batch_size_per_gpu: Int = later(1, "smallest micro-batch", ge=1)
    num_tuning_micro_batch_sizes: Int = later(3, "micro-batches to try", ge=1)


class Elasticity(Section):
    """`elasticity`: a batch size that fits many device counts."""

    switch = "enabled"
    enabled: bool = key(False, "choose a batch that fits many device counts")
    max_train_batch_size: Int = key(2000, "largest global batch", ge=1)
    micro_batch_sizes: list[Int] = key([2, 4, 6], "micro-batches to choose from")
    min_gpus: Int = key(1, "fewest devices", ge=1)
    max_gpus: Int = key(10000, "most devices", ge=1)
    min_time: Int = key(0, "minutes between changes", ge=0)
    prefer_larger_batch: bool = key(True, "the larger of equal batches")
    ignore_non_elastic_batch_info: bool = key(False, "batch keys may be present")
    num_gpus_per_node: Int = key(1, "devices per node", ge=1)
    model_parallel_size: Int = key(1, "model-parallel ranks", ge=1)
    version: float = key(0.2, "0.1 counts devices, 0.2 whole nodes")


class SparseAttention(Section):
    """`sparse_attention`: block-sparse attention layouts."""

    mode: Literal["dense", "fixed", "variable", "bigbird", "bslongformer"] = later("fixed", "layout")
    block: Int = later(16, "side of a block", ge=1)
    different_layout_per_head: bool = later(False, "one layout per head")
    num_local_blocks: Int = later(4, "blocks in a local window", ge=0)
    num_global_blocks: Int = later(1, "global blocks per window", ge=0)
    attention: Literal["bidirectional", "unidirectional"] = later("bidirectional", "direction")
    horizontal_global_attention: bool = later(False, "global blocks attend as well")
    num_different_global_patterns: Int = later(1, "patterns over heads", ge=1)
    num_random_blocks: Int = later(0, "random blocks per row", ge=0)
    local_window_blocks: list[int] = later([4], "blocks per local window")
    global_block_indices: list[int] = later([0], "global blocks")
    global_block_end_indices: list[int] | None = later(None, "ends of ranges of global blocks")
    num_sliding_window_blocks: Int = later(3, "blocks of the sliding window", ge=0)
