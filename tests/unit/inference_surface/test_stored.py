"""Folders of packed integers: what `compression` exports is answered from as it is, in the native products."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import deepspeed
from deepspeed.compression.export import export, packable
from deepspeed.errors import CheckpointError, NotAvailableError
from deepspeed.inference import Generator, Sampling
from deepspeed.inference.native import functions
from deepspeed.inference.quantization.layers import PackedLinear
from deepspeed.inference.quantization.packed import Form
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
    form = Form(bits, 0 if bits == 8 else 32, 1, True)
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
    sampling = Sampling(max_new_tokens=8, ignore_eos=True)
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
        ({f"{name}_shape": torch.tensor([64, 100])}, [], NotAvailableError, "words"),
        ({f"model.embed_tokens.{kind}": state[f"{name}{kind[6:]}"] for kind in ("weight_packed", "weight_scale",
          "weight_shape")}, [], CheckpointError, "no linear layer"),
    ]  # fmt: skip
    for more, fewer, error, text in cases:
        given = {key: value.clone() for key, value in {**state, **more}.items() if key not in fewer}
        save_file(given, tmp_path / "model.safetensors")
        with pytest.raises(error, match=text):
            read(model, tmp_path)
