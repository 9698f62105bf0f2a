"""Typed configuration of `init_inference`."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, field_validator

from deepspeed.config.base_model import DeepSpeedConfigModel
from deepspeed.errors import ArgumentError, NotAvailableError


class DtypeEnum(Enum):
    """Dtypes of the weights, with their accepted spellings."""

    fp16 = torch.float16, "torch.float16", "fp16", "float16", "half"
    fp32 = torch.float32, "torch.float32", "fp32", "float32", "float"
    bf16 = torch.bfloat16, "torch.bfloat16", "bf16", "bfloat16", "bfloat"
    int8 = torch.int8, "torch.int8", "int8"
    fp8 = torch.float8_e4m3fn, "torch.float8_e4m3fn", "float8_e4m3fn", "fp8"

    def __new__(cls, *spellings: Any) -> DtypeEnum:
        """Use the torch dtype as value and accept every other spelling for the same member."""
        member = object.__new__(cls)
        member._value_ = spellings[0]
        for other in spellings[1:]:
            cls._value2member_map_[other] = member
        return member


class MoETypeEnum(str, Enum):
    """Kinds of mixture of experts: standard, or residual (a dense MLP beside the experts, arXiv:2201.05596)."""

    residual = "residual"
    standard = "standard"


class QuantTypeEnum(str, Enum):
    """Quantization type: symmetric around zero, or asymmetric over the range of the values."""

    asym = "asymmetric"
    sym = "symmetric"


class DeepSpeedTPConfig(DeepSpeedConfigModel):
    """Section `tensor_parallel`: weight matrices are split over groups of neighbouring ranks.

    Attributes:
        tp_size: number of ranks per group; 1: no split.
        tp_group: process group of the `tp_size` neighbouring ranks; None: it is created.
        mpu: not available; must be None.
        enabled: no effect.
        tp_grain_size: no effect.
    """

    enabled: bool = True
    tp_size: int = 1
    tp_grain_size: int = 64
    mpu: Any = None
    tp_group: Any = None


class DeepSpeedMoEConfig(DeepSpeedConfigModel):
    """Section `moe`, expert parallelism: not available here; `ep_size` and `moe_experts` must have their defaults."""

    enabled: bool = True
    ep_size: int = 1
    moe_experts: list[int] = Field(default=[1], alias="num_experts")
    type: MoETypeEnum = MoETypeEnum.standard
    ep_mp_group: Any = None
    ep_group: Any = Field(default=None, alias="expert_group")


class BaseQuantConfig(DeepSpeedConfigModel):
    """Common keys of `quant.weight` and `quant.activation`.

    Attributes:
        enabled: False: `dtype` int8 does not quantize.
        num_bits: 8 or 4.
        q_groups: number of scales per row of a matrix with 8 bits; 1 is used if it does not divide the row, and in the
            output head. No effect with 4 bits.
        q_type: no effect; 8 bits are symmetric, 4 bits asymmetric.
    """

    enabled: bool = True
    num_bits: int = 8
    q_type: QuantTypeEnum = QuantTypeEnum.sym
    q_groups: int = 1


class WeightQuantConfig(BaseQuantConfig):
    """Section `quant.weight`.

    Attributes:
        quantized_initialization: packing format of all layers, for any `dtype`: keys num_bits, group_size, group_dim,
            symmetric (see `PackingFormat`).
        post_init_quant: {part of a layer's name: packing format}; only matching layers are packed.
    """

    quantized_initialization: dict[str, Any] = {}
    post_init_quant: dict[str, Any] = {}


class ActivationQuantConfig(BaseQuantConfig):
    """Section `quant.activation`: no effect; activations are not quantized."""


class QKVQuantConfig(DeepSpeedConfigModel):
    """Section `quant.qkv`: no effect; query, key and value matrices are quantized as all others."""

    enabled: bool = True


class QuantizationConfig(DeepSpeedConfigModel):
    """Section `quant`: weight-only quantization if `dtype` is int8, or if `weight` names packing formats."""

    enabled: bool = True
    activation: ActivationQuantConfig = ActivationQuantConfig()
    weight: WeightQuantConfig = WeightQuantConfig()
    qkv: QKVQuantConfig = QKVQuantConfig()


class InferenceCheckpointConfig(DeepSpeedConfigModel):
    """Section `checkpoint_config`.

    Attributes:
        checkpoint_dir: same as the key `checkpoint`, which has priority.
        save_mp_checkpoint_path: folder to which the weights are written (only with `tp_size` 1); None: not written.
        base_dir: base of relative paths; the key `base_dir` outside of this section has priority. None: the working
            directory, or the folder of a JSON description.
    """

    checkpoint_dir: str | None = None
    save_mp_checkpoint_path: str | None = None
    base_dir: str | None = None


# Deprecated keys, and the section (with its alias) and key that replace them.
_MOVED = {
    "mp_size": ("tensor_parallel", "tp", "tp_size"),
    "mpu": ("tensor_parallel", "tp", "mpu"),
    "ep_size": ("moe", "moe", "ep_size"),
    "ep_group": ("moe", "moe", "ep_group"),
    "ep_mp_group": ("moe", "moe", "ep_mp_group"),
    "moe_experts": ("moe", "moe", "moe_experts"),
    "moe_type": ("moe", "moe", "type"),
}
_DEPRECATED: dict[str, Any] = {
    name: {"deprecated": True, "new_param": f"{block}.{key}"} for name, (block, _, key) in _MOVED.items()
}
# key: reason why values other than the default have no effect
MOOT = {
    "use_triton": "torch's and the native kernels are used",
    "triton_autotune": "torch's and the native kernels are used",
    "triangular_masking": "the model masks as its own code says",
    "set_empty_params": "weights that come from a checkpoint are never filled before",
    "return_tuple": "outputs are the model's own",
    "training_mp_size": "files are read by name, however they were split in training",
    "transposed_mode": "weights keep their layout",
    "replace_method": "it has one value",
    "injection_policy_tuple": "matrices are split by a plan that is compared with the whole model",
    "min_out_tokens": "no workspace is set aside that could be too small",
}


class DeepSpeedInferenceConfig(DeepSpeedConfigModel):
    """Configuration of `init_inference`; docs/init-inference.md describes each key. Keys in `MOOT` have no effect.

    Raises:
        pydantic.ValidationError: a key, type or value is wrong; also a ValueError.
        ArgumentError: a deprecated key and its replacement are both set; also an AssertionError.
        TypeError: `dtype` is neither a torch dtype nor a string.
    """

    replace_with_kernel_inject: bool = Field(default=False, alias="kernel_inject")
    lossless_weights: bool = False
    dtype: Any = torch.float16
    tensor_parallel: DeepSpeedTPConfig = Field(default=DeepSpeedTPConfig(), alias="tp")
    enable_cuda_graph: bool = False
    use_triton: bool = False
    triton_autotune: bool = False
    zero: dict[str, Any] = {}
    triangular_masking: bool = Field(default=True, alias="tm")
    moe: DeepSpeedMoEConfig = DeepSpeedMoEConfig()
    keep_module_on_host: bool = False
    quant: QuantizationConfig = QuantizationConfig()
    checkpoint: str | dict[str, Any] | list[Any] | None = None
    base_dir: str = ""
    set_empty_params: bool = False
    save_mp_checkpoint_path: str | None = None
    checkpoint_config: InferenceCheckpointConfig = Field(default=InferenceCheckpointConfig(), alias="ckpt_config")
    return_tuple: bool = True
    training_mp_size: int = 1
    replace_method: str = Field("auto", json_schema_extra={"deprecated": True})
    injection_policy: dict[Any, Any] | None = Field(default=None, alias="injection_dict")
    injection_policy_tuple: tuple[Any, ...] | None = None
    config: Any = Field(default=None, alias="args")
    max_out_tokens: int = Field(default=1024, alias="max_tokens", ge=1)
    min_out_tokens: int = Field(default=1, alias="min_tokens", ge=0)
    transposed_mode: bool = False
    mp_size: int = Field(1, json_schema_extra=_DEPRECATED["mp_size"])
    mpu: Any = Field(None, json_schema_extra=_DEPRECATED["mpu"])
    ep_size: int = Field(1, json_schema_extra=_DEPRECATED["ep_size"])
    ep_group: Any = Field(default=None, alias="expert_group", json_schema_extra=_DEPRECATED["ep_group"])
    ep_mp_group: Any = Field(default=None, alias="expert_mp_group", json_schema_extra=_DEPRECATED["ep_mp_group"])
    moe_experts: list[int] = Field([1], json_schema_extra=_DEPRECATED["moe_experts"])
    moe_type: MoETypeEnum = Field(MoETypeEnum.standard, json_schema_extra=_DEPRECATED["moe_type"])

    def __init__(self, **keys: Any) -> None:
        fields = DeepSpeedInferenceConfig.model_fields
        # Deprecated keys with a value that requests nothing, such as a default, are dropped.
        keys = {key: value for key, value in keys.items() if key not in _MOVED or value != fields[key].default}
        for old, (block, alias, key) in _MOVED.items():
            if old not in keys or keys[old] == "auto":
                continue
            section = keys.get(block, keys.get(alias))
            if isinstance(section, DeepSpeedConfigModel):
                section = keys[block] = section.model_dump(exclude_unset=True)
            if isinstance(section, Mapping) and section.get(key, "auto") != "auto":
                raise ArgumentError(
                    f"Cannot provide deprecated parameter '{old}' and replacing parameter '{block}.{key}' together"
                )
            if isinstance(section, Mapping):
                if alias != block:
                    keys.pop(alias, None)
                keys[block] = dict(section)
        super().__init__(**keys)

    @field_validator("dtype")
    @classmethod
    def _torch_dtype(cls, value: Any) -> torch.dtype:
        if isinstance(value, DtypeEnum):
            return value.value
        if not isinstance(value, str | torch.dtype):
            raise TypeError(f"dtype: a torch dtype or its name was expected, got {type(value).__name__}")
        try:
            return DtypeEnum(value.lower() if isinstance(value, str) else value).value
        except ValueError:
            names = ", ".join(member.name for member in DtypeEnum)
            raise ValueError(f"dtype {value!r} is none of {names}") from None

    @field_validator("moe", mode="before")
    @classmethod
    def _moe(cls, value: Any) -> Any:
        return DeepSpeedMoEConfig(enabled=value) if isinstance(value, bool) else value

    @field_validator("use_triton")
    @classmethod
    def _triton(cls, value: bool) -> bool:
        if value and importlib.util.find_spec("triton") is None:
            raise ValueError("use_triton: Triton is not installed, and nothing here needs it; leave the key out")
        return value


def default_inference_config() -> dict[str, Any]:
    """Return all keys of `init_inference` with their defaults; `dtype` is a torch dtype."""
    return DeepSpeedInferenceConfig().model_dump()


def merged(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Merge `config` (a dict, the path of a JSON file, or None) with keyword arguments; return all keys.

    Raises:
        ArgumentError: another type, an unreadable file, or one key with two values.
    """
    if config is None:
        keys: dict[str, Any] = {}
    elif isinstance(config, Mapping):
        keys = dict(config)
    elif isinstance(config, str | os.PathLike):
        keys = _read(Path(config))
    else:
        raise ArgumentError(f"'config' argument expected string or dictionary, got {type(config).__name__}")
    for key, value in kwargs.items():
        try:
            same = key not in keys or bool(keys[key] == value)
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays compare element by element
            same = keys[key] is value
        if not same:
            raise ArgumentError(
                f"Conflicting argument '{key}' in 'config':{keys[key]!r} and kwargs:{value!r}; say it once"
            )
    return {**keys, **kwargs}


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"init_inference: config {str(path)!r} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ArgumentError(f"init_inference: config {str(path)!r} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ArgumentError(f"init_inference: {path} holds a {type(loaded).__name__}, not an object")
    return loaded


def no_effect_lines(config: DeepSpeedInferenceConfig) -> list[str]:
    """Return lines of text about the keys that were set but have no effect."""
    default = DeepSpeedInferenceConfig.model_fields
    lines = [
        f"{key} has no effect: {why}"
        for key, why in MOOT.items()
        if key in config.model_fields_set and getattr(config, key) != default[key].default
    ]
    quant = config.quant.model_fields_set
    if config.dtype != torch.int8 and quant - {"weight"}:
        lines.append("quant has no effect: weights become integers where dtype is int8")
    elif config.dtype == torch.int8 and quant & {"activation", "qkv"}:
        lines.append("quant.activation and quant.qkv have no effect: weights are quantized, activations stay floating")
    return lines


def check_supported(config: DeepSpeedInferenceConfig) -> None:
    """Raise NotAvailableError for keys that request unavailable features, ArgumentError for contradictory keys."""
    if config.moe.ep_size > 1 or config.moe.moe_experts != [1]:
        raise NotAvailableError(
            "init_inference: moe.ep_size and moe.moe_experts need expert parallelism, which is not available yet"
        )
    if config.zero.get("stage", 0):
        raise NotAvailableError(
            'init_inference: zero.stage is not available here; deepspeed.initialize(model=model, config={"zero_'
            'optimization": {"stage": 3, …}}) without an optimizer streams the weights, and its module generates'
        )
    if config.tensor_parallel.mpu is not None:
        raise NotAvailableError("init_inference: tensor_parallel.mpu is not available yet; give tp_size or tp_group")
    if config.lossless_weights and not config.replace_with_kernel_inject:
        raise ArgumentError(
            "init_inference: lossless_weights needs replace_with_kernel_inject: native passes read weights in 12 bits, "
            "a model's own layers would unpack them for every call"
        )
    if config.lossless_weights and config.dtype != torch.bfloat16:
        raise ArgumentError(
            f"init_inference: lossless_weights packs bf16, and dtype is {config.dtype}: give dtype=torch.bfloat16, or "
            "leave lossless_weights out"
        )
    if config.lossless_weights and config.tensor_parallel.tp_size > 1:
        raise NotAvailableError("init_inference: lossless_weights together with tensor_parallel.tp_size above 1")
    if config.dtype == torch.float8_e4m3fn and config.tensor_parallel.tp_size > 1:
        raise NotAvailableError("init_inference: dtype float8_e4m3fn together with tensor_parallel.tp_size above 1")
    bits = config.quant.weight.num_bits
    if config.dtype == torch.int8 and bits not in (4, 8):
        raise NotAvailableError(f"init_inference: quant.weight.num_bits {bits}: only 4 and 8 are available")
