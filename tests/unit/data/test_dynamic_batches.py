"""Batches of equal tokens: every sample once, equal steps on all ranks, the whole batch's gradient."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.data.dynamic_batches import (
    TokenBatchSampler,
    VariableBatchSizeLR,
    batch_by_seqlens,
    scale_lr,
    token_batches,
)
from deepspeed.errors import ArgumentError, DataError, NotAvailableError

LENGTHS = [3, 5, 2, 8, 4, 4, 1, 9, 3]


def lengths_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 512, count)


@pytest.mark.parametrize("count", [1, 40, 41, 20_000])
@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen", "bucketed"])
@pytest.mark.parametrize("padded", [False, True])
def test_every_sample_is_in_one_micro_batch_within_the_budget(count: int, order: Any, padded: bool) -> None:
    lengths = lengths_of(count)
    batches = token_batches(lengths, 2048, order, seed=1, padded=padded)
    assert np.array_equal(np.sort(batches.ids), np.arange(count)) and not len(batches.left_out)
    cost = batches.longest * batches.counts if padded else batches.tokens
    assert cost.max() <= 2048 and batches.longest.tolist() == [int(lengths[ids].max()) for ids in batches]
    if order in ("dataloader", "seqlen"):
        assert np.all(np.diff(lengths[batches.ids] if order == "seqlen" else batches.ids) >= 0)
        for batch in range(len(batches) - 1):  # the next sample would not have fitted
            ids = [*batches[batch], batches[batch + 1][0]]
            size = lengths[ids].max() * len(ids) if padded else lengths[ids].sum()
            assert size > 2048


def test_counts_are_limited_and_what_does_not_fit_is_listed() -> None:
    batches = token_batches([3, 11, 5, 9, 1, 1, 1], 10, max_batch_size=2)
    assert [ids.tolist() for ids in batches] == [[0, 2], [3, 4], [5, 6]] and batches.left_out.tolist() == [1]
    batches = token_batches([3, 11, 5, 9, 2, 2], 10, min_batch_size=2)
    assert [ids.tolist() for ids in batches] == [[0, 2], [4, 5]] and batches.left_out.tolist() == [1, 3]
    assert len(token_batches([], 10)) == 0 and len(token_batches([11], 10)) == 0
    for options in ({"order": "x"}, {"order": "random"}, {"max_tokens": 0}, {"max_batch_size": 0}):
        with pytest.raises(ArgumentError):
            token_batches([1], **{"max_tokens": 10, **options})  # type: ignore[arg-type]
    with pytest.raises(DataError, match="sequence 1 has 0 tokens"):
        token_batches([1, 0], 10)


@pytest.mark.parametrize("multiple", [1, 2, 3, 7, 12, 40])
def test_micro_batches_are_halved_until_ranks_have_equally_many(multiple: int) -> None:
    lengths = lengths_of(40)
    whole = token_batches(lengths, 1024, "random", seed=0)
    evened = whole.evened(multiple)
    assert len(evened) % multiple == 0 and len(evened) - len(whole) < multiple
    assert np.array_equal(evened.ids, whole.ids) and evened.tokens.max() <= 1024
    parts = [evened.of_rank(rank, multiple) for rank in range(multiple)]
    assert {len(part) for part in parts} == {len(evened) // multiple}
    assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(40))


def test_too_few_samples_for_the_ranks() -> None:
    batches = token_batches([9, 9, 9], 10)
    with pytest.raises(DataError, match="3 micro-batches of 3 samples cannot become a multiple of 2"):
        batches.evened(2)
    rest = batches.evened(2, drop_last=True)
    assert [ids.tolist() for ids in rest] == [[0], [1]] and rest.left_out.tolist() == [2]
    assert len(batches.evened(4, drop_last=True)) == 0


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_sampler_gives_ranks_equal_steps_and_epochs_other_orders(world: int) -> None:
    lengths = lengths_of(300)
    samplers = [TokenBatchSampler(lengths, 2048, rank, world, accumulation=2) for rank in range(world)]
    epochs = []
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert {len(part) for part in parts} == {len(samplers[0])} and len(samplers[0]) % 2 == 0
        assert sorted(sample for part in parts for batch in part for sample in batch) == list(range(300))
        first_step = sum(len(batch) for part in parts for batch in part[:2])
        assert samplers[0].step_sizes[0] == first_step and samplers[0].step_sizes.sum() == 300
        epochs.append(parts)
    assert epochs[0] != epochs[1]
    again = TokenBatchSampler(lengths, 2048, 0, world, accumulation=2)
    assert list(again) == epochs[0][0]
    with pytest.raises(ArgumentError, match="rank 1 of 1"):
        TokenBatchSampler(lengths, 2048, 1)


def test_the_gradient_is_that_of_the_whole_batch(alone: None) -> None:
    torch.manual_seed(0)
    lengths = lengths_of(60) % 30 + 1
    table = torch.randn(60, 30, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def loss_sum(ids: Any, forward: Any) -> torch.Tensor:
        padded = int(lengths[ids].max())
        mask = torch.arange(padded) < torch.tensor(lengths[ids])[:, None]
        return (forward(table[torch.tensor(ids), :padded]).squeeze(-1) ** 2)[mask].sum()

    (loss_sum(np.arange(60), model) / lengths.sum()).backward()
    expected = [parameter.detach() - parameter.grad for parameter in model.parameters()]  # type: ignore[operator]
    model.zero_grad()
    sampler = TokenBatchSampler(lengths, 128)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": len(sampler),
        "zero_optimization": {"stage": 2},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config)
    assert len({len(ids) for ids in sampler}) > 3
    for ids in sampler:
        engine.backward(loss_sum(np.array(ids), engine), num_items=int(lengths[ids].sum()))
        engine.step()
    for parameter, value in zip(engine.module.parameters(), expected, strict=True):
        assert float((parameter.detach() - value).abs().max()) <= 1e-6
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("order", ["dataloader", "bucketed"])
def test_time_grows_with_the_number_of_samples(order: Any) -> None:
    def seconds(count: int) -> float:
        lengths, times = lengths_of(count), []
        for _ in range(3):
            start = time.process_time()
            token_batches(lengths, 4096, order, seed=0).evened(8)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(1_000_000) / seconds(125_000) <= 2.3**3


def test_upstreams_interface_and_its_last_samples() -> None:
    from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as names

    assert names.batch_by_seqlens is batch_by_seqlens and names.scale_lr is scale_lr
    ids, sizes, longest = batch_by_seqlens(LENGTHS, 10)
    # upstream's first four micro-batches; it leaves out the last sample
    assert ids == [(0, [0, 1, 2]), (1, [3]), (2, [4, 5, 6]), (3, [7]), (4, [8])]
    assert sizes == [3, 1, 3, 1, 1] and longest == [5, 8, 4, 9, 3]
    ids, sizes, longest = batch_by_seqlens(LENGTHS, 10, effective_batch_size=2)
    assert [batch for batch, _ in ids] == [0, 0, 1, 1, 2, 2] and sum(sizes) == 9
    assert sorted(sample for _, samples in ids for sample in samples) == list(range(9))
    ids, sizes, _ = batch_by_seqlens(LENGTHS, 10, max_batch_size=2, sequence_picking_order="seqlen")
    assert ids[0] == (0, [6, 2]) and max(sizes) == 2
    assert batch_by_seqlens([11, 12], 10) == ([], [], [])
    for arguments in ({"sequence_ids_per_mb": [1]}, {"required_microbatches_of_same_size": True}):
        with pytest.raises(NotAvailableError, match=next(iter(arguments))):
            batch_by_seqlens(LENGTHS, 10, **arguments)  # type: ignore[arg-type]


def test_rates_by_batch_size() -> None:
    assert scale_lr(4, 8, 0.1) == pytest.approx(0.2) and scale_lr(4, 8) == 2
    assert scale_lr(4, 16, 0.1, "sqrt") == pytest.approx(0.2)
    assert scale_lr(4, 8, 0.1, "none") == scale_lr(4, 8, 0.1, None) == 0.1
    for arguments in ((0, 8), (4, 0), (4, 8, 0.1, "square")):
        with pytest.raises(ArgumentError):
            scale_lr(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["torch", "ours"])
def test_a_scheduler_scales_the_rates_of_another(kind: str) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if kind == "torch":
            return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return deepspeed.runtime.lr_schedules.WarmupLR(optimizer, 0.0, 1.0, 4, "linear")

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)

    plain = schedule(optimizer())
    scaled = VariableBatchSizeLR(schedule(optimizer()), 4, [4, 8, 2], lr_scaling_method="linear")
    resumed = VariableBatchSizeLR(schedule(optimizer()), 1, [1])
    for step in range(7):
        rate = plain.optimizer.param_groups[0]["lr"]
        assert scaled.get_last_lr() == scaled.get_lr() == [pytest.approx(rate * [1, 2, 0.5][step % 3])]
        assert scaled.base_lrs == [rate]
        resumed.load_state_dict(scaled.state_dict())
        assert resumed.get_last_lr() == scaled.get_last_lr()
        for scheduler in (plain, scaled):
            scheduler.optimizer.step()
            scheduler.step()
    for sizes in ([], [0]):
        with pytest.raises(ArgumentError):
            VariableBatchSizeLR(plain, 4, sizes)
