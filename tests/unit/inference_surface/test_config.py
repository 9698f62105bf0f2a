"""The keys of `init_inference`: what is taken, what is refused, and by which class of error."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

import deepspeed
from deepspeed.errors import NotAvailableError
from deepspeed.inference.config import DeepSpeedTPConfig, DtypeEnum, default_inference_config


def _config(given: Any = None, **kwargs: Any) -> Any:
    return deepspeed.init_inference(nn.Module(), given, **kwargs)._config


def test_neither_config_nor_keywords_means_defaults() -> None:
    assert _config().model_dump() == default_inference_config()
    assert default_inference_config()["dtype"] is torch.float16
    assert default_inference_config()["max_out_tokens"] == 1024


def test_the_defaults_can_be_handed_back_with_one_changed() -> None:
    given = default_inference_config() | {"dtype": torch.bfloat16}
    assert _config(given).dtype is torch.bfloat16


def test_a_dict_a_path_and_keywords_merge(tmp_path: Path) -> None:
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"dtype": "bf16", "max_tokens": 77}))
    for given in (str(path), path, {"dtype": "bf16", "max_tokens": 77}):
        made = _config(given, min_tokens=3, dtype="bf16")
        assert (made.dtype, made.max_out_tokens, made.min_out_tokens) == (torch.bfloat16, 77, 3)


@pytest.mark.parametrize("given", [3, ["dtype"], torch.float16])
def test_a_config_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="'config' argument expected string or dictionary"):
        _config(given)


def test_a_contradiction_names_the_key() -> None:
    with pytest.raises(ValueError, match="Conflicting argument 'dtype' in 'config'"):
        _config({"dtype": "fp32"}, dtype="bf16")


@pytest.mark.parametrize("given", [{"quantization_setting": 8}, {"tp": {"size": 2}}, {"strict_mode": True}])
def test_unknown_keys_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        _config(given)


def test_auto_is_the_default_at_every_level() -> None:
    made = _config({"dtype": "auto", "tensor_parallel": {"tp_size": "auto"}, "replace_method": "auto"})
    assert (made.dtype, made.tensor_parallel.tp_size, made.replace_method) == (torch.float16, 1, "auto")


@pytest.mark.parametrize(
    ("old", "value", "block", "key"),
    [
        ("mp_size", 2, "tensor_parallel", "tp_size"),
        ("mp_size", 2, "tp", "tp_size"),
        ("ep_size", 2, "moe", "ep_size"),
        ("moe_experts", [4], "moe", "moe_experts"),
    ],
)
def test_an_old_name_beside_its_replacement_is_refused(old: str, value: Any, block: str, key: str) -> None:
    with pytest.raises(AssertionError, match=f"Cannot provide deprecated parameter '{old}'"):
        _config({old: value, block: {key: value}})
    with pytest.raises(AssertionError, match="together"):
        deepspeed.DeepSpeedInferenceConfig(**{old: value, block: {key: value}})


def test_old_names_count_for_new_ones() -> None:
    made = deepspeed.DeepSpeedInferenceConfig(mp_size=2, ep_size=3, tensor_parallel=DeepSpeedTPConfig(tp_grain_size=8))
    assert (made.tensor_parallel.tp_size, made.tensor_parallel.tp_grain_size, made.moe.ep_size) == (2, 8, 3)


def test_aliases() -> None:
    made = deepspeed.DeepSpeedInferenceConfig(
        kernel_inject=True,
        tp={"tp_size": 2},
        max_tokens=5,
        min_tokens=2,
        injection_dict={},
        ckpt_config={"base_dir": "x"},
        args=3,
        tm=True,
        moe={"num_experts": [2]},
    )
    assert made.replace_with_kernel_inject and made.tensor_parallel.tp_size == 2 and made.max_out_tokens == 5
    assert made.min_out_tokens == 2 and made.injection_policy == {} and made.checkpoint_config.base_dir == "x"
    assert made.config == 3 and made.moe.moe_experts == [2]


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        ("fp16 float16 half torch.float16", torch.float16),
        ("fp32 float32 float torch.float32", torch.float32),
        ("bf16 bfloat16 bfloat torch.bfloat16", torch.bfloat16),
        ("int8 torch.int8", torch.int8),
        ("fp8 float8_e4m3fn torch.float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_names_of_dtypes(names: str, dtype: torch.dtype) -> None:
    for name in (*names.split(), dtype, DtypeEnum(dtype)):
        assert deepspeed.DeepSpeedInferenceConfig(dtype=name).dtype is dtype
    assert DtypeEnum(names.split()[0]) is DtypeEnum(dtype)


def test_a_wrong_dtype() -> None:
    with pytest.raises(ValueError, match="none of fp16, fp32, bf16, int8, fp8"):
        _config(dtype="fp99")
    with pytest.raises(ValueError, match="none of"):
        _config(dtype=torch.int32)
    with pytest.raises(TypeError, match="torch dtype or its name"):
        _config(dtype=16)


def test_moe_is_a_switch_or_a_block() -> None:
    assert [_config(moe=given).moe.enabled for given in (False, True, {"enabled": False})] == [False, True, False]
    assert _config(moe={"type": "residual"}).moe.type == "residual"
    with pytest.raises(ValueError, match="'residual' or 'standard'"):
        _config(moe={"type": "dense"})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"moe": {"ep_size": 2}}, "expert parallelism"),
        ({"moe_experts": [8]}, "expert parallelism"),
        ({"zero": {"stage": 3}}, "deepspeed.initialize"),
        ({"mpu": object()}, "mpu"),
        ({"dtype": "int8", "quant": {"weight": {"num_bits": 3}}}, "num_bits 3"),
    ],
)
def test_what_is_not_there_is_refused_by_name(given: dict[str, Any], word: str) -> None:
    with pytest.raises(NotAvailableError, match=word):
        _config(given)


def test_triton_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        _config(use_triton=True)


@pytest.mark.parametrize(
    "key",
    ["enable_cuda_graph", "triton_autotune", "set_empty_params", "transposed_mode"],
)
def test_a_moot_key_says_so_in_one_line(key: str, caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("DeepSpeed")
    log.addHandler(caplog.handler)
    try:
        _config({key: True})
        said = [r.getMessage() for r in caplog.records if key in r.getMessage()]
        _config({key: False})
    finally:
        log.removeHandler(caplog.handler)
    assert len(said) == 1 and "has no effect: " in said[0]
    assert [r.getMessage() for r in caplog.records if key in r.getMessage()] == said


def test_every_key_is_decided() -> None:
    """A key is implemented, moot or refused: none is taken and forgotten."""
    from deepspeed.inference.config import _MOVED, MOOT, DeepSpeedInferenceConfig

    implemented = {
        "replace_with_kernel_inject",
        "lossless_weights",
        "dtype",
        "tensor_parallel",
        "keep_module_on_host",
        "quant",
        "checkpoint",
        "base_dir",
        "save_mp_checkpoint_path",
        "checkpoint_config",
        "injection_policy",
        "config",
        "max_out_tokens",
        "enable_cuda_graph",
    }
    refused = {"zero", "moe"}
    assert implemented | refused | set(MOOT) | set(_MOVED) == set(DeepSpeedInferenceConfig.model_fields)
