"""Names that public programs import, each by what it does. docs/names.md is the list."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.errors import ArgumentError, CheckpointError, LaunchError

CONSTANTS: dict[str, dict[str, Any]] = {
    "deepspeed.checkpoint.constants": {
        "ZERO_STAGE": "zero_stage",
        "SINGLE_PARTITION_OF_FP32_GROUPS": "single_partition_of_fp32_groups",
        "PARTITION_COUNT": "partition_count",
        "PARAM_SHAPES": "param_shapes",
        "OPTIMIZER_STATE_DICT": "optimizer_state_dict",
        "FROZEN_PARAM_SHAPES": "frozen_param_shapes",
        "FROZEN_PARAM_FRAGMENTS": "frozen_param_fragments",
        "FP32_FLAT_GROUPS": "fp32_flat_groups",
        "DS_VERSION": "ds_version",
        "BUFFER_NAMES": "buffer_names",
    },
    "deepspeed.checkpoint": {
        "VOCABULARY_PARAMETER_PATTERNS": "vocabulary_parameter_patterns",
        "UNIVERSAL_CHECKPOINT_VERSION_VALUE": 0.4,
        "UNIVERSAL_CHECKPOINT_VERSION_KEY": "universal_checkpoint_version",
        "UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
        "TP_REPLICATED_PARAMETER_PATTERNS": "tp_replicated_parameter_patterns",
        "PIPELINE_REPLICATED_PARAMETER_PATTERNS": "pipeline_replicated_parameter_patterns",
        "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS": "parameter_with_row_parallelism_patterns",
        "PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0": "parameter_with_2_sub_params_cat_dim_0",
        "PADDED_VOCAB_SIZE": "padded_vocab_size",
        "ORIGINAL_VOCAB_SIZE": "original_vocab_size",
    },
    "deepspeed.checkpoint.deepspeed_checkpoint": {"CHECKPOINT_INFO_KEY": "checkpoint_info", "ARGS_KEY": "args"},
    "deepspeed.constants": {
        "TORCH_DISTRIBUTED_DEFAULT_PORT": 29500,
        "CROSS_SIZE": "CROSS_SIZE",
        "CROSS_RANK": "CROSS_RANK",
    },
    "deepspeed.runtime.config": {"LAMB_OPTIMIZER": "lamb", "ADAM_OPTIMIZER": "adam", "MUON_OPTIMIZER": "muon"},
}


@pytest.mark.parametrize(
    ("module", "name", "value"), [(m, name, value) for m, rows in CONSTANTS.items() for name, value in rows.items()]
)
def test_a_constant_has_the_value_that_files_and_programs_know(module: str, name: str, value: Any) -> None:
    assert getattr(importlib.import_module(module), name) == value


def test_the_names_of_optimizers_are_types_of_the_json() -> None:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, LAMB_OPTIMIZER

    assert LAMB_OPTIMIZER in DEEPSPEED_OPTIMIZERS and len(set(DEEPSPEED_OPTIMIZERS)) == 6


def test_files_of_a_rank_by_name() -> None:
    from deepspeed.checkpoint import (
        get_layer_ckpt_name_for_rank,
        get_model_ckpt_name_for_rank,
        get_zero_ckpt_name_for_rank,
    )

    assert get_zero_ckpt_name_for_rank("d", 3, 1) == "d/zero_pp_rank_3_mp_rank_01_optim_states.pt"
    assert get_model_ckpt_name_for_rank("d", "02") == "d/mp_rank_02_model_states.pt"
    assert get_layer_ckpt_name_for_rank("d", 5, 0) == "d/layer_05-model_00-model_states.pt"


def test_the_writer_and_reader_of_one_file(tmp_path: Path) -> None:
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine

    engine = torch_checkpoint_engine.TorchCheckpointEngine()
    engine.makedirs(str(tmp_path / "a" / "b"), exist_ok=True)
    path = str(tmp_path / "a" / "b" / "states.pt")
    state = {"weight": torch.arange(4.0), "step": 3, "names": ["a"]}
    engine.create("tag")
    engine.save(state, path)
    loaded = engine.load(path, map_location="cpu")
    assert torch.equal(loaded["weight"], state["weight"]) and (loaded["step"], loaded["names"]) == (3, ["a"])
    assert engine.commit("tag")


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_a_file_with_code_in_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    monkeypatch.chdir(tmp_path)
    torch.save({"a": _Runs()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="run code of the file"):
        TorchCheckpointEngine().load(str(tmp_path / "bad.pt"))
    (tmp_path / "half.pt").write_bytes(b"PK\3\4half")
    with pytest.raises(CheckpointError, match=r"half\.pt"):
        TorchCheckpointEngine().load(str(tmp_path / "half.pt"))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        TorchCheckpointEngine().load(str(tmp_path / "none.pt"))


def test_random_states_by_their_old_names() -> None:
    import deepspeed
    from deepspeed.runtime.activation_checkpointing.checkpointing import (
        _CUDA_RNG_STATE_TRACKER,
        _MODEL_PARALLEL_RNG_TRACKER_NAME,
        _set_cuda_rng_state,
        get_cuda_rng_tracker,
    )

    assert _CUDA_RNG_STATE_TRACKER is get_cuda_rng_tracker() is deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER
    assert deepspeed.checkpointing._MODEL_PARALLEL_RNG_TRACKER_NAME == _MODEL_PARALLEL_RNG_TRACKER_NAME
    before = _CUDA_RNG_STATE_TRACKER.get_states()
    try:
        _CUDA_RNG_STATE_TRACKER.reset()
        _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, 5)
        with _CUDA_RNG_STATE_TRACKER.fork():
            drawn = torch.rand(3)
        assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    finally:
        _CUDA_RNG_STATE_TRACKER.set_states(before)
    state = torch.get_rng_state()
    first = torch.rand(2)
    _set_cuda_rng_state(state)
    assert torch.equal(torch.rand(2), first)


def test_inputs_are_detached_and_ask_as_before() -> None:
    from deepspeed.runtime.activation_checkpointing.checkpointing import detach_variable

    source = torch.ones(2, requires_grad=True)
    asks, plain, number = detach_variable((source * 2, torch.ones(2), 3))
    assert (asks.is_leaf, asks.requires_grad, plain.requires_grad, number) == (True, True, False, 3)
    assert torch.equal(asks, source.detach() * 2)
    with pytest.raises(ArgumentError, match="a tuple"):
        detach_variable([source])  # pyright: ignore[reportArgumentType]


def test_the_level_of_the_log_by_name() -> None:
    from deepspeed.utils import logger, set_log_level_from_string

    other, before = logging.getLogger("of a script"), logger.level
    set_log_level_from_string("ERROR", other)
    assert (other.level, logger.level) == (logging.ERROR, before)
    try:
        set_log_level_from_string("debug")
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
    with pytest.raises(ArgumentError, match="'loud' is none of debug, info"):
        set_log_level_from_string("loud")


def test_marks_of_slices() -> None:
    from deepspeed.runtime.utils import is_model_parallel_parameter

    param = torch.nn.Parameter(torch.ones(1))
    assert is_model_parallel_parameter(param) is False
    param.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
    assert is_model_parallel_parameter(param) is True


def test_an_operator_is_called_on_lists() -> None:
    from deepspeed.ops.adam.multi_tensor_apply import MultiTensorApply

    assert MultiTensorApply(2048)(lambda *args: args, "flag", [[1], [2]], 0.5) == (2048, "flag", [[1], [2]], 0.5)


def test_rocm_is_told() -> None:
    from deepspeed.ops.op_builder.builder import OpBuilder

    assert OpBuilder.is_rocm_pytorch() is (torch.version.hip is not None)


def test_parts_of_a_model_without_experts() -> None:
    from deepspeed.moe.utils import (
        has_moe_layers,
        is_moe_param,
        is_moe_param_group,
        split_params_into_different_moe_groups_for_optimizer,
        split_params_into_shared_and_expert_params,
    )

    model = torch.nn.Linear(2, 2)
    group = {"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}
    assert split_params_into_different_moe_groups_for_optimizer(group) == [group]
    assert split_params_into_different_moe_groups_for_optimizer((group,)) == [group]
    assert has_moe_layers(model) == (False, 0) and not is_moe_param_group(group)
    model.bias.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]
    assert is_moe_param(model.bias) and not is_moe_param(model.weight)
    shared, experts = split_params_into_shared_and_expert_params(list(model.parameters()))
    assert shared[0] is model.weight and experts[0] is model.bias


def test_hosts_are_chosen_from_counts() -> None:
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    pool = {"one": 4, "two": 2}
    assert parse_inclusion_exclusion(pool, "one:0,2@two", "") == {"one": [0, 2], "two": [0, 1]}
    assert parse_inclusion_exclusion(pool, "", "one") == {"two": [0, 1]}
    with pytest.raises(LaunchError):
        parse_inclusion_exclusion(pool, "three", "")


@pytest.mark.parametrize("size", [7, 64, 5000])
def test_writers_of_files(tmp_path: Path, size: int, capsys: pytest.CaptureFixture[str]) -> None:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig, MockFileWriter, PyFileWriter

    state = {"a": torch.randn(300), "b": torch.arange(9), "c": [1, "two"]}
    config = FastFileWriterConfig(dnvme_handle=None, pinned_tensor=torch.empty(size, dtype=torch.uint8))
    writers = [PyFileWriter(tmp_path / "py.pt"), FastFileWriter(tmp_path / "fast.pt", config)]
    for writer in [*writers, MockFileWriter(tmp_path / "mock.pt")]:
        torch.save(state, writer)
        writer.flush()
        assert writer.fileno() > 2
        writer.close()
        writer.close()
        writer._dump_state()
        with pytest.raises(ArgumentError, match="is closed"):
            writer.write(b"more")
    told = capsys.readouterr().out
    for name in ("py.pt", "fast.pt"):
        loaded = torch.load(tmp_path / name, weights_only=True)
        assert torch.equal(loaded["a"], state["a"]) and loaded["c"] == [1, "two"]
        assert f"{(tmp_path / name).stat().st_size} bytes in" in told
    assert (tmp_path / "mock.pt").stat().st_size == 0  # programs ask for its size


def test_the_address_of_comm_is_comm() -> None:
    import deepspeed.comm
    import deepspeed.comm.comm as address

    assert address is deepspeed.comm
    assert deepspeed.comm.TorchBackend.get_all_gather_function() is deepspeed.comm.all_gather_into_tensor
    assert deepspeed.comm.TorchBackend.get_reduce_scatter_function() is deepspeed.comm.reduce_scatter_tensor


def test_engines_of_pipelines_and_their_base_at_one_address() -> None:
    import deepspeed
    from deepspeed.runtime.pipe.engine import DeepSpeedEngine, PipelineEngine

    assert DeepSpeedEngine is deepspeed.DeepSpeedEngine and issubclass(PipelineEngine, DeepSpeedEngine)


def test_parameters_of_layers_are_counted() -> None:
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(torch.nn.Linear, 4, 3), torch.relu, LayerSpec(torch.nn.Linear, 3, 2, bias=False)]
    assert PipelineModule(layers, num_stages=1)._count_layer_params() == [15, 0, 6]
