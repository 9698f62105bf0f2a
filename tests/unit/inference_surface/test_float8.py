"""Linear layers in e4m3: rounding, products, which layers of a model become them, and passes of a generator."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import NotAvailableError
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
