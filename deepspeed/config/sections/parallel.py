"""Parallelism of a run, fixed or searched: the mesh and its axes, `autotuning`, `elasticity`."""

from __future__ import annotations

from typing import Any, Literal

from deepspeed.config.base_model import Dtype, Int, Names, Section, key, later, moot


class MeshSizes(Section):
    """Block `mesh`: ranks along each axis of the mesh; one size may be -1 (all remaining ranks)."""

    dp: Int | None = key(None, "data-parallel ranks; checked against the world", ge=-1)
    dp_replicate: Int | None = key(None, "copies of the sharded state (hybrid sharding)", ge=-1)
    dp_shard: Int | None = key(None, "data-parallel ranks that share one copy of the state", ge=-1)
    pp: Int = key(1, "pipeline stages", ge=-1)
    sp: Int = key(1, "ranks that share a sequence", ge=-1)
    tp: Int = key(1, "ranks that share a matrix", ge=-1)


class Pipeline(Section):
    open_names = True
    stages: Int | Literal["auto"] = key("auto", "number of stages")
    partition: Literal["best", "profile", "parameters", "uniform"] = key(
        "best",
        "how blocks are assigned to stages: by operations, also those before and after the blocks (best), by time "
        "measured at start (profile), by parameters, or by number",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = key("1f1b", "the schedule of micro-batches")
    chunks: Int = key(1, "parts of the model that each stage holds (interleaved)", ge=1)
    stage3_gather: Literal["auto", "micro_batch", "window"] = key(
        "auto", "at ZeRO stage 3, how long a unit stays gathered; auto: as stage3_max_live_parameters has room"
    )
    seed_layers: bool = later(False, "seed each layer by its index")
    activation_checkpoint_interval: Int = later(0, "layers between checkpoints; 0 is none", ge=0)
    pipe_partitioned: bool = later(True, "split activations over model-parallel ranks when sent")
    grad_partitioned: bool = later(True, "the same for gradients")
    use_reentrant: bool = later(True, "flavour of torch.utils.checkpoint")


class LayerSpecConfig(Section):
    """Entry of `tensor_parallel.partition_config.layer_specs`: rule for parameters, by name."""

    patterns: Names | None = key(None, "regular expressions on parameter names")
    partition_type: Literal["row", "column", "skip"] | None = key(
        None, "skip leaves the weight whole, with all that shares its channels; row, column are compared with the plan"
    )
    shape: list[Any] | None = moot(None, "view of a fused weight", "the plan finds fused weights and their layout")
    partition_dim: Int | None = moot(None, "dimension that is split", "it follows from row or column")
    model_types: Names | None = key(None, "model types the entry is for; null is all")
    gather_output: bool = later(False, "gather the layer's output")
    grad_allreduce: bool = later(False, "sum the gradient over ranks")


class PartitionConfig(Section):
    """Block `tensor_parallel.partition_config`: rules that restrict or check the split of matrices."""

    use_default_specs: bool = key(True, "also split weights that no entry names")
    strict_mode: bool = key(False, "a matrix of a block that stays whole is an error")
    lm_head_patterns: Names | None = later(None, "names of the output projection")
    embedding_partition_dim: Int = later(1, "dimension of embeddings that is split")
    layer_specs: list[LayerSpecConfig] = key([], "exceptions from the plan, by parameter names")


class TpSize(Section):
    """Block `tensor_parallel.tp` (alias `tensor_parallel.tensor_parallel`): number of tensor-parallel ranks."""

    tp_size: Int = key(1, "ranks that share a layer", ge=1)
    tp_grain_size: Int = later(1, "smallest piece of a split", ge=1)
    mpu: Any = later(None, "model-parallel unit object")
    tp_group: Any = later(None, "process group")


class TensorParallel(Section):
    autotp_size: Int = key(0, "ranks that share a layer; 0 is 1", ge=0)
    dtype: Dtype = later("fp16", "compute dtype", idle=["bf16", "fp32"])
    tp_overlap_comm: bool = later(False, "overlap its collectives")
    verify: Literal["off", "units", "model"] = key(
        "units", "comparison with the dense form before training: none, each unit, or also the model's output"
    )
    vocab_parallel_lm_head: bool | None = key(None, "also split embedding, output projection and loss by vocabulary")
    vocab_parallel_ce_backend: Literal["torch", "liger"] = later("torch", "cross-entropy on a split vocabulary")
    tp: TpSize = key(TpSize, "size", aliases=["tensor_parallel"])
    injection_policy_tuple: list[Any] | None = later(None, "output layers by name")
    preset_model: str | None = later(None, "built-in list of a model family")
    keep_module_on_host: bool = later(False, "split on the host")
    replace_with_kernel_inject: bool = later(False, "replace layers by kernels", aliases=["kernel_inject"])
    partition_config: PartitionConfig = key(PartitionConfig, "how each weight is split")
    plan_file: str | None = key(None, "a written plan, used instead of finding one; checked against the model")


class ExpertParallel(Section):
    """Block `expert_parallel`: division of a mixture's experts over ranks."""

    switch = "size"
    enabled: bool | None = key(None, "divide the experts of the model among ranks; null: where size is above 1")
    size: Int = key(1, "ranks that have the experts of a layer together", ge=1, aliases=["autoep_size"])
    balance: Literal["model", "all_ranks", "window"] = key(
        "model",
        "tokens of the auxiliary loss: those of this rank, as the model has it, those of all ranks, or with the shares "
        "of the window so far",
    )
    bias_update_speed: float | None = key(
        None,
        "after each step, routers' biases (e_score_correction_bias) move by this towards even loads; null: not",
        ge=0,
        aliases=["load_balance_coeff"],
    )
    load: bool | None = key(
        None, "count the tokens of experts by layer; null: where a monitor or the timeline is enabled"
    )
    expert_tensor_parallel_size: Int = later(1, "ranks that share one expert", ge=1)
    validate_folding_routing: bool = later(False, "check the routing")
    async_split_plan: bool = later(False, "plan the exchange ahead")
    preset_model: str | None = later(None, "built-in list of a model family")
    moe_layer_pattern: str | None = later(None, "names of mixture layers")
    expert_pattern: str | None = later(None, "names of experts")
    router_pattern: str | None = later(None, "names of routers")
    use_grouped_mm: bool = later(True, "one grouped product for all experts")
    disable_triton_grouped_mm: bool = later(False, "torch's grouped product only")
    route_norm: bool | None = later(None, "normalise routing weights")
    route_scale: float = later(1.0, "factor on routing weights")
    score_apply: Literal["auto", "pre", "post"] = later("auto", "where routing weights are applied")
    combine_impl: Literal["auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"] = later("auto", "combination")
    row_weighting_impl: Literal["auto", "eager", "fused"] = later("auto", "weighting of rows")
    gate_up_impl: Literal["separate", "fused"] = later("separate", "gate and up projections")
    comm_backend: Literal["comm", "deepep"] = later("comm", "transport of tokens")
    comm_num_sm: Int = later(12, "multiprocessors for transport", ge=1)
    comm_qp_margin: Int = later(4, "spare queue pairs", ge=0)
    comm_max_tokens_per_rank: Int = later(0, "largest number of tokens; 0 is measured", ge=0)
    num_expert_groups: Int | None = later(None, "groups of experts")
    num_limited_groups: Int | None = later(None, "groups a token may reach")
    score_func: Literal["auto", "softmax", "sigmoid"] = later("auto", "routing score")
    top_k: Int | Literal["auto"] = later("auto", "experts per token")
    routed_scaling_factor: float | Literal["auto"] = later("auto", "factor on the experts' output")
    expert_w1: str | None = later(None, "name of the first expert weight")
    expert_w2: str | None = later(None, "name of the second expert weight")
    expert_w3: str | None = later(None, "name of the third expert weight")
    num_experts_attr: str | None = later(None, "attribute that counts experts")
    top_k_attr: str | None = later(None, "attribute that counts experts per token")
    has_shared_experts: bool | None = later(None, "the model has shared experts")
    shared_experts_pattern: str | None = later(None, "names of shared experts")
    shared_experts_gate_pattern: str | None = later(None, "names of the shared experts' gate")
    expert_activation: str | None = later(None, "activation of an expert")


class HybridEngine(Section):
    """Block `hybrid_engine`: training and generation with the same weights."""

    switch = "enabled"
    enabled: bool = key(False, "generate() of the engine and its module runs over the weights in training")
    max_out_tokens: Int = key(512, "largest number of tokens of prompt and answer, if given; else the model's", ge=1)
    inference_tp_size: Int = key(
        1,
        "neighbouring ranks that cut the matrices for generation and answer the prompts of all of them together",
        ge=1,
    )
    release_inference_cache: bool = key(False, "give the memory of the KV cache back after each generation")
    pin_parameters: bool = key(
        True, "stage 3: gather the whole model once for a generation, instead of layer by layer in every pass"
    )
    tp_gather_partition_size: Int = key(
        8, "stage 3 with inference_tp_size above 1: layers gathered at a time, of which slices are kept", ge=1
    )
    enable_cuda_graph: bool = key(False, "on a GPU, capture passes of next tokens as CUDA graphs where kernels suffice")


class WeightQuantization(Section):
    """Block `weight_quantization`: quantized weights for inference under ZeRO."""

    quantized_initialization: dict[str, Any] | None = key(
        None, "pack every Linear, Embedding and stack of experts: num_bits 8 or 4, group_size, group_dim, symmetric"
    )
    post_init_quant: dict[str, Any] | None = key(None, "the same keys under parts of the names of layers")


_PREDICTED = "all plans are predicted without a run, the best are tried"
_WITHOUT_VALUES = "the model itself is run without values"
_STAYS = "the global batch stays as it is"


class Autotuning(Section):
    open_names = True
    switch = "enabled"
    enabled: bool = key(False, "`deepspeed --autotuning` may search for the best plan")
    fast: bool = moot(True, "stage and micro-batch only", _PREDICTED)
    results_dir: str = key("autotuning_results", "folder of results")
    exps_dir: str = key("autotuning_exps", "folder of trials")
    overwrite: bool = key(True, "repeat trials that already have results")
    start_profile_step: Int = key(3, "first measured update", ge=1)
    end_profile_step: Int = key(5, "last measured update; a trial ends there", ge=1)
    metric: Literal["throughput", "latency", "flops"] = key(
        "throughput", "named in the results; the global batch stays, so all three choose the same plan"
    )
    metric_path: str | None = key(None, "a trial's file of figures; a run with it is a trial and ends after it")
    tuner_type: Literal["gridsearch", "random", "model_based"] = moot("gridsearch", "order of trials", _PREDICTED)
    tuner_early_stopping: Int = moot(5, "trials without gain before it ends", "at most five trials are run", ge=0)
    tuner_num_trials: Int = key(50, "maximum number of trials; more than five are never run", ge=1)
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
    """Block `elasticity`: a batch size that is valid for many device counts."""

    switch = "enabled"
    enabled: bool = key(False, "choose a batch that fits many device counts")
    max_train_batch_size: Int = key(2000, "largest global batch", ge=1)
    micro_batch_sizes: list[Int] = key([2, 4, 6], "micro-batches to choose from")
    min_gpus: Int = key(1, "fewest devices", ge=1)
    max_gpus: Int = key(10000, "maximum number of devices", ge=1)
    min_time: Int = key(0, "minutes between changes", ge=0)
    prefer_larger_batch: bool = key(True, "the larger of equal batches")
    ignore_non_elastic_batch_info: bool = key(False, "batch keys may be present")
    num_gpus_per_node: Int = key(1, "devices per node", ge=1)
    model_parallel_size: Int = key(1, "model-parallel ranks", ge=1)
    version: float = key(0.2, "0.1 counts devices, 0.2 whole nodes")


class SparseAttention(Section):
    """Block `sparse_attention`: block-sparse attention layouts."""

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
