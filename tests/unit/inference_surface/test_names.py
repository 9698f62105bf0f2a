"""Every name that deepspeed-mii 0.3.3 imports, and what its modules ask of them when they are imported."""

from __future__ import annotations

import importlib
import inspect

import pytest

NAMES = {
    "deepspeed": "OnDevice init_distributed init_inference initialize",
    "deepspeed.accelerator": "get_accelerator",
    "deepspeed.inference": "RaggedInferenceEngineConfig build_hf_engine InferenceEngineV2 DeepSpeedTPConfig "
    "build_engine_from_ds_checkpoint",
    "deepspeed.inference.v2": "RaggedInferenceEngineConfig build_hf_engine InferenceEngineV2",
    "deepspeed.inference.v2.ragged": "DSStateManagerConfig MemoryConfig AllocationMode KVCacheConfig",
    "deepspeed.inference.v2.scheduling_utils": "SchedulingResult SchedulingError",
    "deepspeed.inference.config": "DtypeEnum DeepSpeedInferenceConfig DeepSpeedTPConfig DeepSpeedMoEConfig "
    "QuantizationConfig InferenceCheckpointConfig WeightQuantConfig ActivationQuantConfig QKVQuantConfig MoETypeEnum",
    "deepspeed.inference.engine": "InferenceEngine",
    "deepspeed.inference.quantization.quantization": "_init_group_wise_weight_quantization",
    "deepspeed.runtime.config_utils": "DeepSpeedConfigModel",
    "deepspeed.runtime.config": "DeepSpeedConfig",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.launcher.runner": "DLTS_HOSTFILE fetch_hostfile",
    "deepspeed.utils.timer": "SynchronizedWallClockTimer",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_resolve(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_what_clients_look_at() -> None:
    """MII's legacy package asks for a parameter by name, and makes a pydantic field of the enumeration."""
    import deepspeed
    from deepspeed.inference import RaggedInferenceEngineConfig
    from deepspeed.inference.config import DtypeEnum
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    assert list(inspect.signature(deepspeed.init_inference).parameters) == ["model", "config", "kwargs"]

    class Mine(DeepSpeedConfigModel):
        dtype: DtypeEnum = DtypeEnum.fp32
        engine: RaggedInferenceEngineConfig = RaggedInferenceEngineConfig()

    assert Mine().dtype == DtypeEnum.fp32.value or Mine().dtype is DtypeEnum.fp32
    assert DtypeEnum("torch.float16") is DtypeEnum.fp16 and DtypeEnum.fp16.value.itemsize == 2
