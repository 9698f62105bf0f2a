"""Matrices of bf16 in 12 bits: products, logits and files have the bits of the whole ones."""

from __future__ import annotations

import copy
import ctypes
import gc
import weakref
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.errors import ArgumentError, PackingError
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.executors import native, select
from deepspeed.inference.executors.native_tensors import functions, matrix_of, rows_of
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization import lossless_bf16
from deepspeed.inference.quantization.layers import LosslessEmbedding, LosslessLinear
from deepspeed.inference.quantization.lossless_bf16 import RAREST, LosslessWeight
from deepspeed.inference.quantization.quantization import pack_lossless
from deepspeed.inference.v2 import (
    InferenceEngineV2,
    RaggedInferenceEngineConfig,
    build_engine_from_ds_checkpoint,
    build_hf_engine,
)
from tests.unit.inference.products import product
from tests.unit.inference.toys import llama, phi3, scale

pytestmark = pytest.mark.skipif(functions() is None, reason="the native library is not built, or off")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    """In every bit, but for which NaN it is."""
    lost = one.isnan()
    return torch.equal(lost, two.isnan()) and torch.equal(
        bits(one.masked_fill(lost, 0)), bits(two.masked_fill(lost, 0))
    )


def matrix(outputs: int, inputs: int, escapes: int = 0) -> torch.Tensor:
    """Random, with so many elements whose exponents are all over."""
    made = (torch.randn(outputs, inputs) * 0.05).bfloat16()
    at = torch.randperm(made.numel())[:escapes]
    odd = torch.tensor([0.0, -0.0, 1e-40, -9e-41, 3e38, -2e30, 1e-20, 700.0])
    made.view(-1)[at] = odd[torch.arange(escapes) % len(odd)].bfloat16()
    return made


def packed(weight: torch.Tensor) -> LosslessWeight:
    """Whatever it holds, whether it pays or not."""
    with mock.patch("deepspeed.inference.quantization.lossless_bf16.RAREST", 1):
        return LosslessWeight(weight)


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("outputs", "inputs"), [(67, 192), (32, 2112), (3, 64), (130, 832)])
def test_products_and_rows_have_the_bits_of_the_whole_matrix(form, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    for escapes in (0, 5, outputs * inputs // 3):
        whole, bias = matrix(outputs, inputs, escapes), torch.randn(outputs)
        one = packed(whole)
        assert torch.equal(bits(one.dense()), bits(whole)) and torch.equal(bits(one.dense_in_torch()), bits(whole))
        at = torch.tensor([[outputs - 1, 0], [1, outputs // 2]])
        assert torch.equal(bits(one.rows(at)), bits(whole[at]))
        plain, ours = matrix_of(whole, bias), matrix_of(one, bias)
        x = torch.randn(130, inputs)
        for rows in (1, 2, 3, 4, 8, 32, 61, 130):
            given = x[:rows].contiguous()
            assert same(product(ours, given, 1), product(plain, given, 1)), (escapes, rows)
        assert same(product(ours, x[:33].contiguous(), 2), product(plain, x[:33].contiguous(), 1))
        first = outputs // 2 // 4 * 4
        some, right = (rows_of(one, first, outputs - first) for one in (ours, plain))
        assert same(product(some, x[:3].contiguous(), 1), product(right, x[:3].contiguous(), 1))


def test_twelve_bits_are_held_and_what_does_not_pay_stays(capfd) -> None:
    torch.manual_seed(0)
    one = LosslessWeight(torch.randn(256, 512).mul_(0.02).bfloat16())
    assert one.nbytes < 0.76 * 2 * 256 * 512
    pruned = torch.randn(128, 64).mul_(0.02).bfloat16()
    pruned[::2] = 0
    assert len(LosslessWeight(pruned).places) < pruned.numel() / RAREST  # zero is one of the sixteen
    assert not len(LosslessWeight(torch.full((8, 64), -1.5).bfloat16()).places)
    some = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0]).repeat(16, 16).bfloat16()
    assert torch.equal(bits(LosslessWeight(some).dense()), bits(some))
    for weight, why in (
        (torch.randn(8, 96).bfloat16(), "96 inputs are no multiple of 64"),
        (matrix(64, 64, 2000), "has a rare exponent"),
        (torch.randn(8, 64), "float32"),
    ):
        with pytest.raises(PackingError, match=why):
            LosslessWeight(weight)


def test_an_escape_that_is_lost_is_seen() -> None:
    torch.manual_seed(0)
    whole = matrix(64, 128, 40)
    one, x = packed(whole), torch.randn(3, 128)
    right = product(matrix_of(one), x, 1)
    one.values.fill_(0x4000)
    assert not torch.equal(right, product(matrix_of(one), x, 1))
    native = lossless_bf16.functions()

    def forgetful(*given) -> None:
        native.ds_pack(*given)
        (ctypes.c_int32 * 17).from_address(given[5])[:] = [0] * 17

    faulty = mock.Mock(ds_exponents=native.ds_exponents, ds_unpack=native.ds_unpack, ds_pack=forgetful)
    with mock.patch.object(lossless_bf16, "functions", lambda: faulty), pytest.raises(PackingError, match="other bits"):
        packed(whole)


def logits(model, count: int, **options) -> torch.Tensor:
    """Of a pass of prompts, and of one of the next token of each."""
    executor, why = select.select_executor(model, **options)
    assert isinstance(executor, native.FusedExecutor), why
    executor.store = executor.store.resized(3 * count, 16)
    prompts = [list(range(3 + i, 10 + 2 * (i % 9))) or [5] for i in range(count)]
    pages = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(count)]
    found = []
    for spans in (
        [BatchSlice(prompt, 0, held) for prompt, held in zip(prompts, pages, strict=True)],
        [
            BatchSlice([7 + i % 5], len(prompt), held)
            for i, (prompt, held) in enumerate(zip(prompts, pages, strict=True))
        ],
    ):
        found.append(executor.run(RaggedBatch(spans, 16, torch.device("cpu"))))
    return torch.cat(found)


@pytest.mark.parametrize("make", [llama, phi3, lambda **given: llama(tie_word_embeddings=True, **given)])
def test_logits_have_the_bits_of_the_whole_model(form, make) -> None:
    model = make(intermediate_size=128).bfloat16()
    twin = copy.deepcopy(model)
    for count in (1, 4, 8, 32):
        right = logits(model, count)
        assert torch.equal(bits(logits(twin, count, packed=True)), bits(right))
    layers = [one for one in twin.modules() if isinstance(one, LosslessLinear | LosslessEmbedding)]
    held = [one for one in model.modules() if isinstance(one, torch.nn.Linear | torch.nn.Embedding)]
    assert len(layers) == len(held)
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model(ids).logits, twin(ids).logits)  # through the modules


@pytest.mark.slow
def test_logits_of_110_m_parameters_have_the_bits_of_the_whole_model() -> None:
    model = llama(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
        vocab_size=32000, tie_word_embeddings=True,
    )  # fmt: skip
    model = scale(model, 0.06).bfloat16()
    right = [logits(model, count) for count in (1, 4, 8, 32)]
    assert pack_lossless(model) == 1 + 12 * 7
    found = [logits(model, count) for count in (1, 4, 8, 32)]
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, right, strict=True))


def test_nothing_of_the_whole_matrices_is_held(capfd) -> None:
    model = llama(tie_word_embeddings=True, intermediate_size=128).bfloat16()
    watched = [weakref.ref(param) for param in model.parameters() if param.dim() == 2]
    generator = Generator(model, lossless_weights=True)
    said = generator.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    gc.collect()
    assert watched and not any(one() is not None for one in watched) and len(said[0]) == 4
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    assert tables[0].packed is tables[1].packed
    assert "every bit kept" in capfd.readouterr().err


def test_files_and_copies_are_whole(tmp_path) -> None:
    model = llama(tie_word_embeddings=True, intermediate_size=128).bfloat16()
    twin = copy.deepcopy(model)
    assert pack_lossless(twin) == 15
    right, found = model.state_dict(), twin.state_dict()
    assert found.keys() == right.keys() and all(torch.equal(bits(found[name]), bits(right[name])) for name in right)
    twin.save_pretrained(tmp_path / "packed")
    model.save_pretrained(tmp_path / "whole")
    files = [tmp_path / one / "model.safetensors" for one in ("packed", "whole")]
    assert files[0].read_bytes() == files[1].read_bytes()
    other = copy.deepcopy(twin)
    assert torch.equal(bits(other.lm_head.weight), bits(model.lm_head.weight))
    changed = {name: value * 2 for name, value in right.items()}
    twin.load_state_dict(changed)
    assert torch.equal(twin.model.layers[0].mlp.up_proj.weight, changed["model.layers.0.mlp.up_proj.weight"])
    with pytest.raises(RuntimeError, match="size mismatch for lm_head"):
        twin.load_state_dict({**changed, "lm_head.weight": torch.zeros(3, 64)})
    assert twin.float().lm_head.weight.dtype == torch.float32
    assert torch.equal(twin.lm_head.weight, changed["lm_head.weight"].float())


def test_what_was_told_and_changed_is_not_told_again() -> None:
    layer = LosslessWeight(right := matrix(8, 64))
    told = layer.dense_shared()
    assert layer.dense_shared() is told
    told.zero_()
    assert torch.equal(layer.dense_shared(), right)
    with torch.inference_mode():
        assert torch.equal(layer.dense_shared(), right)


def test_values_that_bf16_does_not_hold_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8, dtype=torch.bfloat16))
    assert pack_lossless(model) == 1
    model.float()
    held = model.state_dict()
    with pytest.raises(
        RuntimeError, match="0.weight is packed in bf16, which does not hold the values of torch.float32"
    ):
        model.load_state_dict({**held, "0.weight": held["0.weight"] * 1.001})
    model.load_state_dict({**held, "0.weight": held["0.weight"] * 2})
    assert torch.equal(model.state_dict()["0.weight"], held["0.weight"] * 2)


def test_a_failed_packing_leaves_what_was_there() -> None:
    layer = LosslessWeight(right := matrix(8, 64))
    with mock.patch.object(LosslessWeight, "_unpacked", lambda self, rows: torch.zeros(len(rows), 64).bfloat16()):
        with pytest.raises(PackingError, match="other bits"):
            layer.pack(right * 2, lossless_bf16.Room())
    assert torch.equal(layer.dense(), right)


def test_layers_with_hooks_and_those_cut_between_fours_stay_whole() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(2)))
    model[0].register_forward_hook(lambda *_: None)
    assert pack_lossless(model) == 1 and isinstance(model[1], LosslessLinear)
    odd = phi3(intermediate_size=98).bfloat16()
    right = logits(copy.deepcopy(odd), 8)
    assert torch.equal(bits(logits(odd, 8, packed=True)), bits(right))
    executor, _ = select.select_executor(phi3(intermediate_size=98).bfloat16(), packed=True)
    assert executor.structure.blocks  # its passes are native still
    layer = odd.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj, LosslessLinear) and type(layer.mlp.gate_up_proj) is torch.nn.Linear


def test_engines_of_folders_pack_and_those_of_given_modules_do_not(tmp_path) -> None:
    from transformers import LlamaForCausalLM

    llama().bfloat16().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    config = {"state_manager": {"memory_config": {"mode": "allocate", "size": 8}}}
    engines = [
        build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig(**config)),
        build_hf_engine(str(tmp_path), RaggedInferenceEngineConfig(**config, lossless_weights=False)),
        InferenceEngineV2(model, RaggedInferenceEngineConfig(**config)),
    ]
    heads = [type(engine.model().lm_head) for engine in engines]
    assert heads == [LosslessLinear, torch.nn.Linear, torch.nn.Linear]
    found = [engine.put([1, 2], [torch.tensor([5, 6, 7]), torch.tensor([8])]) for engine in engines]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    engines[0].serialize(str(tmp_path / "again"))
    again = build_engine_from_ds_checkpoint(str(tmp_path / "again"), RaggedInferenceEngineConfig(**config))
    assert torch.equal(again.put([1, 2], [torch.tensor([5, 6, 7]), torch.tensor([8])]), found[0])
    assert torch.equal(again.model().lm_head.weight, model.lm_head.weight)


def test_init_inference_packs_where_it_is_asked_to_and_refuses_nonsense() -> None:
    model = llama().bfloat16()
    right = deepspeed.init_inference(copy.deepcopy(model), dtype=torch.bfloat16, kernel_inject=True)
    ours = deepspeed.init_inference(model, dtype=torch.bfloat16, kernel_inject=True, lossless_weights=True)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert isinstance(ours.module.lm_head, LosslessLinear) and not isinstance(right.module.lm_head, LosslessLinear)
    assert torch.equal(ours.generate(ids, max_new_tokens=5), right.generate(ids, max_new_tokens=5))
    for given, why in (
        ({"dtype": torch.bfloat16}, "needs replace_with_kernel_inject"),
        ({"dtype": torch.int8, "kernel_inject": True}, "packs bf16"),
    ):
        with pytest.raises(ArgumentError, match=why):
            deepspeed.init_inference(llama(), lossless_weights=True, **given)
    trained = llama().bfloat16()
    trained(torch.tensor([[5, 6]])).logits.sum().backward()
    with pytest.raises(ArgumentError, match="has a gradient"):
        Generator(trained, lossless_weights=True)
