"""The difference of training from generation, by update, over two ranks and in the monitors."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import DataError, UsageError
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.rollouts.logprobs import torch_logprobs
from deepspeed.rollouts.losses import Mismatch, merged_mismatch
from tests.parallel.test_rollouts import SIZES, scale, settings
from tests.parallel.tiny import raises


def events_of(folder: str) -> dict[str, list[float]]:
    """Values of the events about rollouts, by the last part of their names."""
    rows = [json.loads(line) for file in Path(folder).rglob("*.jsonl") for line in file.read_text().splitlines()]
    values: dict[str, list[float]] = {}
    for row in rows:
        if row["name"].startswith("Train/Rollouts/"):
            values.setdefault(row["name"].removeprefix("Train/Rollouts/"), []).append(row["value"])
    return values


def formulas(difference: torch.Tensor) -> dict[str, float]:
    """The figures by their formulas, in fp64."""
    ratio = difference.double().exp()
    return {
        "k1": difference.double().mean().item(),
        "k3": (ratio - 1 - difference.double()).mean().item(),
        "largest": difference.abs().max().item(),
        "outside": ((ratio < 0.99) | (ratio > 1.01)).double().mean().item(),
        "tokens": len(difference),
    }


def measured(folder: str) -> dict[str, list[float]]:
    """Measure a model with dropout in three updates, the second without a measurement; rank 0's events."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SIZES["vocab_size"], n_positions=64, n_embd=32, n_head=2, n_layer=2, resid_pdrop=0.2, embd_pdrop=0.1,
        attn_pdrop=0.1, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model, rank = GPT2LMHeadModel(config), dist.get_rank()
    scale(model, 0.15, 0.3, 0.0, seed=5)
    monitor = {"enabled": True, "output_path": folder, "job_name": "run"}
    engine, *_ = deepspeed.initialize(model=model, config=settings(2, jsonl_monitor=monitor))
    engine.train()
    assert engine.rollout_mismatch is None
    sampling, everyone = SamplingParams(max_new_tokens=5, temperature=1.0), []
    for update in range(3):
        answers = engine.rollout([[3, 5, 7]], sampling, n=2 + rank)
        ids = torch.tensor([answer.prompt + answer.tokens for answer in answers])
        logits = engine(input_ids=ids).logits[:, 2:-1]
        train = torch_logprobs(logits, ids[:, 3:], sampling)
        rollout, mask = torch.tensor([answer.logprobs for answer in answers]), torch.ones(len(ids), 5, dtype=torch.bool)
        mask[0, rank:] = False
        parts: list[Any] = [None, None]
        dist.all_gather_object(parts, (train.detach() - rollout)[mask])
        if update != 1:
            given = engine.measure_mismatch(train, rollout, mask)
            assert asdict(given) == pytest.approx(formulas(torch.cat(parts)), rel=1e-6, abs=1e-12)
            assert engine.rollout_mismatch == given and given.largest > 0.01
            everyone.append(given)
        engine.backward(-train.mean())
        engine.step()
    assert engine.rollout_mismatch == everyone[-1]
    both = [engine.measure_mismatch(train, rollout, mask & (rank == 0)) for _ in range(2)]  # two of an update
    assert engine.rollout_mismatch == merged_mismatch(both) and both[0].tokens == int(mask.sum()) * (rank == 0) or rank
    with raises(*((DataError, "mask has shape") if rank else (UsageError, "measure_mismatch failed on rank 1"))):
        engine.measure_mismatch(train, rollout, mask[:, rank:])
    engine.destroy()
    return {name: [getattr(each, name) for each in everyone] for name in asdict(everyone[0])}


def test_each_measured_update_is_an_event(workers: Any, tmp_path: Path) -> None:
    values, _ = workers(2).run(measured, str(tmp_path), timeout=120)
    written = events_of(str(tmp_path))
    assert set(written) == {"k1", "k3", "largest", "outside", "tokens"}
    for name, wanted in values.items():
        assert written[name] == pytest.approx(wanted, rel=1e-6), name


def test_parts_count_by_their_tokens() -> None:
    nothing = Mismatch(0.0, 0.0, 0.0, 0.0, 0)
    assert merged_mismatch([nothing, nothing]) == merged_mismatch([]) == nothing
    one, three = Mismatch(0.4, 0.2, 0.5, 1.0, 1), Mismatch(0.0, 0.1, 0.7, 0.0, 3)
    assert math.isnan(merged_mismatch([one, Mismatch(math.nan, 0.0, math.nan, 0.0, 2)]).largest)
    merged = merged_mismatch([one, nothing, three])
    assert asdict(merged) == pytest.approx({"k1": 0.1, "k3": 0.125, "largest": 0.7, "outside": 0.25, "tokens": 4})
