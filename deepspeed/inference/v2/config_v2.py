"""Configuration of `InferenceEngineV2`."""

from __future__ import annotations

from pydantic import Field, PositiveInt, field_validator

from deepspeed.config.base_model import DeepSpeedConfigModel
from deepspeed.errors import NotAvailableError
from deepspeed.inference.v2.ragged.manager_configs import DSStateManagerConfig


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Section `tensor_parallel`; only tp_size 1 is available, other values raise pydantic.ValidationError."""

    tp_size: PositiveInt = 1

    @field_validator("tp_size")
    @classmethod
    def _one(cls, value: int) -> int:
        if value > 1:
            raise NotAvailableError(f"tensor_parallel.tp_size {value}: this engine runs on one rank; leave it 1")
        return value


class QuantizationConfig(DeepSpeedConfigModel):
    """Section `quantization`: not available; `quantization_mode` must be None, else pydantic.ValidationError."""

    quantization_mode: str | None = None

    @field_validator("quantization_mode")
    @classmethod
    def _none(cls, value: str | None) -> str | None:
        if value is not None:
            raise NotAvailableError(f"quantization.quantization_mode {value!r}: there are no fp6 weights; leave it out")
        return value


class RaggedInferenceEngineConfig(DeepSpeedConfigModel):
    """Configuration of `InferenceEngineV2`. Unknown keys or wrong values raise pydantic.ValidationError.

    Args:
        tensor_parallel: alias `tp`; only one rank is available.
        state_manager: alias `manager`; limits of sequences, tokens and cache memory.
        quantization: not available.
        lossless_weights: pack bf16 matrices in 12 bits, in the model; None: only if `build_hf_engine` loads the model.
    """

    tensor_parallel: DeepSpeedTPConfig = Field(default_factory=DeepSpeedTPConfig, alias="tp")
    state_manager: DSStateManagerConfig = Field(default_factory=DSStateManagerConfig, alias="manager")
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)

    lossless_weights: bool | None = None
