"""Folders of packed integers: what `compression` exports is answered from as it is, in the native products."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deepspeed
from deepspeed.compression.export import export, packable
from deepspeed.errors import ArgumentError, CheckpointError, NotAvailableError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.executors.native_tensors import functions, matrix_of
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.inference.quantization.quantization import quantize
from tests.unit.inference.toys import llama, prompts


def stored(model: nn.Module, bits: int) -> dict[str, torch.Tensor]:
    """The state of a model whose linears were packed by us, as compressed-tensors stores it."""
    state = {}
    for name, module in model.named_modules():
        for kind, param in module._parameters.items():
            if param is not None and ".packed" not in name:
                state[f"{name}.{kind}"] = param.detach().clone()
        if isinstance(module, PackedLinear):
            integers = module.packed.integers.detach()
            integers = integers ^ -128 if bits == 8 else integers
            state[f"{name}.weight_packed"] = integers.contiguous().view(torch.int32)
            state[f"{name}.weight_scale"] = module.packed.scale[:, :, 0].clone()
            state[f"{name}.weight_shape"] = torch.tensor(module.packed.shape)
    return state


def packed(model: Any, bits: int) -> Any:
    """A copy with its linears packed: with 8 bits by row, with 4 by 32 inputs."""
    made, chosen = copy.deepcopy(model), set(packable(model))
    form = PackingFormat(bits, 0 if bits == 8 else 32, 1, True)
    quantize(made, lambda name, module: form if name in chosen else None)
    return made


def read(model: Any, source: Path, dtype: torch.dtype = torch.float32) -> Any:
    return deepspeed.init_inference(copy.deepcopy(model), dtype=dtype, checkpoint=str(source)).module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_read_as_they_are_stored(tmp_path: Path, bits: int, dtype: torch.dtype) -> None:
    model = llama()
    want = packed(model.to(dtype), bits)
    save_file(stored(want, bits), tmp_path / "model.safetensors")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    found = read(model, tmp_path, dtype)
    state = found.state_dict()
    assert state.keys() == want.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in want.state_dict().items())
    assert all(a.dtype == b.dtype for a, b in zip(found.parameters(), want.parameters(), strict=True))
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True)
    generators = [Generator(one, cache_bytes=1 << 20) for one in (found, want)]
    one, two = (generator.generate(prompts((5, 17)), sampling) for generator in generators)
    assert one == two
    if functions() is not None:
        assert type(generators[0]._executor).__name__ == "FusedExecutor", generators[0].why


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "layers"), [("int8", 8), ("int4", 4), ("w8a8", 8)])
def test_what_compression_exports(tmp_path: Path, weights: str, layers: int) -> None:
    """In the integers of the folder, next to what Transformers makes of it."""
    from transformers import AutoModelForCausalLM

    pytest.importorskip("compressed_tensors")
    model = llama()
    export(model, model.state_dict(), tmp_path, weights)
    found = read(model, tmp_path)
    forms = [module.packed.form for module in found.modules() if isinstance(module, PackedLinear)]
    assert len(forms) == len(packable(model)) and {form.num_bits for form in forms} == {layers}
    ids = torch.tensor(prompts((24,)))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours, want = found(ids).logits, theirs(ids).logits
        for name in packable(model):
            assert torch.equal(found.get_submodule(name).weight, theirs.get_submodule(name).weight.float()), name
    if weights != "w8a8":  # there theirs rounds inputs to 8 bits, and ours to 15
        assert float((ours - want).abs().max()) < 1e-4 * float(want.abs().max())


def test_parts_that_lack_or_do_not_fit_are_said(tmp_path: Path) -> None:
    model = llama()
    state = stored(packed(model, 8), 8)
    name = next(key for key in state if key.endswith("q_proj.weight_packed")).removesuffix("_packed")
    cases: list[tuple[dict[str, torch.Tensor], list[str], type[Exception], str]] = [
        ({}, [f"{name}_scale"], CheckpointError, "weight_packed.*scales"),
        ({f"{name}_scale": torch.ones(3, 1)}, [], NotAvailableError, "scales"),
        ({f"{name}_zero_point": torch.ones(1)}, [], NotAvailableError, "zero_point"),
        ({f"{name}_scale": torch.tensor(0.1)}, [], NotAvailableError, "scales"),
        ({f"{name}_scale": torch.ones(64, 0)}, [], NotAvailableError, "scales"),
        ({f"{name}_shape": torch.tensor([64, 100])}, [], NotAvailableError, "words"),
        ({f"{name}_shape": torch.tensor([0, 64])}, [], NotAvailableError, "words"),
        ({f"{name}_shape": torch.tensor([64, 0])}, [], NotAvailableError, "words"),
        ({f"{name}_shape": torch.tensor(64)}, [], NotAvailableError, "words"),
        ({f"{name}_packed": state[f"{name}_packed"][:32]}, [], NotAvailableError, "words"),
        ({f"{name}_packed": state[f"{name}_packed"].long()}, [], NotAvailableError, "int64"),
        ({f"{name}": torch.ones(0, 64, dtype=torch.int8)}, [f"{name}_packed", f"{name}_shape"],
         NotAvailableError, "no matrix"),
        ({f"{name.removesuffix('weight')}R4_input.weight": torch.eye(64)}, [], NotAvailableError, "transforms"),
        ({f"{name.removesuffix('weight')}weird": torch.eye(64)}, [], NotAvailableError, "transforms"),
        ({f"model.embed_tokens.{kind}": state[f"{name}{kind[6:]}"] for kind in ("weight_packed", "weight_scale",
          "weight_shape")}, [], CheckpointError, "no linear layer"),
    ]  # fmt: skip
    for more, fewer, error, text in cases:
        given = {key: value.clone() for key, value in {**state, **more}.items() if key not in fewer}
        save_file(given, tmp_path / "model.safetensors")
        with pytest.raises(error, match=text):
            read(model, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_head_is_read_where_nothing_shares_it(tmp_path: Path, tied: bool) -> None:
    model = llama(tie_word_embeddings=tied)
    state = stored(packed(model, 8), 8)
    head = PackedWeight(model.lm_head.weight.detach(), PackingFormat(8, 0, 1, True))
    state.pop("lm_head.weight", None)
    state["lm_head.weight_packed"] = (head.integers ^ -128).contiguous().view(torch.int32)
    state |= {"lm_head.weight_scale": head.scale[:, :, 0].clone(), "lm_head.weight_shape": torch.tensor(head.shape)}
    save_file(state, tmp_path / "model.safetensors")
    if tied:
        with pytest.raises(NotAvailableError, match="'lm_head' is packed.*tie_word_embeddings"):
            read(model, tmp_path)
    else:
        assert torch.equal(read(model, tmp_path).lm_head.weight, head.dense())


def test_transforms_that_the_model_would_need_are_refused(tmp_path: Path) -> None:
    """What they turn may be stored nowhere: Hadamard matrices are made by rule."""
    model = llama()
    save_file(stored(packed(model, 8), 8), tmp_path / "model.safetensors")
    section = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R4": {}}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    with pytest.raises(NotAvailableError, match="transform_config"):
        read(model, tmp_path)
    section["transform_config"] = {}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    read(model, tmp_path)


def test_other_bits_than_the_folder_has_are_refused(tmp_path: Path) -> None:
    model = llama()
    save_file(stored(packed(model, 8), 8), tmp_path / "model.safetensors")
    four = {"num_bits": 4, "group_size": 32}
    for quant in ({"weight": {"num_bits": 4}}, {"weight": {"post_init_quant": {"mlp": four}}}):
        with pytest.raises(ArgumentError, match="packed in 8 bits already.*4 are asked"):
            deepspeed.init_inference(copy.deepcopy(model), dtype=torch.int8, checkpoint=str(tmp_path), quant=quant)
    found = deepspeed.init_inference(copy.deepcopy(model), dtype=torch.int8, checkpoint=str(tmp_path)).module
    assert {module.packed.form.num_bits for module in found.modules() if isinstance(module, PackedLinear)} == {8}


def test_native_products_take_no_matrix_that_is_shorter_than_its_shape() -> None:
    whole = PackedWeight(torch.ones(64, 64), PackingFormat(8, 0, 1, True))
    with pytest.raises(ArgumentError, match="bytes"):
        PackedWeight.of(whole.form, whole.shape, whole.integers[:32], whole.scale, whole.offset, torch.float32)
    for name in ("integers", "scale"):
        short = copy.deepcopy(whole)
        setattr(short, name, nn.Parameter(getattr(short, name)[:32].clone(), False))
        assert "than its shape says" in str(matrix_of(short)), name
