"""Packed integers in huge pages for native passes: what callers can do with the weights stays as it was."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import deepspeed
from deepspeed.inference import Generator, SamplingParams
from deepspeed.inference.executors import select
from deepspeed.inference.executors.native_tensors import functions
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization.lossless_bf16 import Room
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.inference.quantization.quantization import quantize_linears
from tests.unit.inference.toys import llama

pytestmark = [
    pytest.mark.skipif(functions() is None, reason="the native library is not built, or off"),
    pytest.mark.skipif(not Room.huge, reason="the system has no huge pages"),
]


def packed_llama(num_bits: int = 8):
    model = llama()
    quantize_linears(model, num_bits, 1, torch.bfloat16)
    return model.to(torch.bfloat16)


def weights(model) -> list[PackedWeight]:
    return [module for module in model.modules() if isinstance(module, PackedWeight)]


def parts(model) -> list[torch.nn.Parameter]:
    return [part for weight in weights(model) for part in weight.parameters()]


def logits(executor) -> torch.Tensor:
    return executor.run(RaggedBatch([BatchSlice([5, 9, 3], 0, [0, 1], 3)], 2, torch.device("cpu")))


@pytest.mark.parametrize("num_bits", [8, 4])
def test_integers_move_once_and_logits_stay(num_bits: int, monkeypatch) -> None:
    model = packed_llama(num_bits)
    before, values = parts(model), [part.clone() for part in parts(model)]
    with monkeypatch.context() as patch:
        patch.setattr(PackedWeight, "settle", lambda self, take: 0)
        right = logits(select.select_executor(copy.deepcopy(model))[0])
    found = select.select_executor(model)[0]
    assert all(a is b for a, b in zip(parts(model), before, strict=True)), "whoever holds a parameter holds the new one"
    assert all(torch.equal(a, b) for a, b in zip(parts(model), values, strict=True))
    assert not any(part.untyped_storage().resizable() for part in parts(model)), "they lie where torch put them"
    assert torch.equal(logits(found), right)
    places = [part.data_ptr() for part in parts(model)]
    select.select_executor(model)
    assert [part.data_ptr() for part in parts(model)] == places


def test_a_settled_model_is_saved_copied_cast_and_loaded_as_before() -> None:
    plain, model = packed_llama(), packed_llama()
    found = select.select_executor(model)[0]
    sizes = []
    for one in (plain, model):
        file = io.BytesIO()
        torch.save(one, file)
        sizes.append(len(file.getvalue()))
        file.seek(0)
        again = torch.load(file, weights_only=False)
        assert all(torch.equal(a, b) for a, b in zip(parts(again), parts(model), strict=True))
    assert sizes[1] < 1.01 * sizes[0] + 4096, "a file has the bytes of the weights, not of the room"
    twin = copy.deepcopy(model)
    assert all(part.untyped_storage().resizable() for part in parts(twin))
    model.to(torch.bfloat16)
    with torch.no_grad():
        for part in parts(twin):
            part.copy_(part.flip(0))
    model.load_state_dict(twin.state_dict())
    assert torch.equal(logits(found), logits(select.select_executor(twin)[0])), (
        "a pass reads the values as they are now"
    )


def test_what_others_own_stays_where_it_lies() -> None:
    room, whole = Room(), torch.zeros(3, 64, 64, dtype=torch.int8)
    ones = [PackedWeight(torch.randn(64, 64), PackingFormat(8, 0, 1, True)) for _ in range(3)]
    ones[0].integers.data = whole[1]  # part of a larger tensor
    ones[1].integers.data.share_memory_()
    places = [one.integers.data_ptr() for one in ones]
    for one in ones:
        one.settle(room.take)
    assert [one.integers.data_ptr() == place for one, place in zip(ones, places, strict=True)] == [True, True, False]
    assert ones[1].integers.is_shared()


def test_weights_packed_in_inference_mode_are_served() -> None:
    with torch.inference_mode():
        model = packed_llama()
    right = Generator(packed_llama()).generate([[5, 9, 3]], SamplingParams(max_new_tokens=4))
    assert Generator(model).generate([[5, 9, 3]], SamplingParams(max_new_tokens=4)) == right


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_weights_loaded_after_a_generator_was_made_are_read(mode) -> None:
    model, ids = packed_llama(), torch.tensor([[5, 9, 3]])
    with mode():
        Generator(model)
    with torch.no_grad():
        model(ids)
        other = copy.deepcopy(model)
        for part in parts(other):
            part.copy_(part.flip(0))
        model.load_state_dict(other.state_dict())
        assert torch.equal(model(ids).logits, other(ids).logits)


def test_a_settled_model_can_be_sharded() -> None:
    model, ids = llama(), torch.tensor([[5, 9, 3]])
    quantize_linears(model, 8, 1, torch.float32)
    right = copy.deepcopy(model)(ids).logits
    select.select_executor(model)
    engine, *_ = deepspeed.initialize(
        model=model, config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    )
    with torch.no_grad():
        assert torch.equal(engine(ids).logits, right)
        assert torch.equal(engine(ids).logits, right), "gathered a second time"
    engine.destroy()
