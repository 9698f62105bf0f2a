"""What stands around the layers of a native pass: rows of a table, and the token that is chosen by a plain rule."""

from __future__ import annotations

import math
import time
from array import array

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import RequestError
from deepspeed.inference import Generator
from deepspeed.inference.executors.native_structure import table_of
from deepspeed.inference.executors.native_tensors import Matrix, functions, largest, largest_in_torch, matrix_of
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization.layers import PackedEmbedding
from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.native import INSTRUCTION_SETS
from tests.harness.kernels import forms
from tests.unit.inference.products import product
from tests.unit.inference.test_native import CPU, PACKINGS, native
from tests.unit.inference.toys import llama

pytestmark = native


@pytest.mark.parametrize("columns", [1, 15, 16, 33, 4001])
def test_the_largest_of_a_row_is_the_first_one_or_none_where_it_is_no_number(form, columns) -> None:
    torch.manual_seed(columns)
    logits = torch.randn(9, columns)
    logits[1] = -float("inf")
    logits[2, -1], logits[3, columns // 2] = float("nan"), float("inf")
    logits[4] = 3.0  # equal ones
    logits[5, : columns // 2] = -float("inf")
    logits[6, 0], logits[6, -1] = float("nan"), float("inf")
    assert largest(logits) == largest_in_torch(logits)
    assert largest(logits)[1:5] == [-1, -1, -1, 0] and largest(logits)[6] == -1
    assert largest(logits[:, ::2]) == largest_in_torch(logits[:, ::2]) and largest(logits[:0]) == []


@pytest.mark.drawn(12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", *PACKINGS])
def test_rows_of_a_table_are_those_of_the_embedding(form, kind, dtype) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(37, 192).to(dtype)
    module = table if kind == "plain" else PackedEmbedding(PackedWeight(table.weight, PACKINGS[kind]), None, None)
    matrix, rounded = table_of(module)
    at = array("q", [36, 0, 5, 5, 17])
    made = torch.empty(len(at), 192)
    functions().ds_rows(matrix, at.buffer_info()[0], len(at), rounded, made.data_ptr())
    assert torch.equal(made, module(torch.tensor(at)).float())


def test_a_table_that_does_more_than_give_rows_is_asked_itself() -> None:
    assert table_of(nn.Embedding(8, 32, max_norm=1.0)) == (None, 0)
    assert table_of(PackedEmbedding(PackedWeight(torch.randn(8, 32), PackingFormat()), None, 2.0)) == (
        None,
        0,
    )


def best_time(matrix: Matrix, inputs: torch.Tensor) -> float:
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        product(matrix, inputs, 1)
        times.append(time.perf_counter() - begin)
    return min(times)


@pytest.mark.parametrize("kind", ["bf16", "12 bits", *PACKINGS])
def test_each_instruction_set_has_products_in_vectors(kind) -> None:
    """Scalar code took 6 to 50 times as long. Ratios of the best of seven, in one process."""
    sets = forms(INSTRUCTION_SETS)  # portable code alone on processors other than those of x86
    torch.manual_seed(0)
    weight = torch.randn(128, 1152).bfloat16()
    packed = PackedWeight(weight.float(), PACKINGS[kind]) if kind in PACKINGS else weight
    matrix, inputs = matrix_of(LosslessWeight(weight) if kind == "12 bits" else packed, None), torch.randn(16, 1152)
    times = {}
    try:
        for name in sets:
            functions().ds_instruction_set(INSTRUCTION_SETS.index(name))
            times[name] = best_time(matrix, inputs)
    finally:
        functions().ds_instruction_set(len(INSTRUCTION_SETS))
    for name in sets[1:]:
        assert times[name] < 0.6 * times["portable"], times


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        *((length, settings) for length in (5, 19, 40) for settings in ({}, {"max_new_tokens": 3})),
        *((length, {"max_length": 20}) for length in (5, 19)),
    ],
)
def test_a_call_without_a_length_ends_where_that_of_transformers_does(settings: dict[str, int], length: int) -> None:
    from transformers import GenerationConfig

    model = llama(max_position_embeddings=48)
    model.generation_config = GenerationConfig(eos_token_id=None, pad_token_id=0, **settings)
    ids = torch.arange(1, length + 1)[None]
    own = model.generate(ids, attention_mask=torch.ones_like(ids))
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    assert engine._injected is not None
    assert torch.equal(engine.generate(ids, attention_mask=torch.ones_like(ids)), own)
    engine.destroy()


def test_no_end_token_by_the_call_is_none_though_the_model_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GenerationConfig

    warnings: list[str] = []
    monkeypatch.setattr("deepspeed.inference.native_generate.warn_once", lambda text, key=None: warnings.append(text))
    model, ids = llama(max_position_embeddings=48), torch.arange(1, 6)[None]
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    model.generation_config = GenerationConfig(pad_token_id=0)
    fourth = int(model.generate(ids, **call)[0, 8])
    model.generation_config = GenerationConfig(eos_token_id=fourth, pad_token_id=0)
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    for ends, length in (({}, 9), ({"eos_token_id": None}, 17)):
        own = model.generate(ids, **call, **ends)
        assert own.shape[1] <= length and torch.equal(engine.generate(ids, **call, **ends), own)
    assert own.shape[1] == 17 and not warnings
    engine.destroy()


@pytest.mark.parametrize("of_model", [False, True])
def test_a_repetition_penalty_is_that_of_transformers(of_model: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat models have one in their generation config. Padding counts there, so padded prompts go the model's way."""
    from transformers import GenerationConfig

    warnings: list[str] = []
    monkeypatch.setattr("deepspeed.inference.native_generate.warn_once", lambda text, key=None: warnings.append(text))
    model, ids = llama(max_position_embeddings=64), torch.tensor([[3, 9, 9, 4], [7, 1, 2, 7]])
    call = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "do_sample": False}
    penalty = {"repetition_penalty": 1.7}
    model.generation_config = GenerationConfig(eos_token_id=5, pad_token_id=0)
    plain = model.generate(ids, **call)
    model.generation_config = GenerationConfig(eos_token_id=5, pad_token_id=0, **(penalty if of_model else {}))
    engine = deepspeed.init_inference(model, dtype=torch.float32, replace_with_kernel_inject=True)
    call |= {} if of_model else penalty
    own = model.generate(ids, **call)
    assert torch.equal(engine.generate(ids, **call), own) and not torch.equal(own, plain) and not warnings
    for neutral in (1, True, np.float32(1.0), torch.tensor(1.0)):
        assert torch.equal(engine.generate(ids, **{**call, "repetition_penalty": neutral}), plain) and not warnings
    infinite = {**call, "repetition_penalty": math.inf}
    assert torch.equal(engine.generate(ids, **infinite), model.generate(ids, **infinite))
    assert "repetition_penalty is inf" in warnings.pop()
    call["attention_mask"] = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(engine.generate(ids, **call), model.generate(ids, **call))
    assert "padding counts" in warnings[0]
    with pytest.raises(ValueError, match="strictly positive float"):  # as Transformers says it
        engine.generate(ids, **{**call, "repetition_penalty": -1.0})
    engine.destroy()


def test_tokens_outside_the_table_are_refused() -> None:
    generator = Generator(llama())
    for token in (-1, generator.model.config.vocab_size):
        with pytest.raises(RequestError, match=str(token)):
            generator._executor.run(RaggedBatch([BatchSlice([3, token], 0, [0])], generator.pages.size, CPU))
