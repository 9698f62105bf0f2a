"""Import paths and names of upstream DeepSpeed: one table, and the import finder that implements the table.

A row of `ADDRESSES` is a module, its names and the modules that define them. Names are looked up on first use, so
importing the module costs nothing. Modules without a file are created when they are imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import CodeType, ModuleType
from typing import Any

from deepspeed.errors import NotAvailableError

# module: {where its names are defined: the names, `name=original` where it has another one there}.
# "" stands for the module itself: the names are its submodules.
ADDRESSES: dict[str, dict[str, str]] = {
    "deepspeed": {
        "deepspeed.engine.initialize": "initialize add_config_arguments",
        "deepspeed.comm.process_groups.init": "init_distributed",
        "deepspeed.engine.engine": "DeepSpeedEngine DeepSpeedHybridEngine",
        "deepspeed.engine.pipeline_engine": "PipelineEngine",
        "deepspeed.pipe": "PipelineModule",
        "deepspeed.data.loader": "DeepSpeedDataLoader",
        "deepspeed.config": "DeepSpeedConfig",
        "deepspeed.errors": "DeepSpeedConfigError",
        "deepspeed.zero.optimizer.optimizer": "DeepSpeedOptimizer=ZeroOptimizer",
        "deepspeed.tensor_parallel.init": "tp_model_init set_autotp_mode",
        "deepspeed.inference.engine": "init_inference InferenceEngine",
        "deepspeed.inference.config": "DeepSpeedInferenceConfig default_inference_config",
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.foundation.log": "log_dist logger",
        "deepspeed.foundation.script_helpers": "OnDevice",
        "deepspeed": "dist=comm",
        "": "zero checkpointing comm utils ops pipe runtime accelerator errors inference moe",
    },
    "deepspeed.checkpoint": {
        "deepspeed.checkpoint.compat.upstream_names": (
            "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank "
            "ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
            "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
            "TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY "
            "UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS"
        ),
    },
    "deepspeed.checkpoint.constants": {
        "deepspeed.checkpoint.compat.upstream_names": (
            "BUFFER_NAMES DS_VERSION FP32_FLAT_GROUPS FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES "
            "OPTIMIZER_STATE_DICT PARAM_SHAPES PARTITION_COUNT SINGLE_PARTITION_OF_FP32_GROUPS ZERO_STAGE "
            "ORIGINAL_VOCAB_SIZE PADDED_VOCAB_SIZE PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
            "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
            "TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO UNIVERSAL_CHECKPOINT_VERSION_KEY "
            "UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS"
        ),
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": {
        "deepspeed.checkpoint.compat.upstream_names": "ARGS_KEY CHECKPOINT_INFO_KEY ITERATION_KEY",
    },
    "deepspeed.constants": {
        "deepspeed.foundation.script_helpers": "CROSS_RANK CROSS_SIZE LOCAL_RANK TORCH_DISTRIBUTED_DEFAULT_PORT",
    },
    "deepspeed.compression": {
        "deepspeed.compression.compress": "init_compression redundancy_clean student_initialization",
        "deepspeed.compression.scheduler": "compression_scheduler",
        "deepspeed.compression.helper": "convert_conv1d_to_linear",
    },
    "deepspeed.inference": {
        "deepspeed.inference.generator": "EngineStats Generator Load packable why_not_batchable",
        "deepspeed.inference.request": "Logprob Output Request",
        "deepspeed.inference.sampling_params": "Sampling SamplingParams",
        "deepspeed.inference.v2": (
            "DeepSpeedTPConfig InferenceEngineV2 RaggedInferenceEngineConfig build_engine_from_ds_checkpoint "
            "build_hf_engine"
        ),
    },
    "deepspeed.io": {
        "deepspeed.foundation.file_writer": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter",
    },
    "deepspeed.zero": {
        "deepspeed.zero.api.init_context": "Init",
        "deepspeed.zero.api.gathered_parameters": (
            "GatheredParameters register_external_parameter unregister_external_parameter unwrap_model_for_generation"
        ),
        "deepspeed.zero.parameters.ds_attributes": "ZeroParamStatus",
        "deepspeed.zero.layout.units": "set_z3_leaf_modules",
    },
    "deepspeed.moe": {"": "experts layer mappings sharded_moe utils"},
    "deepspeed.ops.adam.multi_tensor_apply": {
        "deepspeed.foundation.script_helpers": "MultiTensorApply",
    },
    "deepspeed.ops.op_builder.all_ops": {"deepspeed.ops.op_builder": "ALL_OPS OpBuilder"},
    "deepspeed.ops.op_builder.builder": {"deepspeed.ops.op_builder": "OpBuilder"},
    "deepspeed.runtime.checkpoint_engine": {},
    "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine": {
        "deepspeed.checkpoint.compat.upstream_names": "TorchCheckpointEngine",
    },
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.config": {
        "deepspeed.config.sections.memory": "DeepSpeedActivationCheckpointingConfig=ActivationCheckpointing",
    },
    "deepspeed.runtime.base_optimizer": {
        "deepspeed.zero.optimizer.optimizer": "DeepSpeedOptimizer=ZeroOptimizer ZeROOptimizer=ZeroOptimizer",
    },
    "deepspeed.runtime.bf16_optimizer": {
        "deepspeed.zero.optimizer.optimizer": "BF16_Optimizer=ZeroOptimizer",
    },
    "deepspeed.runtime.config": {
        "deepspeed.config": "DeepSpeedConfig DeepSpeedConfigError",
        "deepspeed.foundation.script_helpers": (
            "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER DEEPSPEED_OPTIMIZERS LAMB_OPTIMIZER LION_OPTIMIZER "
            "MUON_OPTIMIZER"
        ),
    },
    "deepspeed.runtime.config_utils": {
        "deepspeed.config.base_model": (
            "DeepSpeedConfigModel dict_raise_error_on_duplicate_keys get_dict_param get_list_param get_scalar_param"
        ),
    },
    "deepspeed.runtime.data_pipeline": {},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {"deepspeed.data.curriculum": "CurriculumScheduler"},
    "deepspeed.runtime.data_pipeline.data_routing": {},
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "deepspeed.data.random_ltd": "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd",
    },
    "deepspeed.runtime.data_pipeline.data_sampling": {},
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        "deepspeed.data.analyzer": "DataAnalyzer DistributedDataAnalyzer",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "deepspeed.data.indexed_dataset": (
            "MMapIndexedDataset MMapIndexedDatasetBuilder data_file_path dataset_exists index_file_path "
            "infer_dataset_impl make_builder make_dataset"
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.utils": {
        "deepspeed.data.analysis_files": "split_dataset split_index",
        "deepspeed.data.indexed_dataset": "close_mmap_dataset_builder create_mmap_dataset_builder find_fit_int_dtype",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "deepspeed.data.dynamic_batches": "VariableBatchSizeLR batch_by_seqlens scale_lr",
        "deepspeed.engine.data_sampling": "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    },
    "deepspeed.runtime.dataloader": {
        "deepspeed.data.loader": "DeepSpeedDataLoader RepeatingLoader",
    },
    "deepspeed.runtime.engine": {
        "deepspeed.engine.engine": "DeepSpeedEngine",
    },
    "deepspeed.runtime.fp16": {},
    "deepspeed.runtime.fp16.fused_optimizer": {
        "deepspeed.zero.optimizer.optimizer": "FP16_Optimizer=ZeroOptimizer",
    },
    "deepspeed.runtime.fp16.loss_scaler": {
        "deepspeed.optim.loss_scale": (
            "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT DynamicLossScaler INITIAL_LOSS_SCALE "
            "LossScaler MIN_LOSS_SCALE SCALE_WINDOW"
        ),
    },
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "deepspeed.zero.optimizer.optimizer": "FP16_UnfusedOptimizer=ZeroOptimizer",
    },
    "deepspeed.runtime.hybrid_engine": {"deepspeed.engine.engine": "DeepSpeedHybridEngine"},
    "deepspeed.runtime.lr_schedules": {
        "deepspeed.optim.lr_schedules": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR add_tuning_arguments "
            "get_config_from_args get_lr_from_config get_torch_optimizer override_params parse_arguments"
        ),
    },
    "deepspeed.runtime.pipe": {
        "deepspeed.pipe": "LayerSpec PipelineModule ProcessTopology TiedLayerSpec",
    },
    "deepspeed.runtime.pipe.engine": {
        "deepspeed.engine.engine": "DeepSpeedEngine",
        "deepspeed.engine.pipeline_engine": "PipelineEngine",
        "deepspeed.errors": "PipelineError",
    },
    "deepspeed.runtime.pipe.module": {
        "deepspeed.pipe": "LayerSpec PipelineModule TiedLayerSpec",
    },
    "deepspeed.runtime.pipe.schedule": {
        "deepspeed.pipe.legacy_schedule": (
            "BackwardPass BufferOpInstruction DataParallelSchedule ForwardPass InferenceSchedule LoadMicroBatch "
            "OptimizerStep PipeInstruction PipeSchedule RecvActivation RecvGrad ReduceGrads ReduceTiedGrads "
            "SendActivation SendGrad TrainSchedule"
        ),
    },
    "deepspeed.runtime.pipe.topology": {
        "deepspeed.pipe": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
        "deepspeed.pipe.topology": "PipelineParallelGrid",
    },
    "deepspeed.runtime.precision_config": {
        "deepspeed.config.sections.precision": (
            "DeepSpeedBF16Config=BF16 DeepSpeedFP16Config=FP16 DeepSpeedTorchAutocastConfig=TorchAutocast"
        ),
    },
    "deepspeed.runtime.rollout": {
        "deepspeed.rollouts.rollout_engine": (
            "HybridEngineRollout ResponseTokenBatch RolloutBatch RolloutConfig RolloutEngine RolloutRequest "
            "SamplingConfig build_rollout"
        ),
        "deepspeed.rollouts.losses": "generalized_jsd_loss",
    },
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": {
        "deepspeed.sequence.transformers_adapter": "initialize_sequence_parallel",
        "deepspeed.comm.process_groups.mesh.CURRENT_GROUPS": (
            "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
            "get_sequence_data_parallel_group get_sequence_data_parallel_rank "
            "get_sequence_data_parallel_world_size get_model_parallel_group get_model_parallel_rank "
            "get_model_parallel_world_size get_sequence_parallel_group get_sequence_parallel_rank "
            "get_sequence_parallel_world_size"
        ),
    },
    "deepspeed.runtime.sequence_parallel.ulysses_sp": {
        "deepspeed.sequence.tiled": "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute",
        "deepspeed.sequence.transformers_adapter": "UlyssesSPAttentionHF",
        "deepspeed.sequence.batches": "UlyssesSPDataLoaderAdapter",
    },
    "deepspeed.runtime.utils": {
        "deepspeed.optim.grad_norm": "CheckOverflow clip_grad_norm_ get_global_norm get_grad_norm",
        "deepspeed.foundation.script_helpers": (
            "DummyOptim call_to_str ensure_directory_exists is_model_parallel_parameter move_to_device noop_decorator "
            "set_random_seed"
        ),
        "deepspeed.comm.collectives.torch_api": "all_gather_dp_groups",
        "deepspeed.comm.collectives.partitioned_tensor": "PartitionedTensor",
        "deepspeed.accelerator.instruments": "empty_cache get_ma_status memory_status see_memory_usage",
        "deepspeed.foundation.partition": "partition_balanced partition_uniform",
    },
    "deepspeed.runtime.zero": {
        "deepspeed.zero.api.gathered_parameters": (
            "GatheredParameters register_external_parameter unregister_external_parameter unwrap_model_for_generation"
        ),
        "deepspeed.zero.api.init_context": "Init",
        "deepspeed.zero.parameters.ds_attributes": "ZeroParamStatus ZeroParamType",
    },
    "deepspeed.runtime.zero.config": {
        "deepspeed.config.sections.zero": "DeepSpeedZeroConfig=Zero ZeroStageEnum get_zero_config",
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        "deepspeed.config.sections.zero": "DeepSpeedZeroLeafModuleConfig=LeafModule",
    },
    "deepspeed.runtime.zero.offload_config": {
        "deepspeed.config.sections.zero": (
            "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer DeepSpeedZeroOffloadParamConfig=OffloadParam"
        ),
        "deepspeed.engine.offload_states": "OffloadDeviceEnum OffloadStateTypeEnum",
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "deepspeed.zero.parameters.module_hooks": "DeepSpeedZeRoOffload=ModuleHooks",
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "deepspeed.zero.api.gathered_parameters": (
            "GatheredParameters register_external_parameter unregister_external_parameter"
        ),
        "deepspeed.zero.parameters.ds_attributes": "ZeroParamStatus ZeroParamType",
    },
    "deepspeed.runtime.zero.partitioned_param_profiler": {
        "deepspeed.zero.parameters.all_gather_stats": "PartitionedParameterProfiler",
    },
    "deepspeed.runtime.zero.stage3": {
        "deepspeed.zero.optimizer.optimizer": "DeepSpeedZeroOptimizer_Stage3=ZeroOptimizer",
        "deepspeed.zero.api.memory_estimate": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live"
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "deepspeed.zero.optimizer.optimizer": "DeepSpeedZeroOptimizer=ZeroOptimizer",
        "deepspeed.zero.api.memory_estimate": (
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live"
        ),
    },
    "deepspeed.utils": {
        "deepspeed.foundation.script_helpers": "OnDevice",
        "deepspeed.data.loader": "RepeatingLoader",
        "deepspeed.zero.layout.units": (
            "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module"
        ),
        "deepspeed.comm": "init_distributed",
        "deepspeed.accelerator.instruments": "instrument_w_nvtx",
        "deepspeed.foundation.log": "log_dist logger set_log_level_from_string",
        "deepspeed.zero.api.tensor_access": (
            "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
            "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
            "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
            "safe_set_local_optimizer_state"
        ),
    },
    "deepspeed.utils.comms_logging": {
        "deepspeed.comm.watchdog.comms_logger": "CommsLogger calc_bw_log convert_size trim_mean=trimmed_mean",
    },
    "deepspeed.utils.debug": {
        "deepspeed.profiling.debug_names": (
            "debug_clear_module_and_param_names debug_extract_module_and_param_names debug_module2name "
            "debug_module2name_class debug_module2name_id debug_param2name debug_param2name_id "
            "debug_param2name_id_numel debug_param2name_id_shape debug_param2name_id_shape_device "
            "debug_param2name_id_shape_status ds_id ds_shape log_rank_file print_backward_tensors print_rank "
            "print_rank0 printflock"
        ),
    },
    "deepspeed.utils.groups": {
        "deepspeed.comm.process_groups.mesh.CURRENT_GROUPS": (
            "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
            "get_sequence_data_parallel_group get_sequence_data_parallel_rank "
            "get_sequence_data_parallel_world_size get_model_parallel_group get_model_parallel_rank "
            "get_model_parallel_world_size get_tensor_model_parallel_group get_tensor_model_parallel_rank "
            "get_tensor_model_parallel_world_size get_sequence_parallel_group get_sequence_parallel_rank "
            "get_sequence_parallel_world_size _get_data_parallel_group _get_data_parallel_rank "
            "_get_data_parallel_world_size _get_sequence_data_parallel_group _get_sequence_data_parallel_rank "
            "_get_sequence_data_parallel_world_size _get_model_parallel_group _get_model_parallel_rank "
            "_get_model_parallel_world_size _get_tensor_model_parallel_group _get_tensor_model_parallel_rank "
            "_get_tensor_model_parallel_world_size _get_sequence_parallel_group _get_sequence_parallel_rank "
            "_get_sequence_parallel_world_size _get_broadcast_src_rank"
        ),
        "deepspeed.moe.groups": (
            "initialize _create_expert_and_data_parallel _create_expert_data_and_model_parallel "
            "_get_expert_parallel_group _get_expert_parallel_group_dict _get_expert_parallel_group_ranks "
            "_get_expert_parallel_rank _get_expert_parallel_world_size _get_expert_data_parallel_group "
            "_get_expert_data_parallel_group_dict _get_expert_data_parallel_group_ranks "
            "_get_expert_data_parallel_rank _get_expert_data_parallel_world_size _get_expert_broadcast_src_rank "
            "_get_expert_model_parallel_world_size _get_max_expert_size _get_max_expert_size_name "
            "_get_max_expert_parallel_group"
        ),
    },
    "deepspeed.utils.logging": {
        "deepspeed.foundation.log": "log_dist logger set_log_level_from_string",
    },
    "deepspeed.utils.timer": {
        "deepspeed.engine.metrics": (
            "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_MICRO_TIMER "
            "BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER "
            "STEP_GLOBAL_TIMER STEP_MICRO_TIMER"
        ),
        "deepspeed.foundation.timer": "NoopTimer",
        "deepspeed.accelerator.instruments": "SynchronizedWallClockTimer ThroughputTimer",
    },
    "deepspeed.utils.torch": {
        "deepspeed.foundation.script_helpers": "required_torch_version",
    },
    "deepspeed.utils.zero_to_fp32": {
        "deepspeed.checkpoint.compat.zero_to_fp32": (
            "GatheredTensor convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
            "get_checkpoint_files get_fp32_state_dict_from_zero_checkpoint get_model_state_file "
            "get_model_state_files get_optim_files load_state_dict_from_zero_checkpoint main"
        ),
    },
    "deepspeed.module_inject": {"deepspeed.tensor_parallel.init": "LinearAllreduce LinearLayer set_autotp_mode"},
    "deepspeed.module_inject.layers": {
        "deepspeed.tensor_parallel.init": "LinearAllreduce LinearLayer set_autotp_mode",
    },
    "deepspeed.autotuning": {
        "deepspeed.planner.autotuner": "Autotuner",
    },
}

# modules that are the very modules of the package, so that a name patched there is in use
ALIASES = {
    "deepspeed.checkpointing": "deepspeed.activation_checkpointing.checkpointing",
    "deepspeed.comm.comm": "deepspeed.comm",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "deepspeed.activation_checkpointing.checkpointing",
    "deepspeed.runtime.zero.partition_parameters": "deepspeed.zero.api.init_context",
}

# Names that programs import without a fallback, of features that are not here: each stands for the name until it is
# used. module: (the feature, the names); the module can be imported.
PLACEHOLDERS: dict[str, tuple[str, str]] = {
    "deepspeed.checkpoint": ("checkpoints of Megatron", "DeepSpeedCheckpoint"),
    "deepspeed.checkpoint.deepspeed_checkpoint": ("checkpoints of Megatron", "DeepSpeedCheckpoint"),
    "deepspeed.runtime.state_dict_factory": ("checkpoints of Megatron", "MegatronSDLoader"),
    "deepspeed.sequence.fpdt_layer": (
        "chunks of a sequence",
        "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss",
    ),
}

# Modules and names of features that are not here, and of which programs can do without: the import ends with the
# feature's name, `hasattr` is False.
LATER = {
    "deepspeed.DeepSpeedTransformerConfig": "fused transformer layers",
    "deepspeed.DeepSpeedTransformerLayer": "fused transformer layers",
    "deepspeed.compile": "compiler passes over the graph of a step",
    "deepspeed.linear": "low-rank linear layers",
    "deepspeed.model_implementations": "the inference engine",
    "deepspeed.module_inject.replace_policy": "policies of kernel injection",
    "deepspeed.module_inject.replace_transformer_layer": "policies of kernel injection",
    "deepspeed.ops.sparse_attention": "block-sparse attention layouts",
    "deepspeed.ops.transformer": "fused transformer layers",
    "deepspeed.replace_transformer_layer": "policies of kernel injection",
    "deepspeed.runtime.domino": "tensor parallelism in overlapped halves",
    "deepspeed.runtime.fp16.onebit": "optimizers with one-bit communication",
    "deepspeed.runtime.tensor_parallel": "tensor parallelism",
}


class _Placeholder(type):
    """Metaclass of placeholder classes: calls and attributes raise NotAvailableError, subclassing is allowed."""

    feature: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise not_available(f"{cls.__module__}.{cls.__name__}", cls.feature)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise not_available(f"{cls.__module__}.{cls.__name__}.{name}", cls.feature)


def not_available(name: str, feature: str) -> NotAvailableError:
    """Create the NotAvailableError for an import path or name of a feature that is not available yet."""
    error = NotAvailableError(f"{name} is not available yet: it belongs to {feature}")
    error.name = name
    return error


def names_of(module: str) -> dict[str, tuple[str, str]]:
    """Return (defining module, original name) of each name of a module; for its submodules, ("", name)."""
    rows = [(target, entry) for target, names in ADDRESSES.get(module, {}).items() for entry in names.split()]
    names = {entry.partition("=")[0]: (target, entry.rpartition("=")[2]) for target, entry in rows}
    children = (*ADDRESSES, *ALIASES, *PLACEHOLDERS)
    return names | {
        child: ("", child) for parent, _, child in (c.rpartition(".") for c in children) if parent == module
    }


def serve(module: str) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` for a module in the table, by the module's full name."""
    names = names_of(module)
    feature, listed = PLACEHOLDERS.get(module, ("", ""))
    placeholders = listed.split()

    def look_up(name: str) -> Any:
        if name in placeholders:
            value: Any = _Placeholder(name, (), {"__module__": module, "feature": feature})
        elif name in names:
            target, original = names[name]
            value = _resolve(target, original) if target else importlib.import_module(f"{module}.{original}")
        else:  # `from module import name` asks the finder next, which raises NotAvailableError for what comes later
            later = LATER.get(f"{module}.{name}")
            reason = f"it belongs to {later}, which is not available yet" if later else "there is none"
            raise AttributeError(f"module {module!r} has no attribute {name!r}: {reason}")
        setattr(sys.modules[module], name, value)
        return value

    return look_up, sorted(names)


def _resolve(target: str, name: str) -> Any:
    """Return the attribute `name` of a module, or of an object in a module, given by its dotted path `target`."""
    try:
        return getattr(importlib.import_module(target), name)
    except ModuleNotFoundError as error:
        if error.name != target:
            raise
    owner, _, attribute = target.rpartition(".")
    return getattr(_resolve(owner, attribute), name)


class AddressFinder:
    """Import finder and loader for the table's modules that have no file.

    Python asks this finder before the file finder, which would treat a folder without code (with only `__pycache__`,
    after an update of a checkout) as an empty package.
    """

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module in the table, else None; NotAvailableError (an ImportError) if in `LATER`."""
        if path is None or all(fullname not in table for table in (ADDRESSES, ALIASES, PLACEHOLDERS, LATER)):
            return None  # also of the package itself, which may be found in other ways than by a path
        on_disk = PathFinder.find_spec(fullname, path)
        if on_disk and on_disk.loader:
            return on_disk
        if fullname in LATER:
            raise not_available(fullname, LATER[fullname])
        package = any(row.startswith(f"{fullname}.") for row in (*ADDRESSES, *ALIASES, *PLACEHOLDERS))
        return spec_from_loader(fullname, cls(), origin=f"{fullname.rpartition('.')[2]}.py", is_package=package)  # pyright: ignore[reportArgumentType]

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None, so that Python creates the module."""

    def exec_module(self, module: ModuleType) -> None:
        """Add the table's names to the module; an alias is replaced by its target module."""
        name = module.__name__
        if name in ALIASES:
            original = importlib.import_module(ALIASES[name])
            if name in ADDRESSES:
                original.__getattr__, _ = serve(name)  # pyright: ignore[reportAttributeAccessIssue]
            # another thread that imports this address meanwhile goes on with the module that is replaced
            module.__getattr__ = partial(getattr, original)  # pyright: ignore[reportAttributeAccessIssue]
            sys.modules[name] = original
        else:
            module.__doc__ = f"Names that programs know by this address: {', '.join(names_of(name))}."
            module.__dir__ = lambda: sorted({*vars(module), *names_of(name)})  # pyright: ignore[reportAttributeAccessIssue]
            module.__getattr__, module.__all__ = serve(name)  # pyright: ignore[reportAttributeAccessIssue]

    def get_code(self, fullname: str) -> CodeType:
        """Return code for `python -m` that calls the `main` of the module's row in the table."""
        target, name = names_of(fullname)["main"]
        return compile(f"from {target} import {name} as main\nmain()", f"<{fullname}>", "exec")


def install() -> None:
    """Add `AddressFinder` to Python's import finders, before the others; a second call does nothing."""
    if AddressFinder not in sys.meta_path:
        sys.meta_path.insert(0, AddressFinder)  # pyright: ignore[reportArgumentType]
