"""Packed weights: the form, the layers over it, and which layers of a model are packed."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deepspeed
from deepspeed.errors import NotAvailableError
from deepspeed.inference.quantization.layers import PackedEmbedding, PackedLinear
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.inference.quantization.quantization import (
    _init_group_wise_weight_quantization,
    quantize_linears,
)
from tests.unit.inference_surface.models import model, prompt

FORMS = [
    PackingFormat(8, 0, 1, True),
    PackingFormat(8, 0, 1),
    PackingFormat(8, 16, 1, True),
    PackingFormat(8, 16, 1),
    PackingFormat(8, 8, 0),
    PackingFormat(8, 0, 0, True),
    PackingFormat(4, 32, 1),
    PackingFormat(4, 32, 1, True),
    PackingFormat(4, 16, 1),
    PackingFormat(4, 8, 0),
    PackingFormat(4, 0, 0),
    PackingFormat(4, 0, 1),
]


def _weight(rows: int = 48, columns: int = 64) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_value_is_within_half_a_step(form: PackingFormat) -> None:
    weight = _weight()
    packed = PackedWeight(weight, form)
    steps = packed.scale.expand(form.groups(weight.shape)).reshape(weight.shape)
    worst = ((packed.dense() - weight).abs() / steps).max().item()
    assert worst <= (0.501 if form.num_bits == 8 else 2.0)  # of 4 bits, outliers may be clipped
    assert packed.integers.nbytes == weight.numel() * form.num_bits // 8
    at = torch.tensor([[3, 1], [0, 47]])
    torch.testing.assert_close(packed.rows(at), packed.dense()[at])


@pytest.mark.drawn(24)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_products_equal_the_unpacked_matrix(form: PackingFormat, dtype: torch.dtype, rows: int) -> None:
    """torch's packed products, where they serve, against the plain one."""
    packed, bias = PackedWeight(_weight(), form, dtype), torch.randn(48).to(dtype)
    inputs = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    want = F.linear(inputs.double(), packed.dense().double(), bias.double())
    found = packed.product(inputs.view(1, rows, 64), bias)
    assert found.dtype is dtype and found.shape == (1, rows, 48)
    torch.testing.assert_close(
        found[0].double(),
        want,
        **({"atol": 1e-4, "rtol": 1e-4} if dtype.itemsize == 4 else {"atol": 0.3, "rtol": 0.02}),
    )


def test_clipping_pays_at_four_bits() -> None:
    weight = _weight(64, 256) ** 3
    plain = weight.view(64, 8, 32)
    low, high = plain.amin(-1, True), plain.amax(-1, True)
    step = (high - low) / 15
    rounded = ((plain - low) / step).round() * step + low
    packed = PackedWeight(weight, PackingFormat(4, 32))
    assert (packed.dense() - weight).square().mean() < 0.97 * (rounded.view(64, 256) - weight).square().mean()


def test_a_cast_is_of_products_and_not_of_scales() -> None:
    layer = PackedLinear(PackedWeight(_weight(), PackingFormat()), nn.Parameter(torch.zeros(48)))
    scale = layer.packed.scale.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.packed.scale, scale) and layer.weight.dtype is torch.bfloat16
    assert layer(torch.randn(2, 64).bfloat16()).dtype is torch.bfloat16
    twin = copy.deepcopy(layer)
    assert twin.packed.integers is not layer.packed.integers and torch.equal(twin.weight, layer.weight)
    other = PackedLinear(PackedWeight(torch.zeros(48, 64), PackingFormat()), nn.Parameter(torch.ones(48)))
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.to(torch.bfloat16).weight, layer.weight)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bert", "opt", "bloom", "wav2vec2"])
def test_int8_of_any_model(kind: str) -> None:
    plain = model(kind)
    for param in plain.parameters():  # attention that is not scaled saturates in a model of such weights
        param.data /= 8 if kind == "t5" else 1
    ids = torch.randn(2, 400) if kind == "wav2vec2" else prompt()
    extra = {"decoder_input_ids": prompt(2, 4)} if kind == "t5" else {}
    want = plain(ids, **extra).logits
    engine = deepspeed.init_inference(plain, dtype=torch.int8)
    packed = [m for m in engine.modules() if isinstance(m, PackedLinear)]
    assert packed and (engine(ids, **extra).logits - want).std() < 0.05 * want.std()
    head, tables = (
        engine.module.get_output_embeddings(),
        [m for m in engine.modules() if isinstance(m, PackedEmbedding)],
    )
    assert all(table.packed is head.packed for table in tables)  # no others: what is looked up stays as it is
    assert head is None or isinstance(head, PackedLinear)
    assert bool(tables) == (head is not None and plain.config.tie_word_embeddings)


@pytest.mark.parametrize("num_bits", [4, 8])
def test_the_head_is_packed_in_eight_bits_with_what_is_tied_to_it(num_bits: int) -> None:
    plain = model("gpt_neo")
    quantize_linears(plain, num_bits, 2)
    assert plain.lm_head.packed is plain.transformer.wte.packed
    assert plain.lm_head.packed.form == PackingFormat(8, 0, 1, symmetric=True)
    assert isinstance(plain.transformer.wpe, nn.Embedding)
    shared = model("gpt_neo")
    shared.beside = nn.Bilinear(1, 1, 1)
    shared.beside.weight = shared.lm_head.weight  # a third that cannot be packed
    quantize_linears(shared, num_bits)
    assert isinstance(shared.lm_head, nn.Linear) and isinstance(shared.transformer.wte, nn.Embedding)


def test_entries_by_name_and_tied_tables() -> None:
    plain = model("gpt_neo")  # its head is the embedding
    want = plain(prompt()).logits
    section = {
        "wte": {"num_bits": 8, "group_size": 32, "group_dim": 1, "symmetric": False},
        "lm_head": {"num_bits": 8, "group_size": 32},
        "mlp": {"num_bits": 4, "group_size": 16},
    }
    made: Any = _init_group_wise_weight_quantization(plain, {"weight_quantization": {"post_init_quant": section}})
    assert (
        made is plain and isinstance(made.transformer.wte, PackedEmbedding) and isinstance(made.lm_head, PackedLinear)
    )
    assert made.transformer.wte.packed is made.lm_head.packed and made.lm_head.packed.form.num_bits == 8
    assert made.transformer.h[0].mlp.c_fc.packed.form == PackingFormat(4, 16)
    assert isinstance(made.transformer.h[0].attn.attention.q_proj, nn.Linear)
    assert (made(prompt()).logits - want).std() < 0.3 * want.std()
    ids = prompt()
    assert made.generate(ids, max_new_tokens=3, do_sample=False, attention_mask=torch.ones_like(ids)).shape[0] == 2


@pytest.mark.parametrize(
    ("section", "error", "text"),
    [
        (None, AssertionError, "Must specify quantization scheme"),
        ({"post_init_quant": {"mlp": {"num_bits": 3}}}, NotImplementedError, "Only INT4 and INT8 quantization"),
        ({"post_init_quant": {"mlp": {"num_bits": 4, "size": 3}}}, ValueError, "'size'"),
        ({"post_init_quant": {"mlp": {}, "c_fc": {}}}, AssertionError, "is named by"),
        ({"post_init_quant": {"nowhere": {}}}, ValueError, "no Linear, Embedding or stack of experts is named by"),
        ({"post_init_quant": {"mlp": {"num_bits": 8, "group_size": 5}}}, AssertionError, "no multiple of group_size 5"),
        ({"post_init_quant": {"lm_head": {}}}, ValueError, "shares its weight with"),
        ({"post_init_quant": {"mlp": {}}, "quantized_initialization": {"num_bits": 8}}, ValueError, "not both"),
    ],
)
def test_wrong_sections(section: Any, error: type[Exception], text: str) -> None:
    given = {} if section is None else {"weight_quantization": section}
    with pytest.raises(error, match=text):
        _init_group_wise_weight_quantization(model("gpt_neo"), given)


def test_sharded_models_are_refused(alone: None) -> None:
    with deepspeed.zero.Init(), pytest.raises(NotAvailableError, match="sharded already"):
        _init_group_wise_weight_quantization(
            nn.Sequential(nn.Linear(8, 8)), {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}
        )


def test_packed_weights_are_not_trained(alone: None) -> None:
    section = {"weight_quantization": {"quantized_initialization": {"num_bits": 8}}}
    net = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="are not trained"):
        deepspeed.initialize(model=net, model_parameters=net.parameters(), config={"train_batch_size": 1, **section})


def test_linear_layers_with_a_forward_of_their_own_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    log = logging.getLogger("DeepSpeed")
    log.addHandler(caplog.handler)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), Doubled(8, 8))
        assert quantize_linears(model, 8) == 1
    finally:
        log.removeHandler(caplog.handler)
    assert any("1 linear layers stay as they are" in r.getMessage() and ": 1" in r.getMessage() for r in caplog.records)
