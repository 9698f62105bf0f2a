"""The ragged engine: put, query, limits, blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepspeed.errors import ArgumentError, CheckpointError, CheckpointMissingError, NotAvailableError
from deepspeed.inference.v2 import (
    InferenceEngineV2,
    RaggedInferenceEngineConfig,
    build_engine_from_ds_checkpoint,
    build_hf_engine,
)
from deepspeed.inference.v2.ragged import AllocationMode, DSStateManagerConfig, MemoryConfig
from deepspeed.inference.v2.scheduling_utils import SchedulingError, SchedulingResult
from tests.unit.inference.toys import alone, gpt_neo, llama, mamba, prompts

SMALL = {"memory_config": {"mode": "allocate", "size": 6}, "max_ragged_batch_size": 100,
         "max_ragged_sequence_count": 3, "max_tracked_sequences": 4}  # fmt: skip


def engine(**manager) -> InferenceEngineV2:
    return InferenceEngineV2(llama(), RaggedInferenceEngineConfig(state_manager=manager))


@pytest.mark.parametrize("make", [llama, gpt_neo])
def test_greedy_by_put_is_generate(make) -> None:
    model, given = make(), prompts((3, 70, 20))
    wanted = [alone(model, prompt, 8) for prompt in given]
    ragged = InferenceEngineV2(model, RaggedInferenceEngineConfig(manager={"memory_config": SMALL["memory_config"]}))
    ragged.put([7, 9], [torch.tensor(given[0][:-1] or given[0]), torch.tensor(given[1][:33])])
    logits = ragged.put([9, 7, 11], [torch.tensor(given[1][33:]), torch.tensor(given[0][-1:]), torch.tensor(given[2])])
    found: dict[int, list[int]] = {9: [], 7: [], 11: []}
    for _ in range(8):
        for uid, row in zip(found, logits, strict=True):
            found[uid].append(int(row.argmax()))
        logits = ragged.put(list(found), [torch.tensor(tokens[-1:]) for tokens in found.values()])
    assert [found[7], found[9], found[11]] == wanted
    for uid in found:
        ragged.flush(uid)
    assert int(ragged.free_blocks.min()) == 6 and ragged.n_kv_cache_groups == 1


def test_a_batch_over_a_limit_is_refused_by_its_name_and_changes_nothing() -> None:
    ragged, one = engine(**SMALL), torch.tensor([5])
    ask = ragged.can_schedule
    assert ask([1, 2, 3, 4], [1] * 4) == SchedulingResult.BatchSequenceLimitExceeded
    assert ask([1, 2], [60, 41]) == SchedulingResult.BatchTokenLimitExceeded
    assert ask([1], [257]) == SchedulingResult.BatchTokenLimitExceeded
    ragged.put([1, 2], [torch.full((90,), 7), one])
    ragged.put([1, 3], [torch.full((90,), 7), one])
    assert int(ragged.free_blocks) == 6 - 3 - 1 - 1
    assert ask([1], [77]) == SchedulingResult.SequenceTokenLimitExceeded
    assert ask([2, 3], [64, 10]) == SchedulingResult.Success
    assert ask([2, 3], [36, 64]) == SchedulingResult.Success
    assert ask([2, 4], [64, 1]) == SchedulingResult.KVCacheLimitExceeded
    ragged.put([4], [one])
    assert ask([5], [1]) == SchedulingResult.EngineSequenceLimitExceeded
    with pytest.raises(SchedulingError, match="EngineSequenceLimitExceeded") as caught:
        ragged.put([5], [one])
    assert caught.value.status == SchedulingResult.EngineSequenceLimitExceeded and isinstance(
        caught.value, RuntimeError
    )
    assert ragged.get_remaining_block_capacity(5) == 0 and int(ragged.free_blocks) == 0


def test_query_and_the_room_left_in_a_block() -> None:
    ragged = engine(**SMALL)
    assert (
        ragged.query(1, 100, 6) == (100, 2) and ragged.query(1, 100, 1) == (64, 1) and ragged.query(1, 9, 0) == (0, 0)
    )
    ragged.put([1], [torch.full((70,), 7)])
    assert ragged.get_remaining_block_capacity(1) == 128 - 70
    assert ragged.query(1, 58, 0) == (58, 0) and ragged.query(1, 59, 0) == (58, 0) and ragged.query(1, 59, 1) == (59, 1)
    ragged.put([1], [torch.full((58,), 7)])
    assert ragged.get_remaining_block_capacity(1) == 0 and ragged.query(1, 1000, 6) == (128, 2)
    ragged.flush(1)
    ragged.flush(1)  # a warning
    assert int(ragged.free_blocks) == 6


@pytest.mark.parametrize("wrong", [[[1.5]], [[]], [[[1]]], [[256]], [[-1]], [[1], [2]]], ids=str)
def test_tokens_that_are_none_are_refused(wrong) -> None:
    ragged = engine(**SMALL)
    with pytest.raises(ArgumentError):
        ragged.put([1], [torch.tensor(one) for one in wrong])
    assert int(ragged.free_blocks) == 6


def test_configuration() -> None:
    config = RaggedInferenceEngineConfig(tp={"tp_size": 1}, manager=DSStateManagerConfig(max_context=100))
    assert config.state_manager.max_context == 100 and config.tensor_parallel.tp_size == 1
    assert MemoryConfig().mode == AllocationMode.RESERVE.value and MemoryConfig().size == 1_000_000_000
    for wrong in (
        {"unknown": 1},
        {"state_manager": {"max_ragged_sequence_count": 800}},
        {"state_manager": {"max_context": 0}},
    ):
        with pytest.raises(ValueError):
            RaggedInferenceEngineConfig(**wrong)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"state_manager": {"offload": True}}, r"state_manager\.offload"),
        ({"tensor_parallel": {"tp_size": 2}}, "tp_size 2"),
        ({"quantization": {"quantization_mode": "wf6af16"}}, "fp6"),
    ],
)
def test_features_that_are_not_available(tmp_path, keys: dict[str, dict[str, Any]], text: str) -> None:
    config = RaggedInferenceEngineConfig(**keys)
    with pytest.raises(NotAvailableError, match=text):
        InferenceEngineV2(llama(), config)
    with pytest.raises(NotAvailableError, match=text):  # before weights are looked for
        build_hf_engine(str(tmp_path), config)


def test_engines_from_folders(tmp_path) -> None:
    model, config = llama(), RaggedInferenceEngineConfig(state_manager=SMALL)
    model.save_pretrained(tmp_path / "hf")
    first = build_hf_engine(str(tmp_path / "hf"), config)
    prompt = torch.tensor(prompts((20,))[0])
    wanted = model(prompt[None]).logits[0, -1:]
    assert torch.allclose(first.put([1], [prompt]), wanted, atol=1e-4)
    first.serialize(str(tmp_path / "ours"))
    assert not list((tmp_path / "ours").glob("*.pkl"))
    for build in (build_hf_engine, build_engine_from_ds_checkpoint):
        assert torch.allclose(build(str(tmp_path / "ours"), config).put([1], [prompt]), wanted, atol=1e-4)
    with pytest.raises(CheckpointMissingError, match="serialize"):
        build_engine_from_ds_checkpoint(str(tmp_path / "hf"), config)
    with pytest.raises(CheckpointError):
        build_hf_engine(str(tmp_path), config)
    with pytest.raises(NotAvailableError, match="another kind in its cache than keys and values"):
        InferenceEngineV2(mamba(), config)
