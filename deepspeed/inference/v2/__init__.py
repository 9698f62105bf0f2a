"""Interface of DeepSpeed-FastGen: an engine that maps ragged batches to logits; the caller samples and schedules."""

from __future__ import annotations

from deepspeed.inference.v2.config_v2 import DeepSpeedTPConfig, RaggedInferenceEngineConfig
from deepspeed.inference.v2.engine_factory import build_engine_from_ds_checkpoint, build_hf_engine
from deepspeed.inference.v2.engine_v2 import InferenceEngineV2

__all__ = [
    "DeepSpeedTPConfig",
    "InferenceEngineV2",
    "RaggedInferenceEngineConfig",
    "build_engine_from_ds_checkpoint",
    "build_hf_engine",
]
