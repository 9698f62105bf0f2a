"""`zero_optimization`: sharding of the training state over the ranks, and its communication."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any, Literal

from deepspeed.config.base_model import Int, Names, Section, key, later, moot

_IN_PLACE = "gradients are formed in flat buckets at every stage"
_PICKED = "the collective is picked by a fixed table (operation, dtype, size, rank count)"


_CPU_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


class LeafModule(Section):
    """Block `zero_optimization.leaf_module`: modules that are gathered as one unit, with all their submodules."""

    classes: Names = key([], "class names, short or with their module path")
    names: Names = key([], "qualified module names")
    name_suffixes: Names = key([], "endings of qualified module names")


class OffloadParam(Section):
    """Block `zero_optimization.offload_param`: storage of parameters between uses."""

    switch = "device"
    device: Literal["none", "cpu", "nvme"] = key(
        "none", "tier of parameters between uses at stage 3; no effect at lower stages"
    )
    nvme_path: str | None = key(None, "folder on a local disk; needed with nvme")
    pin_memory: bool = key(True, "page-locked host memory, where there is a device")
    buffer_count: Int = key(5, "maximum number of reads ahead, and of writes behind, with nvme", ge=1)
    buffer_size: Int = moot(int(1e8), "elements per NVMe buffer", "a buffer has the size of its shard", ge=0)
    max_in_cpu: Int = key(int(1e9), "elements of each rank that stay in host memory with nvme", ge=0)


class OffloadOptimizer(Section):
    """Block `zero_optimization.offload_optimizer`: storage of master weights and optimizer state."""

    switch = "device"
    device: Literal["none", "cpu", "nvme"] = key(
        "none", "tier of master weights, gradient sums and optimizer state, which are updated there; stages 1 to 3"
    )
    nvme_path: str | None = key(None, "folder on a local disk; needed with nvme")
    pin_memory: bool = key(True, "page-locked host memory, where there is a device")
    buffer_count: Int = key(4, "maximum number of reads ahead, and of writes behind, with nvme", ge=1)
    pipeline_read: bool = key(True, "read the next group while this one is updated")
    pipeline_write: bool = key(True, "write the last group while this one is updated")
    fast_init: bool = moot(False, "create optimizer state in place", "state is created group by group, in its tier")
    ratio: float = key(1.0, "share of the elements whose state is offloaded; whole groups", ge=0, le=1)
    super_offload: bool = later(False, "overlap the host's update with backward")
    cpuadam_cores_perc: float = later(0.8, "share of the cores for the host's update", ge=0, le=1)


class ZenFlow(Section):
    """Block `zero_optimization.zenflow`: important columns are updated on the device at once, others on the host."""

    topk_ratio: float = later(0.1, "share of columns updated on the device", gt=0, lt=1)
    select_strategy: Literal["auto", "step", "epoch"] = later("auto", "when columns are selected anew")
    select_interval: Int | Literal["auto"] = later("auto", "steps or epochs between selections")
    update_interval: Int | Literal["auto"] = later("auto", "steps between the host's updates")
    overlap_step: bool = later(False, "overlap the host's update with training")
    offload: bool = later(False, "keep selected state on the host")
    auto_ratio: float = later(0.99, "threshold of the automatic choice", ge=0, le=1)
    full_warm_up_rounds: Int = later(0, "full updates at the start", ge=0)
    pt_reserved_cores_perc: float = later(0.5, "share of cores kept for PyTorch", ge=0, le=1)
    steps_per_epoch: Int | None = later(None, "steps in one epoch", ge=1)


class Loco(Section):
    """Block `zero_optimization.zeropp_loco_param`: error feedback for quantized gradients."""

    err_beta: float = key(0.8, "weight of the carried error: wire.error_beta", ge=0, lt=1)
    reset_T: Int = key(1024, "steps between resets of the carried error: wire.error_reset", ge=1)


class ZeroStageEnum(IntEnum):
    """ZeRO stages, named by the training state that they shard; each stage includes the previous ones."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class Zero(Section):
    """Block `zero_optimization`: ZeRO stage, offload, buckets and prefetch."""

    @classmethod
    def respelled(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the input with deprecated offload keys moved into the offload blocks."""
        settings = super().respelled(data)
        pin = settings.pop("cpu_offload_use_pin_memory", None)
        for old, new in _CPU_OFFLOAD.items():
            offloaded = settings.pop(old, None)
            if offloaded is not None and new not in settings:
                settings[new] = {
                    "device": "cpu" if offloaded else "none",
                    **({} if pin is None else {"pin_memory": pin}),
                }
        return settings

    stage: Int = key(
        0,
        '0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters are split; "plan": as `ds_plan` has found',
        ge=0,
        le=3,
    )
    reduce_bucket_size: Int = key(int(5e8), "gradient elements reduced together", ge=1)
    allgather_bucket_size: Int = moot(
        int(5e8), "elements gathered together after the step", "groups are all-gathered as they were reduced", ge=0
    )
    overlap_comm: bool | None = key(None, "overlap communication with backward; null lets the stage decide")
    overlap_publish: bool = key(
        False,
        "at stages 1 and 2 on devices, or on several hosts, overlap the all-gather of updated parameters with the next "
        "forward; a promise that parameters are read only in their modules' forward or by torch's functions",
    )
    prefetch_bucket_size: Int = key(
        int(5e7), "elements gathered ahead of use", aliases=["stage3_prefetch_bucket_size"], ge=0
    )
    param_persistence_threshold: Int = key(
        int(1e5),
        "parameters with fewer elements stay gathered",
        aliases=["stage3_param_persistence_threshold"],
        ge=0,
    )
    model_persistence_threshold: Int = key(
        sys.maxsize, "maximum number of elements kept gathered", aliases=["stage3_model_persistence_threshold"], ge=0
    )
    max_live_parameters: Int = key(
        int(1e9), "maximum number of elements gathered at a time", aliases=["stage3_max_live_parameters"], ge=0
    )
    max_reuse_distance: Int = key(
        int(1e9),
        "keep a parameter that is used again within so many elements",
        aliases=["stage3_max_reuse_distance"],
        ge=0,
    )
    gather_16bit_weights_on_model_save: bool = moot(
        False,
        "save_16bit_model gathers whole weights at stage 3",
        "whole weights can be saved at every stage; clients read the flag through its getter",
        aliases=["stage3_gather_16bit_weights_on_model_save"],
        deprecated=["stage3_gather_fp16_weights_on_model_save", "gather_fp16_weights_on_model_save"],
    )
    stage3_fixed_graph: bool = key(
        False,
        "a promise that all ranks always run the same modules in the same order, so they need not compare it",
        aliases=["fixed_graph"],
    )
    stage3_check_order: bool = key(
        False, "on devices, compare the order of gathers in every step, not only in the first ten and where it changes"
    )
    compute_grad_norm: bool = key(True, "false skips the global gradient norm; needs gradient_clipping 0")
    ignore_unused_parameters: bool = key(True, "false: a parameter without a gradient is an error")
    leaf_module: LeafModule = key(LeafModule, "modules fetched as one unit")
    mics_shard_size: Int = key(-1, "ranks that share one copy of the state (hybrid sharding); -1 is all", ge=-1)
    mics_hierarchical_params_gather: bool = later(False, "gather within a node first")
    load_from_fp32_weights: bool = key(
        True, "masters are loaded as they were saved; false: as the 16-bit parameters made of them"
    )
    override_module_apply: bool = key(True, "zero.Init gathers parameters inside Module.apply")
    offload_param: OffloadParam = key(OffloadParam, "where parameters rest")
    offload_optimizer: OffloadOptimizer = key(OffloadOptimizer, "where optimizer state rests")

    contiguous_gradients: bool = moot(True, "copy gradients into one buffer", _IN_PLACE)
    reduce_scatter: bool = moot(True, "reduce-scatter rather than all-reduce", _PICKED)
    allgather_partitions: bool = moot(True, "all-gather rather than broadcasts", _PICKED)
    use_multi_rank_bucket_allreduce: bool = moot(True, "several owners in one bucket", _PICKED)
    allgather_sequential: bool = moot(
        False, "gather one parameter after the other", _PICKED, aliases=["stage3_allgather_sequential"]
    )
    use_all_reduce_for_fetch_params: bool = moot(
        False, "gather by all-reduce", _PICKED, aliases=["stage3_use_all_reduce_for_fetch_params"]
    )
    sub_group_size: Int = moot(int(1e9), "elements updated at a time", "the update runs group by group", ge=0)
    round_robin_gradients: bool = moot(
        False, "spread gradient copies over ranks", "every rank owns an equal slice of every group"
    )
    elastic_checkpoint: bool = moot(False, "load with another rank count", "every checkpoint loads on any topology")
    legacy_stage1: bool = moot(False, "the old stage 1", "one mechanism serves all stages")
    grad_hooks: bool = moot(True, "reduce from gradient hooks", _IN_PLACE)
    parameter_alignment: bool = moot(False, "align slices", "shards begin at aligned places")
    module_granularity_threshold: Int = moot(
        0,
        "fetch fine-grained module trees as one unit",
        "small modules are in the group of their block; see leaf_module",
        aliases=["stage3_module_granularity_threshold"],
        ge=0,
    )
    memory_efficient_linear: bool = moot(
        True, "a linear layer that saves no gathered weight", "autograd never keeps gathered storage"
    )
    log_trace_cache_warnings: bool = moot(False, "warn when the fetch order changes", "there is no recorded order")
    enable_sanity_checks: bool = moot(False, "check gathers and frees", "the checks are always on")

    pipeline_loading_checkpoint: bool = later(False, "read a checkpoint while updating")
    save_muon_momentum_buffer_in_memory: bool = later(False, "keep Muon's momentum in memory with NVMe")
    zero_hpz_partition_size: Int = key(
        1, "ranks of a host that keep the values of a forward for later gathers (stage 3); 1 or 0: off", ge=0
    )
    zero_quantized_weights: bool = key(False, 'all-gathers in int8 between hosts: wire.weights = "int8"')
    zero_quantized_nontrainable_weights: bool = key(False, 'the same for frozen weights: wire.frozen_weights = "int8"')
    zero_quantized_gradients: bool = key(False, 'gradients in int4 between hosts: wire.gradients = "int4"')
    zeropp_loco_param: Loco = key(Loco, "error feedback for quantized gradients")
    zenflow: ZenFlow | None = later(None, "importance-aware asynchronous updates")


def get_zero_config(param_dict: dict[str, Any]) -> Zero:
    """Return the ZeRO section of a configuration dict (the whole JSON).

    Raises:
        pydantic.ValidationError: a name, type or value is wrong.
    """
    block: Any = param_dict.get("zero_optimization") or {}
    return Zero.model_validate({"stage": int(block)} if isinstance(block, bool) else block)
