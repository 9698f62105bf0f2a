"""Every name the clients look up is there, under the address they use; what is not there yet says so."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from unittest import mock

import pytest
import torch

import deepspeed

NAMES = {
    "deepspeed.ops": "__compatible_ops__ __op_builders__",
    "deepspeed": "initialize init_distributed DeepSpeedEngine zero comm utils checkpointing runtime ops __version__",
    "deepspeed.zero": "Init GatheredParameters register_external_parameter",
    "deepspeed.comm": "is_initialized init_distributed get_rank",
    "deepspeed.utils": "logger groups set_z3_leaf_modules safe_get_full_grad",
    "deepspeed.utils.logging": "logger",
    "deepspeed.utils.groups": "_get_sequence_parallel_group _get_sequence_parallel_world_size "
    "_get_sequence_parallel_rank",
    "deepspeed.utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files",
    "deepspeed.runtime.engine": "DeepSpeedEngine",
    "deepspeed.runtime.base_optimizer": "DeepSpeedOptimizer",
    "deepspeed.runtime.lr_schedules": "VALID_LR_SCHEDULES WarmupLR",
    "deepspeed.runtime.zero": "GatheredParameters partition_parameters",
    "deepspeed.runtime.zero.partition_parameters": "ZeroParamStatus ZeroParamType get_accelerator "
    "zero_wrapper_for_fp_tensor_constructor _orig_torch_arange",
    "deepspeed.runtime.zero.stage_1_and_2": "DeepSpeedZeroOptimizer",
    "deepspeed.runtime.utils": "move_to_device get_ma_status memory_status CheckOverflow PartitionedTensor",
    "deepspeed.checkpoint.utils": "clone_tensors_for_torch_save",
    "deepspeed.launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE fetch_hostfile",
    "deepspeed.runtime.config_utils": "DeepSpeedConfigModel get_scalar_param",
    "deepspeed.runtime.precision_config": "DeepSpeedFP16Config DeepSpeedBF16Config",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig ZeroStageEnum",
    "deepspeed.runtime.zero.offload_config": "DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig "
    "OffloadDeviceEnum OffloadStateTypeEnum",
    "deepspeed.utils.comms_logging": "CommsLogger calc_bw_log convert_size",
    "deepspeed.utils.torch": "required_torch_version",
    "deepspeed.git_version_info": "version torch_info compatible_ops installed_ops accelerator_name",
    "deepspeed.ops.op_builder": "ALL_OPS OpBuilder AsyncIOBuilder CPUAdamBuilder FusedAdamBuilder UtilsBuilder "
    "InferenceBuilder TransformerBuilder QuantizerBuilder",
    "deepspeed.accelerator": "get_accelerator",
    "deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion": "DeepSpeedCPULion",
    "deepspeed.checkpointing": "configure checkpoint",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_resolve(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("deepspeed", "DeepSpeedTransformerLayer"),
    ],
)
def test_a_later_feature_says_so(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"{name} is not available yet"):
        exec(f"from {module} import {name}")
    assert not hasattr(importlib.import_module(module), name)


def test_the_package_is_seen_as_installed() -> None:
    from accelerate.utils import compare_versions, is_deepspeed_available
    from transformers.integrations import is_deepspeed_available as seen_by_transformers

    assert importlib.util.find_spec("deepspeed")
    assert importlib.metadata.version("deepspeed") == deepspeed.__version__
    assert is_deepspeed_available() and seen_by_transformers()
    assert compare_versions("deepspeed", ">=", "0.18.2")


def test_targets_of_lightnings_mocks_are_in_use() -> None:
    for target in ("deepspeed.zero.Init", "deepspeed.init_distributed", "deepspeed.checkpointing.configure"):
        module, name = target.rsplit(".", 1)
        with mock.patch(target) as patched:
            assert getattr(importlib.import_module(module), name) is patched
    assert importlib.import_module("deepspeed.checkpointing") is deepspeed.checkpointing


def test_transformers_wrapper_of_constructors_is_in_use() -> None:
    """A model born under zero.Init asks for its tensors by way of what Transformers put in place."""
    from transformers.integrations.deepspeed import prevent_arange_dtype_change

    from deepspeed.runtime.zero import partition_parameters

    asked = []
    own = partition_parameters.zero_wrapper_for_fp_tensor_constructor

    def wrapper(fn: object, *args: object, **how: object) -> object:
        asked.append(fn)
        return own(fn, *args, **how)  # type: ignore[arg-type]

    before = torch.arange
    with mock.patch.object(partition_parameters, "zero_wrapper_for_fp_tensor_constructor", wrapper):
        with prevent_arange_dtype_change(), deepspeed.zero.Init(dtype=torch.bfloat16):
            assert torch.arange is not before  # Transformers' own
            assert torch.arange(3, dtype=torch.float32).dtype == torch.float32
            made = torch.nn.Linear(2, 2)
    assert torch.arange is before
    assert torch.zeros in asked and torch.arange not in asked
    assert made.weight.dtype == torch.bfloat16
    deepspeed.comm.destroy_process_group()
