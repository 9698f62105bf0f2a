"""`autotuning`, `elasticity`, `sparse_attention`: numbers found by search or by the number of devices, and layouts."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.base_model import Int, Section, key, later, moot

_PREDICTED = "all plans are predicted without a run, the best are tried"
_WITHOUT_VALUES = "the model itself is run without values"
_STAYS = "the global batch stays as it is"


class Autotuning(Section):
    """`autotuning`."""

    open_names = True
    switch = "enabled"
    enabled: bool = key(False, "`deepspeed --autotuning` may search for the best plan")
    fast: bool = moot(True, "stage and micro-batch only", _PREDICTED)
    results_dir: str = key("autotuning_results", "folder of results")
    exps_dir: str = key("autotuning_exps", "folder of trials")
    overwrite: bool = key(True, "run trials again whose results are there")
    start_profile_step: Int = key(3, "first measured update", ge=1)
    end_profile_step: Int = key(5, "last measured update; a trial ends there", ge=1)
    metric: Literal["throughput", "latency", "flops"] = key(
        "throughput", "named in the results; the global batch stays, so all three choose the same plan"
    )
    metric_path: str | None = key(None, "a trial's file of figures; a run with it is a trial and ends after it")
    tuner_type: Literal["gridsearch", "random", "model_based"] = moot("gridsearch", "order of trials", _PREDICTED)
    tuner_early_stopping: Int = moot(5, "trials without gain before it ends", "at most five trials are run", ge=0)
    tuner_num_trials: Int = key(50, "most trials; more than five are never run", ge=1)
    arg_mappings: dict[str, Any] | None = key(None, "key to flag of the user's script")
    model_info: dict[str, Any] | None = moot(None, "size of the model", _WITHOUT_VALUES)
    model_info_path: str | None = moot(None, "file with the size of the model", _WITHOUT_VALUES)
    mp_size: Int = moot(1, "model-parallel ranks", "the JSON's own axes count", ge=1)
    max_train_batch_size: Int | None = moot(None, "largest global batch", _STAYS, ge=1)
    min_train_batch_size: Int = moot(1, "smallest global batch", _STAYS, ge=1)
    max_train_micro_batch_size_per_gpu: Int = key(1024, "largest micro-batch", ge=1)
    min_train_micro_batch_size_per_gpu: Int = key(1, "smallest micro-batch", ge=1)
    num_tuning_micro_batch_sizes: Int = moot(3, "micro-batches to try", _PREDICTED, ge=1)


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
