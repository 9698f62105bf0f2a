"""Packs: every sequence once, little padding; packed rows train as their sequences do one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.data.index_lists import stable_order
from deepspeed.data.packing import (
    PackedDataset,
    cu_seqlens,
    flash_arguments,
    pack,
    packed_row,
    position_ids,
    separate_sequences,
)
from deepspeed.errors import ArgumentError, DataError

BUDGET = 4096


def chat(count: int) -> Any:
    return np.clip(np.random.default_rng(0).lognormal(5.5, 0.9, count).astype(int), 1, BUDGET)


def uniform(count: int) -> Any:
    return np.random.default_rng(0).integers(1, BUDGET + 1, count)


def bimodal(count: int) -> Any:
    """Short answers and documents of about a third of the budget."""
    draw = np.random.default_rng(0)
    sizes = np.where(draw.random(count) < 0.7, draw.normal(180, 60, count), draw.normal(1300, 200, count))
    return np.clip(sizes.astype(int), 8, BUDGET)


DISTRIBUTIONS = [chat, uniform, bimodal]


@pytest.mark.parametrize("lengths_of", DISTRIBUTIONS)
@pytest.mark.parametrize("order", ["shuffled", "source", "fullest"])
def test_every_sequence_is_in_one_pack_with_little_padding(lengths_of: Callable[[int], Any], order: Any) -> None:
    lengths = lengths_of(20_000)
    packs = pack(lengths, BUDGET, seed=3, order=order)
    assert np.array_equal(np.sort(packs.ids), np.arange(len(lengths)))
    assert packs.tokens.tolist() == [int(lengths[ids].sum()) for ids in packs]
    assert packs.tokens.max() <= BUDGET and packs.padding_share <= 0.02
    assert packs.padding_share == pytest.approx(1 - lengths.sum() / (len(packs) * BUDGET))


def slow_best_fit(lengths: list[int], budget: int) -> int:
    """Number of packs, one sequence after the other."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(budget - length)
    return len(rooms)


@pytest.mark.parametrize("seed", range(30))
def test_packs_are_those_of_best_fit_decreasing(seed: int) -> None:
    draw = np.random.default_rng(seed)
    budget = int(draw.integers(5, 60))
    lengths = draw.integers(1, budget + 1, draw.integers(1, 80))
    packs = pack(lengths, budget)
    assert np.array_equal(np.sort(packs.ids), np.arange(len(lengths))) and packs.tokens.max() <= budget
    assert len(packs) == slow_best_fit(lengths.tolist(), budget)


def test_a_seed_decides_and_epochs_differ() -> None:
    lengths = chat(500)
    one, same, other = (pack(lengths, BUDGET, seed, "shuffled") for seed in ([1, 0], [1, 0], [1, 1]))
    assert np.array_equal(one.ids, same.ids) and np.array_equal(one.bounds, same.bounds)
    assert not np.array_equal(one.ids, other.ids)
    plain = pack(lengths, BUDGET)
    assert np.array_equal(plain.ids, pack(lengths, BUDGET).ids)
    firsts = [int(ids[0]) for ids in plain]
    assert firsts == sorted(firsts) and all(np.all(np.diff(ids) > 0) for ids in plain)
    fullest = pack(lengths, BUDGET, order="fullest").tokens
    assert np.all(np.diff(fullest) <= 0)


def test_a_window_mixes_near_sequences_only() -> None:
    packs = pack(chat(5000), BUDGET, seed=0, order="shuffled", window=1000)
    assert np.array_equal(np.sort(packs.ids), np.arange(5000))
    assert all(ids.min() // 1000 == ids.max() // 1000 for ids in packs) and packs.padding_share <= 0.02


def test_what_cannot_be_packed_is_refused_or_listed() -> None:
    with pytest.raises(DataError, match="2 of 3 sequences have more than 10 tokens, the longest 30"):
        pack([5, 11, 30], 10)
    dropped = pack([5, 11, 30], 10, overlong="drop")
    assert [ids.tolist() for ids in dropped] == [[0]] and dropped.left_out.tolist() == [1, 2]
    empty = pack([], 10)
    assert len(empty) == 0 and list(empty) == [] and empty.padding_share == 0
    for bad in ([3, 0], [[1]], [0.5]):
        with pytest.raises(DataError):
            pack(bad, 10)
    for options in ({"budget": 0}, {"order": "shuffled"}, {"order": "x"}, {"window": 0}, {"overlong": "cut"}):
        with pytest.raises(ArgumentError):
            pack([1], **{"budget": 10, **options})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lengths_of", DISTRIBUTIONS)
def test_time_grows_with_the_number_of_sequences(lengths_of: Callable[[int], Any]) -> None:
    def seconds(count: int) -> float:
        lengths, times = lengths_of(count), []
        for _ in range(3):
            start = time.process_time()
            pack(lengths, BUDGET, seed=0, order="shuffled")
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(1_000_000) / seconds(125_000) <= 2.3**3


def test_positions_bounds_and_labels_of_a_row() -> None:
    assert position_ids([3, 1, 2], 8).tolist() == [0, 1, 2, 0, 0, 1, 0, 1]
    assert cu_seqlens([3, 1, 2]).tolist() == [0, 3, 4, 6] and cu_seqlens([3], 4).tolist() == [0, 3, 4]
    assert (
        flash_arguments([3, 1])["max_length_q"] == 3 and flash_arguments([3, 1])["cu_seq_lens_k"].dtype == torch.int32
    )
    row = packed_row([[5, 6, 7], torch.tensor([8, 9])], 7, pad_token_id=1)
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 1, 1]
    assert row["labels"].tolist() == [-100, 6, 7, -100, 9, -100, -100]
    assert packed_row([[5, 6]], labels=[[-100, 6]])["labels"].tolist() == [-100, 6]
    for sequences, budget, labels in (([], 4, None), ([[]], 4, None), ([[1, 2, 3]], 2, None), ([[1, 2]], 4, [[1]])):
        with pytest.raises(DataError):
            packed_row(sequences, budget, labels=labels)


def models(attention: str) -> dict[str, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation=attention,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_implementation=attention,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return {"llama": LlamaForCausalLM(llama), "gpt2": GPT2LMHeadModel(gpt2)}


def gradients(model: Any, batches: list[dict[str, torch.Tensor]], items: int) -> dict[str, torch.Tensor]:
    """Of the sum of all token losses, divided by the number of tokens with a label."""
    model.zero_grad()
    for batch in batches:
        model(**batch, num_items_in_batch=items).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_of_packed_rows_are_those_of_single_sequences(family: str, attention: str) -> None:
    model = models(attention)[family]
    draw = np.random.default_rng(0)
    sequences = [draw.integers(1, 64, size).tolist() for size in (17, 5, 1, 12, 30, 2, 9, 3)]
    items = sum(len(sequence) - 1 for sequence in sequences)
    alone = [{key: torch.tensor([sequence]) for key in ("input_ids", "labels")} for sequence in sequences]
    expected = gradients(model, alone, items)

    separate_sequences(model)
    assert model.training
    packs = pack([len(sequence) for sequence in sequences], 32, seed=0, order="shuffled")
    rows = PackedDataset(sequences, packs, pad_token_id=0)
    assert len(packs) == 3 and packs.padding_share > 0
    batches = list(torch.utils.data.DataLoader(rows, 2))
    actual = gradients(model, batches, items)
    worst = max(float((actual[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= 1e-6 and max(float(value.abs().max()) for value in expected.values()) > 1e-2
    model.config.use_cache = True  # the comparison sees sequences that are mixed up
    mixed = gradients(model, batches, items)
    assert max(float((mixed[name] - expected[name]).abs().max()) for name in expected) > 1e-4


def test_a_model_that_mixes_packed_sequences_is_refused() -> None:
    model = models("eager")["llama"]
    forward = model.forward
    model.forward = lambda input_ids, position_ids: forward(input_ids)  # positions are ignored
    with pytest.raises(DataError, match="LlamaForCausalLM does not keep packed sequences apart"):
        separate_sequences(model)


def test_samples_may_be_dicts_with_labels_or_anything() -> None:
    packs = pack([2, 1], 4)
    dicts = [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7]}]
    assert PackedDataset(dicts, packs)[0]["labels"].tolist() == [-100, 6, -100, -100]
    texts = PackedDataset(["ab", "c"], packs, tokens_of=lambda text: ([ord(letter) for letter in text], None))
    assert texts[0]["input_ids"].tolist() == [97, 98, 99, 0] and len(texts) == 1


def test_the_linear_sort_is_a_stable_sort() -> None:
    draw = np.random.default_rng(0)
    for top in (1, 2**16 - 1, 2**16, 2**20, 2**40):
        keys = draw.integers(0, top, 5000)
        assert np.array_equal(stable_order(keys), np.argsort(keys, kind="stable"))
    assert stable_order(np.empty(0, np.int64)).tolist() == []
