"""Configuration of `InferenceEngineV2`."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from deepspeed.config.base_model import DeepSpeedConfigModel
from deepspeed.errors import NotAvailableError
from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Section `tensor_parallel`; only tp_size 1 is available."""

    tp_size: PositiveInt = 1


class QuantizationConfig(DeepSpeedConfigModel):
    """Section `quantization`: not available; `quantization_mode` has to be None."""

    quantization_mode: str | None = None


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """Configuration of `InferenceEngineV2`. Unknown keys or wrong values raise pydantic.ValidationError.

    Keys of unavailable features raise NotAvailableError in the engine (`check_supported`).

    Attributes:
        tensor_parallel: alias `tp`; only one rank is available.
        state_manager: alias `manager`; limits of sequences, tokens and cache memory.
        quantization: not available.
        lossless_weights: pack bf16 matrices in 12 bits, in the model; None: only if `build_hf_engine` loads the model.
    """

    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    state_manager: DSStateManagerConfig = Field(default_factory=DSStateManagerConfig, alias="manager")
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)

    lossless_weights: bool | None = None


def check_supported(config: RaggedInferenceEngineConfig) -> None:
    """Raise NotAvailableError for keys that request unavailable features; a pydantic validator would convert it."""
    size, mode = config.tensor_parallel.tp_size, config.quantization.quantization_mode
    if size > 1:
        raise NotAvailableError(f"tensor_parallel.tp_size {size}: this engine runs on one rank; leave it 1")
    if mode is not None:
        raise NotAvailableError(f"quantization.quantization_mode {mode!r}: there are no fp6 weights; leave it out")
    if config.state_manager.offload:
        raise NotAvailableError("state_manager.offload: keys and values stay on the device; leave it false")
