"""Generation with causal LMs: continuous batching over a paged KV cache, or the model's own `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.foundation.addresses import serve

if TYPE_CHECKING:
    from deepspeed.inference.generator import EngineStats, Generator, Load, packable, why_not_batchable
    from deepspeed.inference.request import Logprob, Output, Request
    from deepspeed.inference.sampling_params import Sampling, SamplingParams
    from deepspeed.inference.v2 import (
        DeepSpeedTPConfig,
        InferenceEngineV2,
        RaggedInferenceEngineConfig,
        build_engine_from_ds_checkpoint,
        build_hf_engine,
    )

__all__ = [
    "DeepSpeedTPConfig",
    "Generator",
    "InferenceEngineV2",
    "EngineStats",
    "Load",
    "Logprob",
    "Output",
    "RaggedInferenceEngineConfig",
    "Request",
    "SamplingParams",
    "Sampling",
    "build_engine_from_ds_checkpoint",
    "build_hf_engine",
    "why_not_batchable",
    "packable",
]
__getattr__, _ = serve(__name__)
