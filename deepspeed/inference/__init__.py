"""Generation: any causal language model, continuous batching, paged KV cache, equal to the model's own `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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

_PLACES = {
    "Generator": "generator",
    "EngineStats": "generator",
    "Load": "generator",
    "why_not_batchable": "generator",
    "packable": "generator",
    "Logprob": "request",
    "Output": "request",
    "Request": "request",
    "SamplingParams": "sampling_params",
    "Sampling": "sampling_params",
    "DeepSpeedTPConfig": "v2",
    "InferenceEngineV2": "v2",
    "RaggedInferenceEngineConfig": "v2",
    "build_engine_from_ds_checkpoint": "v2",
    "build_hf_engine": "v2",
}
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


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
