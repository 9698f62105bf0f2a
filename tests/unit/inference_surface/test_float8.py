"""Linear layers in e4m3: rounding, products, which layers of a model become them, and passes of a generator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import InputError, NotAvailableError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.quantization.float8 import FLOAT8, LARGEST, Float8Linear, float8_linears, scaled_rows
from tests.unit.inference_surface.models import model, prompt


def drawn(rows: int, width: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_every_value_is_the_nearest_one() -> None:
    known = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FLOAT8).float()
    known = known[known.isfinite()].unique()
    rows = torch.cat([drawn(6, 512), torch.zeros(1, 512), drawn(1, 512) * 1e-30])
    values, scale = scaled_rows(rows)
    wanted = rows / scale
    best = (wanted[..., None] - known).abs().amin(-1)
    assert torch.equal((values.float() - wanted).abs(), best)
    largest = values[:6].float().abs().amax(1)
    assert torch.equal(largest, torch.full_like(largest, LARGEST)) and not values[6].float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product_is_that_of_the_rounded_values(dtype: torch.dtype) -> None:
    layer = Float8Linear(drawn(48, 64), nn.Parameter(drawn(1, 48)[0].to(dtype)))
    inputs = drawn(2 * 3, 64, 2).to(dtype).view(2, 3, 64)
    x, scale = scaled_rows(inputs.view(6, 64))
    wanted = (x.double() * scale.double()) @ (layer.values.view(FLOAT8).double() * layer.scale.double()).T
    assert layer.bias is not None
    wanted = wanted.to(dtype) + layer.bias
    torch.testing.assert_close(layer(inputs), wanted.view(2, 3, 48))
    alone = torch.cat([layer(row[None]) for row in inputs.view(6, 64)])
    torch.testing.assert_close(alone.view(2, 3, 48), layer(inputs))


def test_torch_s_scaled_product_gives_the_same() -> None:
    layer = Float8Linear(drawn(48, 64).bfloat16(), None)
    inputs = drawn(5, 64, 2).bfloat16()
    x, scale = scaled_rows(inputs)
    found = torch._scaled_mm(x, layer.values.view(FLOAT8).t(), scale_a=scale, scale_b=layer.scale.t(),
                             out_dtype=torch.bfloat16)  # fmt: skip
    torch.testing.assert_close(layer(inputs), found)


def test_casts_leave_values_and_scales_alone() -> None:
    layer = Float8Linear(drawn(48, 64), nn.Parameter(torch.zeros(48)))
    before = copy.deepcopy(layer.state_dict())
    layer.to(torch.bfloat16)
    assert torch.equal(layer.values, before["values"]) and torch.equal(layer.scale, before["scale"])
    assert layer.bias is not None and layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    again = Float8Linear(drawn(48, 64, 3), nn.Parameter(torch.ones(48)))
    again.load_state_dict(before)
    assert torch.equal(again.values, before["values"])


@pytest.mark.parametrize(("of_inputs", "of_weight"), [(1e36, 1.0), (1.0, 1e36), (1e36, 1e-36), (1e-36, 1e36)])
def test_a_finite_result_does_not_overflow_on_the_way(of_inputs: float, of_weight: float) -> None:
    inputs, weight = drawn(3, 512, 2) * of_inputs, drawn(16, 512) * of_weight
    wanted = inputs.double() @ weight.double().T
    out = Float8Linear(weight, None)(inputs).double()
    assert (out - wanted).norm() < 0.1 * wanted.norm()


def test_the_result_has_the_inputs_dtype() -> None:
    layer = Float8Linear(drawn(4, 8), nn.Parameter(drawn(1, 4)[0]))
    inputs = drawn(2, 8, 2).bfloat16()
    out = layer(inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, layer(inputs.float()).bfloat16(), atol=0.02, rtol=0.02)


def test_inputs_that_no_linear_layer_takes_are_refused() -> None:
    layer = Float8Linear(drawn(4, 8), None)
    for inputs, words in (
        (torch.ones(2, 8, dtype=torch.int64), r"got torch\.int64"),
        (torch.ones(4, 6), r"width 8, got width 6 of shape \(4, 6\)"),
        (torch.ones(4, 16), "width 8, got width 16"),
        (torch.ones(()), "width 8, got width no"),
    ):
        with pytest.raises(RuntimeError):
            nn.Linear(8, 4)(inputs)
        with pytest.raises(InputError, match=words) as error:
            layer(inputs)
        assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_width_0_gives_the_bias(dtype: torch.dtype) -> None:
    layer = Float8Linear(torch.empty(16, 0), nn.Parameter(torch.arange(16.0)))
    out = layer(torch.empty(2, 3, 0, dtype=dtype))
    assert torch.equal(out, torch.arange(16.0).to(dtype).expand(2, 3, 16)) and out.dtype == dtype


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_are_cast_to_the_dtype_of_the_other_layers(bias: bool) -> None:
    layers = nn.Sequential(nn.Linear(64, 64, bias), nn.LayerNorm(64), nn.Linear(64, 32, bias)).to(torch.bfloat16)
    engine = deepspeed.init_inference(layers, dtype="fp8")
    assert isinstance(layers[0], Float8Linear) and layers[0].scale.dtype == torch.float32
    assert engine(drawn(3, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["llama", "gpt2", "opt"])
def test_fp8_of_any_model(kind: str) -> None:
    plain = model(kind)
    wanted = plain(prompt()).logits
    engine = deepspeed.init_inference(plain, dtype="fp8")
    layers = [m for m in engine.modules() if isinstance(m, Float8Linear)]
    assert layers and (engine(prompt()).logits - wanted).std() < 0.2 * wanted.std()  # 1/32 a factor at most
    assert not isinstance(engine.module.get_output_embeddings(), Float8Linear)
    assert engine.module.get_input_embeddings().weight.dtype in (torch.float32, torch.bfloat16)


def test_a_generator_passes_through_them() -> None:
    llama = model("llama").eval()
    assert float8_linears(llama) == 7 * llama.config.num_hidden_layers
    ids = prompt(1, 6)
    wanted = llama.generate(ids, max_new_tokens=5, do_sample=False)[0, 6:].tolist()
    generator = Generator(llama)
    assert generator.generate([ids[0].tolist()], SamplingParams(max_new_tokens=5, ignore_eos=True)) == [wanted]
    generator.close()


def test_tensor_parallel_is_refused_by_name() -> None:
    with pytest.raises(NotAvailableError, match="float8_e4m3fn"):
        deepspeed.init_inference(model("llama"), dtype="fp8", tensor_parallel={"tp_size": 2})
