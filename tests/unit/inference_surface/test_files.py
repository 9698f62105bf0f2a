"""Files of weights that are not what they should be, and weights that change after the first product."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deepspeed
from deepspeed.errors import CheckpointCorruptError, CheckpointError
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: value.clone() for name, value in model().state_dict().items()}


def matrices_in(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: (100 * value).to(dtype) if value.dim() > 1 else value for name, value in weights().items()}


def loaded(path: Path) -> nn.Module:
    return deepspeed.init_inference(model(), dtype=torch.float32, checkpoint=str(path)).module


@pytest.mark.parametrize("kept", [0, 20, -40], ids=["nothing", "half a header", "all but the end"])
def test_a_file_that_was_cut_off_is_said_to_be(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(weights(), path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointCorruptError, match="model.safetensors cannot be read"):
        loaded(path)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int32])
def test_integers_and_8_bit_floats_are_no_weights_by_themselves(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file(matrices_in(dtype), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'0.weight' is torch.*scales"):
        loaded(tmp_path / "model.safetensors")


def test_other_floating_dtypes_are_cast(tmp_path: Path) -> None:
    save_file({name: value.bfloat16() for name, value in weights().items()}, tmp_path / "model.safetensors")
    found = loaded(tmp_path / "model.safetensors").state_dict()
    assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in weights().items())


@pytest.mark.parametrize("what", [[1, 2], torch.ones(3)], ids=["a list", "a tensor"])
def test_a_file_without_names_is_said_to_be(tmp_path: Path, what: object) -> None:
    torch.save(what, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="not tensors by name"):
        loaded(tmp_path / "model.pt")


@pytest.mark.parametrize("text", ["{bad", "{}", "[]", json.dumps({"weight_map": [1]})])
def test_an_index_that_is_none_is_said_to_be(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="is no index"):
        loaded(tmp_path)


class _Counting(nn.Linear):
    """With a buffer that files hold, and one that they do not."""

    _keys_to_ignore_on_load_unexpected = (r"^old\.",)

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def test_names_that_one_side_alone_has_are_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "seen": torch.ones(1)}

    def said(names: dict[str, torch.Tensor]) -> list[str]:
        save_file(names, tmp_path / "model.safetensors")
        capfd.readouterr()
        deepspeed.init_inference(_Counting(), dtype=torch.float32, checkpoint=str(tmp_path))
        return [line.split("checkpoint: ")[1] for line in capfd.readouterr().err.splitlines() if "checkpoint: " in line]

    assert said({**whole, "old.weight": torch.ones(1)}) == []
    assert said({**whole, "weigth": torch.ones(2), "extra.a": torch.ones(1)}) == [
        "2 tensors in it that the model has no place for are left out, such as ['extra.a', 'weigth']"
    ]
    del whole["seen"]
    assert said(whole) == ["1 buffers of the model are not in it and stay as they are, such as ['seen']"]
    del whole["bias"]
    with pytest.raises(CheckpointError, match="1 parameters are not in it, such as .'bias'"):
        said(whole)


FORMS = {"int8": PackingFormat(8, 0, 1, symmetric=True), "int4": PackingFormat(4, 32, 1)}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_product_is_of_the_weights_as_they_are_now(form: PackingFormat) -> None:
    torch.manual_seed(0)
    packed, other = (PackedWeight(torch.randn(64, 64), form, torch.bfloat16) for _ in range(2))
    inputs = torch.randn(2, 64, dtype=torch.bfloat16)
    assert packed._layout() is not None, "without torch's product there is nothing to go stale"
    before = packed.product(inputs, None)
    packed.load_state_dict(other.state_dict())
    assert torch.equal(packed.product(inputs, None), other.product(inputs, None))
    assert not torch.equal(packed.product(inputs, None), before)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_what_was_packed_in_inference_mode_has_a_product(form: PackingFormat) -> None:
    """Such tensors count no versions, and cannot be changed outside of that mode."""
    with torch.inference_mode():
        packed = PackedWeight(torch.randn(64, 64), form, torch.bfloat16)
        made = packed.product(torch.ones(2, 64, dtype=torch.bfloat16), None)
    assert torch.equal(packed.product(torch.ones(2, 64, dtype=torch.bfloat16), None), made)


def test_a_matrix_in_bf16_is_as_near_as_its_integers_are() -> None:
    torch.manual_seed(0)
    weight = torch.randn(256, 256)
    packed = PackedWeight(weight, PackingFormat(8, 64, 1))
    exact = packed.dense()
    packed.to(torch.bfloat16)
    assert torch.equal(packed.dense(), exact.bfloat16())
