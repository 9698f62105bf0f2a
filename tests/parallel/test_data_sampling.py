"""The block `data_efficiency.data_sampling` on two ranks: curricula and batches of tokens from `training_data`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import deepspeed
from deepspeed.data.indexed_dataset import MMapIndexedDatasetBuilder
from deepspeed.data.loader import RepeatingLoader
from deepspeed.errors import DataError, DeepSpeedConfigError, UsageError
from deepspeed.foundation.log import logger
from tests.harness.pool import WorkerError

SAMPLES, LARGEST = 96, 16
LENGTHS = np.random.default_rng(3).integers(1, LARGEST + 1, SAMPLES)


class Texts(Dataset):
    """Sample i has `LENGTHS[i]` tokens, all of them i."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((int(LENGTHS[index]),), index)


def padded(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    length = max(map(len, samples))
    tokens = torch.stack([torch.nn.functional.pad(sample, (0, length - len(sample)), value=-1) for sample in samples])
    return {"tokens": tokens, "numbers": tokens[:, 0]}


def indexes(folder: Path) -> None:
    values = np.unique(LENGTHS)
    rows = {
        "ids": [np.flatnonzero(LENGTHS == value) for value in values],
        "values": [[value] for value in values],
        "seqlen/seqlen_sample_to_metric": [[length] for length in LENGTHS],
    }
    (folder / "seqlen").mkdir(parents=True, exist_ok=True)
    for name, content in rows.items():
        builder = MMapIndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int64)
        for row in content:
            builder.add_item(torch.tensor(np.array(row)))
        builder.finalize(str(folder / f"{name}.idx"))


def metric(folder: str, **more: Any) -> dict[str, Any]:
    return {
        "index_to_sample_path": f"{folder}/ids", "index_to_metric_path": f"{folder}/values",
        "difficulty_type": "value", "clustering_type": "schedule_based", "min_difficulty": 4,
        "max_difficulty": LARGEST, "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
    } | more  # fmt: skip


def config(sampling: dict[str, Any], micro: int = 3, outer: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 2, "steps_per_print": None,
        "data_efficiency": {
            "enabled": outer, "seed": 5, "data_sampling": {"enabled": True, "num_epochs": 8} | sampling,
        },
    } | more  # fmt: skip


def curriculum(folder: str, **more: Any) -> dict[str, Any]:
    return {"curriculum_learning": {"enabled": True, "curriculum_metrics": {"length": metric(folder, **more)}}}


def engine_of(settings: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, training_data=Texts(), collate_fn=padded, **more
    )[0]


@contextlib.contextmanager
def captured() -> Iterator[list[str]]:
    """The lines that this rank logs meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def together(numbers: torch.Tensor) -> list[int]:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, numbers.tolist())
    return [number for part in parts for number in part]


def step(engine: Any, batches: Any) -> list[int]:
    """One update; the samples of all ranks."""
    numbers: list[int] = []
    for _ in range(engine.gradient_accumulation_steps()):
        batch = next(batches)
        numbers += together(batch["numbers"])
        engine.backward(engine(batch["numbers"].float()[:, None]).mean())
        engine.step()
    return sorted(numbers)


def with_curriculum(folder: str) -> None:
    engine = engine_of(config(curriculum(folder)))
    assert engine.curriculum_learning_enabled() and engine.training_dataloader.custom_sampler is not None
    seen: list[float] = []
    engine.set_data_post_process_func(
        lambda batch, state: (seen.append(state["current_difficulties"]["length"]), batch)[1]
    )
    batches = iter(engine.training_dataloader)
    steps = []
    for number in range(1, 13):
        allowed = min(LARGEST, int(number / 8 * (LARGEST - 4) + 4) // 2 * 2)
        steps.append(step(engine, batches))
        assert max(LENGTHS[steps[-1]]) <= allowed and len(steps[-1]) == 12 and seen[-2:] == [allowed] * 2
        if number == 5:
            engine.save_checkpoint(folder, "five")
    engine.destroy()
    again = engine_of(config(curriculum(folder)))
    again.load_checkpoint(folder, "five")
    batches = iter(again.training_dataloader)
    assert [step(again, batches) for _ in range(7)] == steps[5:]
    again.destroy()


def with_a_function(folder: str) -> None:
    engine = engine_of(config(curriculum(folder, schedule_type="custom")))
    engine.set_custom_curriculum_learning_schedule({"length": lambda number: 4 if number < 3 else LARGEST})
    batches = iter(engine.training_dataloader)
    assert [max(LENGTHS[step(engine, batches)]) <= 4 for _ in range(4)] == [True, True, False, False]
    engine.destroy()
    plain = engine_of(config(curriculum(folder), outer=False))
    assert plain.training_dataloader.custom_sampler is None and not plain.curriculum_learning_enabled()
    with pytest.raises(UsageError, match="not sampled by difficulty"):
        plain.set_custom_curriculum_learning_schedule({})
    plain.destroy()


def with_token_batches(folder: str) -> None:
    block = {"enabled": True, "max_tokens": 40 // 3, "sequence_picking_order": "random", "metrics_path": folder}
    settings = config({"dynamic_batching": block}, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 2}})
    engine = engine_of(settings)
    sampler, sizes, rates = engine.training_dataloader.custom_sampler, [], []
    numbers: list[int] = []
    for batch in engine.training_dataloader:
        assert int((batch["tokens"] >= 0).sum()) <= 39  # three packs
        numbers += (mine := together(batch["numbers"]))
        sizes.append(len(mine))
        rates.append(engine.get_lr()[0])
        engine.backward(engine(batch["numbers"].float()[:, None]).mean())
        engine.step()
    assert sorted(numbers) == list(range(SAMPLES))
    steps = [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    assert steps == sampler.step_sizes.tolist() and len(set(steps)) > 2
    assert rates[8] == pytest.approx(1e-2 * steps[4] / 12)  # after the warm-up, for 12 samples
    rate = engine.get_lr()[0]
    first = next(iter(engine.training_dataloader))  # of the next epoch
    assert sampler.epoch == 1 and rate == pytest.approx(1e-2 * sampler.step_sizes[0] / 12)
    assert int((first["tokens"] >= 0).sum()) <= 39
    engine.destroy()


def through_the_function(folder: str) -> None:
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as make,
    )

    block = {"enabled": True, "max_tokens": 16, "lr_scaling_method": "sqrt"}
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config({"dynamic_batching": block}))[0]
    with pytest.raises(DataError, match="needs the lengths"):
        make(Texts(), engine)
    assert dist.get_world_size(engine.data_parallel_group) == 2
    chosen = list(range(0, SAMPLES, 2))
    loader, scheduler, more = make(
        Texts(),
        engine,
        dataset_filter_ids=chosen,
        dataloader_collate_fn=lambda samples: torch.nn.utils.rnn.pad_sequence(samples, True, -1),
        batch_seqlens_fn=lambda tokens: (tokens >= 0).sum(1),
        sample_padding_fn=lambda sample, length: torch.nn.functional.pad(sample, (0, length - len(sample)), value=-1),
    )
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-2 * (more["batch_sizes"][0] / 12) ** 0.5)
    scheduler.step(0)
    assert engine.training_dataloader is loader and len(more["batch_sizes"]) == len(loader) // 2
    numbers = [number for tokens in loader for number in together(tokens[:, 0])]
    assert sorted(numbers) == chosen
    engine.destroy()


def one_rank_without_its_index(folder: str) -> None:
    path = f"{folder}/ids" if dist.get_rank() == 0 else f"{folder}/none"
    with pytest.raises((DataError, FileNotFoundError)) as refused:
        engine_of(config(curriculum(folder, index_to_sample_path=path)))
    assert dist.get_rank() == 1 or "rank 1 has no sampler of training_data" in str(refused.value)


def positions_that_are_kept_or_said(folder: str) -> None:
    """A repeating loader keeps its position; a position without a loader, and a loader without one, are logged."""
    settings = config({}, micro=6, dataloader_carry_last=True)
    engine = engine_of(settings)
    engine.training_dataloader = RepeatingLoader(engine.training_dataloader)
    batches = engine.training_dataloader
    steps = [step(engine, batches) for _ in range(7)]
    engine.save_checkpoint(folder, "seven")
    steps += [step(engine, batches) for _ in range(3)]
    evaluation = engine.deepspeed_io(Texts(), route="eval", batch_size=36, collate_fn=padded)
    for _ in range(2):  # each pass has all samples, whatever training carries over
        seen = [number for batch in evaluation for number in together(batch["numbers"])]
        assert sorted(seen) == list(range(SAMPLES))
    engine.destroy()
    again = engine_of(settings)
    again.training_dataloader = RepeatingLoader(again.training_dataloader)
    again.load_checkpoint(folder, "seven")
    assert [step(again, again.training_dataloader) for _ in range(3)] == steps[7:]
    again.destroy()
    model = torch.nn.Linear(1, 1)
    bare = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2), config=settings)[0]
    with captured() as lines:
        bare.load_checkpoint(folder, "seven")
    assert dist.get_rank() or any("position in the data (epoch" in line for line in lines)
    bare.save_checkpoint(folder, "bare")
    bare.destroy()
    late = engine_of(settings)
    with captured() as lines:
        late.load_checkpoint(folder, "bare")
    assert dist.get_rank() or any("no position in the data" in line for line in lines)
    late.destroy()


def a_skipped_step(folder: str) -> None:
    """After a step that the loss scaler skipped, the rate is that of the next batch, not of the last one."""
    block = {"enabled": True, "max_tokens": 13, "sequence_picking_order": "random", "metrics_path": folder}
    scale = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = engine_of(config({"dynamic_batching": block}, fp16=scale))
    sampler, sizes = engine.training_dataloader.custom_sampler, []
    for number, batch in enumerate(engine.training_dataloader):
        if number % 2 == 0:
            sizes.append(engine.get_lr()[0] / 1e-2 * 12)
        loss = engine(batch["numbers"].half()[:, None] / 100).mean()
        engine.backward(loss * (float("inf") if number == 3 else 1.0))
        engine.step()
    assert engine.skipped_steps == 1
    assert sizes == pytest.approx(sampler.step_sizes.tolist())
    engine.destroy()


def two_loaders(folder: str) -> None:
    block = {"enabled": True, "max_tokens": 13, "metrics_path": folder}
    engine = engine_of(config({"dynamic_batching": block}))
    from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as make,
    )

    chosen = list(range(0, SAMPLES, 2))
    _, scheduler, more = make(Texts(), engine, dataset_filter_ids=chosen, dataloader_collate_fn=padded)
    assert more["dataset_seqlens"] == LENGTHS[chosen].tolist()
    assert scheduler.get_last_lr()[0] == pytest.approx(1e-2 * more["batch_sizes"][0] / 12)
    engine.destroy()


def refused(folder: str) -> None:
    both = curriculum(folder) | {"dynamic_batching": {"enabled": True, "max_tokens": 9, "metrics_path": folder}}
    for settings, text in (
        (config(both), "exclude each other"),
        (config({"dynamic_batching": {"enabled": True, "metrics_path": folder}}), "`max_tokens` is missing"),
        (config(curriculum(folder, difficulty_type=None)), "`difficulty_type` is None"),
        (config(curriculum(folder, min_difficulty=2, max_difficulty=1)), "the first not above the second"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=text):
            engine_of(settings)


@pytest.mark.parametrize(
    "program",
    [
        with_curriculum,
        with_a_function,
        with_token_batches,
        through_the_function,
        one_rank_without_its_index,
        positions_that_are_kept_or_said,
        a_skipped_step,
        two_loaders,
        refused,
    ],
    ids=lambda program: program.__name__,
)
def test_sampling_by_the_json(workers: Any, program: Any, tmp_path: Path) -> None:
    indexes(tmp_path)
    workers(2).run(program, str(tmp_path), timeout=60)


def test_an_analysis_that_is_missing_is_refused_by_name(workers: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="FileNotFoundError"):
        workers(2).run(with_curriculum, str(tmp_path), timeout=60)
