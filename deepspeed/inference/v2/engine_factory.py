"""Functions that load a model and build an `InferenceEngineV2`."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from deepspeed.errors import CheckpointError, CheckpointMissingError
from deepspeed.foundation.log import logger
from deepspeed.inference.v2.config_v2 import RaggedInferenceEngineConfig, check_supported
from deepspeed.inference.v2.engine_v2 import ENGINE_FILE, InferenceEngineV2


def build_hf_engine(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """Build an engine for a causal LM of Transformers, also from a folder written by `InferenceEngineV2.serialize`.

    Args:
        path: a folder, or a name on the Hugging Face Hub; weights keep their dtype.
        engine_config: limits and memory; None: defaults.
        debug_level: log level of the package's logger.

    Raises:
        CheckpointError: Transformers cannot load a causal LM from there; the message has its error.
        NotAvailableError: the model cannot be batched, or a key requests a feature that this version does not have.
        MemoryExhaustedError: no memory is left for the KV cache.
    """
    logger.setLevel(debug_level)
    if (Path(path) / ENGINE_FILE).exists():
        return build_engine_from_ds_checkpoint(path, engine_config, debug_level)
    return _load(path, "auto", engine_config)


def build_engine_from_ds_checkpoint(
    path: str, engine_config: RaggedInferenceEngineConfig, debug_level: int = logging.INFO
) -> InferenceEngineV2:
    """Build an engine from a folder written by `InferenceEngineV2.serialize`, in the dtype that it had.

    Args:
        path: the folder.
        engine_config: limits and memory; None: defaults.
        debug_level: log level of the package's logger.

    Raises:
        CheckpointMissingError: the folder was not written by `serialize`.
        CheckpointError, NotAvailableError, MemoryExhaustedError: as in `build_hf_engine`.
    """
    logger.setLevel(debug_level)
    file = Path(path) / ENGINE_FILE
    if not file.exists():
        raise CheckpointMissingError(f"{path} has no {ENGINE_FILE}; write it with InferenceEngineV2.serialize")
    return _load(path, getattr(torch, json.loads(file.read_text())["dtype"]), engine_config)


def _load(path: str, dtype: Any, config: RaggedInferenceEngineConfig | None) -> InferenceEngineV2:
    from transformers import AutoModelForCausalLM

    config = config or RaggedInferenceEngineConfig()
    check_supported(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError, KeyError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if config.lossless_weights is None:  # no other owner of the model exists
        config = config.model_copy(update={"lossless_weights": True})
    return InferenceEngineV2(model, config)
