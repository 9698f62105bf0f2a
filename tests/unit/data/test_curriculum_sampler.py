"""Sampling by difficulty: which samples a step may have, draws that a resume repeats, wrong indexes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.data.curriculum_sampler import CurriculumSampler
from deepspeed.data.indexed_dataset import MMapIndexedDatasetBuilder
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.errors import DataError, DeepSpeedConfigError, UsageError

SAMPLES = 240
VALUES = np.random.default_rng(0).integers(1, 25, SAMPLES)


def pair(path: Path, rows: list[Any]) -> str:
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.int64)
    for row in rows:
        builder.add_item(torch.tensor(row))
    builder.finalize(f"{path}.idx")
    return str(path)


def metric(folder: Path, values: Any = VALUES, by: str = "value", **more: Any) -> dict[str, Any]:
    """A metric's block, with an index of these values."""
    folder.mkdir(exist_ok=True)
    distinct = np.unique(values)
    rows = [np.flatnonzero(values == value).tolist() for value in distinct]
    schedule = {"total_curriculum_step": 10, "difficulty_step": 1}
    largest = 100 if by == "percentile" else int(distinct[-1])
    return {
        "index_to_sample_path": pair(folder / "ids", rows),
        "index_to_metric_path": pair(folder / "values", [[int(value)] for value in distinct]),
        "difficulty_type": by, "clustering_type": "schedule_based",
        "min_difficulty": 3, "max_difficulty": largest, "schedule_type": "fixed_linear", "schedule_config": schedule,
    } | more  # fmt: skip


def global_batches(metrics: dict[str, Any], world: int = 1, steps: int = 30, **options: Any) -> list[list[int]]:
    ranks = [CurriculumSampler(metrics, SAMPLES, 12 // world, r, world, epochs=20, **options) for r in range(world)]
    passes = [iter(sampler) for sampler in ranks]
    return [[sample for batches in passes for sample in next(batches)] for _ in range(steps)]


def difficulty(step: int, largest: int) -> int:
    return min(largest, int(step / 10 * (largest - 3) + 3))


def test_a_step_has_only_samples_that_its_difficulty_allows(tmp_path: Path) -> None:
    metrics = {"length": metric(tmp_path / "length")}
    batches = global_batches(metrics)
    hardest = [max(VALUES[batch]) for batch in batches]
    for step, largest in enumerate(hardest, start=1):
        assert largest <= difficulty(step, 24)
    assert hardest[0] <= 5 and max(hardest) > 20
    assert all(sorted(a) == sorted(b) for a, b in zip(batches, global_batches(metrics, world=3), strict=True))
    assert global_batches(metrics, seed=1) != batches


def test_percentiles(tmp_path: Path) -> None:
    batches = global_batches({"rare": metric(tmp_path / "rare", by="percentile")})
    order = np.argsort(VALUES, kind="stable")
    place = np.empty(SAMPLES, int)
    place[order] = np.arange(SAMPLES)
    for step, batch in enumerate(batches, start=1):
        percent = difficulty(step, 100)
        assert max(place[batch]) < (SAMPLES if percent == 100 else percent * (SAMPLES // 100))


def test_several_metrics_allow_what_all_of_them_allow(tmp_path: Path) -> None:
    other = np.random.default_rng(1).integers(1, 25, SAMPLES)
    single = {"clustering_type": "single_cluster", **{key: None for key in ("index_to_sample_path", "difficulty_type")}}
    metrics = {
        "a": metric(tmp_path / "a"),
        "b": metric(tmp_path / "b", other),
        "cut": metric(tmp_path / "cut", **single),
    }
    for step, batch in enumerate(global_batches(metrics), start=1):
        assert max(VALUES[batch]) <= difficulty(step, 24) and max(other[batch]) <= difficulty(step, 24)


def test_every_sample_comes_equally_often_in_the_end(tmp_path: Path) -> None:
    sampler = CurriculumSampler({"a": metric(tmp_path / "a", min_difficulty=24)}, SAMPLES, 12, epochs=10)
    counts = Counter(sample for batch in sampler for sample in batch)
    assert len(sampler) == 200 and set(counts.values()) == {10}


def test_the_end_is_after_the_last_whole_batch(tmp_path: Path) -> None:
    metrics = {"a": metric(tmp_path / "a")}
    sampler = CurriculumSampler(metrics, SAMPLES, 7)
    batches = list(sampler)
    assert len(batches) == len(sampler) == SAMPLES // 7 and all(len(batch) == 7 for batch in batches)


@pytest.mark.parametrize("kills", [[5, 7, 3, 9], [1, 1, 1, 21]])
def test_a_resume_goes_on_with_the_same_draws_on_other_ranks(tmp_path: Path, kills: list[int]) -> None:
    metrics, data = {"a": metric(tmp_path / "a")}, list(range(SAMPLES))
    expected = [sorted(batch) for batch in global_batches(metrics, steps=24)]
    state, taken = None, []
    for world, steps in zip((1, 2, 4, 3), kills, strict=True):
        samplers = [CurriculumSampler(metrics, SAMPLES, 12 // world, r, world, epochs=20) for r in range(world)]
        loaders = [
            DeepSpeedDataLoader(data, 12 // world, rank=r, world=world, sampler=s, collate_fn=list)  # type: ignore[arg-type]
            for r, s in enumerate(samplers)
        ]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        passes = [iter(loader) for loader in loaders]
        taken += [sorted(sample for batches in passes for sample in next(batches)) for _ in range(steps)]
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
    assert taken == expected


def test_a_resume_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    metrics, data = {"a": metric(tmp_path / "a")}, list(range(SAMPLES))

    def loader() -> DeepSpeedDataLoader:
        sampler = CurriculumSampler(metrics, SAMPLES, 3, accumulation=4, epochs=20)
        return DeepSpeedDataLoader(data, 3, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]

    whole = iter(loader())
    expected = [next(whole) for _ in range(14)]
    first = loader()
    batches = iter(first)
    assert [next(batches) for _ in range(6)] == expected[:6]
    again = loader()
    again.load_state_dict(first.state_dict())
    batches = iter(again)
    assert [next(batches) for _ in range(8)] == expected[6:]
    again.rewind(9, 3, 1)
    batches = iter(again)
    assert [next(batches) for _ in range(9)] == expected[5:]


def test_batches_are_processed_with_their_difficulties(tmp_path: Path) -> None:
    sampler = CurriculumSampler({"a": metric(tmp_path / "a")}, SAMPLES, 6, accumulation=2, epochs=5)
    loader = DeepSpeedDataLoader(list(range(SAMPLES)), 6, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    loader.set_post_process(lambda batch, state: (state["curriculum_step"], state["current_difficulties"]["a"]))
    batches = iter(loader)
    assert [next(batches)[1] for _ in range(6)] == [difficulty(step, 24) for step in (1, 1, 2, 2, 3, 3)]


def test_a_function_sets_the_pace(tmp_path: Path) -> None:
    sampler = CurriculumSampler({"a": metric(tmp_path / "a", schedule_type="custom")}, SAMPLES, 12, epochs=5)
    with pytest.raises(UsageError, match="set_custom_curriculum_learning_schedule"):
        next(iter(sampler))
    sampler = CurriculumSampler({"a": metric(tmp_path / "a", schedule_type="custom")}, SAMPLES, 12, epochs=5)
    with pytest.raises(UsageError, match="no curriculum metric 'b'"):
        sampler.set_schedules({"b": lambda step: 24})
    sampler.set_schedules({"a": lambda step: 4 if step < 3 else 24})
    batches = iter(sampler)
    assert [max(VALUES[next(batches)]) <= 4 for _ in range(5)] == [True, True, False, False, False]


SLOW = {"total_curriculum_step": 1000, "difficulty_step": 1}
WRONG = [
    (dict(difficulty_type="size"), DeepSpeedConfigError, "`difficulty_type` is 'size'"),
    (dict(index_to_sample_path=None), DeepSpeedConfigError, "`index_to_sample_path` is missing"),
    (dict(min_difficulty=0, schedule_config=SLOW), DataError, "smallest value is 1"),
    (dict(schedule_type="linear"), DeepSpeedConfigError, "unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "kind", "text"), WRONG)
def test_wrong_metrics_are_refused_at_the_start(tmp_path: Path, more: dict, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        CurriculumSampler({"a": metric(tmp_path / "a", **more)}, SAMPLES, 12)


def test_wrong_indexes_are_refused(tmp_path: Path) -> None:
    good = metric(tmp_path / "a")
    with pytest.raises(DataError, match="ids from 0 to 239, and the dataset 100"):
        CurriculumSampler({"a": good}, 100, 12)
    with pytest.raises(DataError, match="fewer than a global batch"):
        CurriculumSampler({"a": good}, SAMPLES, 500)
    with pytest.raises(DataError, match="in ascending order"):
        CurriculumSampler({"a": good | {"index_to_metric_path": good["index_to_sample_path"]}}, SAMPLES, 12)
    with pytest.raises(FileNotFoundError):
        CurriculumSampler({"a": good | {"index_to_metric_path": str(tmp_path / "none")}}, SAMPLES, 12)
    with pytest.raises(DeepSpeedConfigError, match="`curriculum_metrics` is missing"):
        CurriculumSampler({}, SAMPLES, 12)


def test_another_global_batch_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    metrics, data = {"a": metric(tmp_path / "a")}, list(range(SAMPLES))

    def loader(micro: int, accumulation: int) -> DeepSpeedDataLoader:
        sampler = CurriculumSampler(metrics, SAMPLES, micro, accumulation=accumulation, epochs=20)
        return DeepSpeedDataLoader(data, micro, sampler=sampler, collate_fn=list)  # type: ignore[arg-type]

    first = loader(3, 4)
    batches = iter(first)
    for _ in range(8):
        next(batches)
    other = loader(8, 2)
    other.load_state_dict(first.state_dict())
    assert len(loader(8, 2)) == SAMPLES * 20 // 16 * 2
    passes = iter(other)
    assert all(len(next(passes)) == 8 for _ in range(4)) and other.state_dict()["seen"] == 24 + 32
    again = loader(8, 2)
    again.load_state_dict(other.state_dict())
    assert [next(passes) for _ in range(3)] == [batch for _, batch in zip(range(3), again, strict=False)]


def test_the_length_needs_no_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CurriculumSampler({"a": metric(tmp_path / "a")}, SAMPLES, 12, epochs=1000)
    batches = iter(sampler)
    for _ in range(50):
        next(batches)
    monkeypatch.setattr(sampler, "_batch", None)
    assert len(sampler) == SAMPLES * 1000 // 12


def test_ids_outside_of_the_dataset_are_refused_at_the_start(tmp_path: Path) -> None:
    for wrong in (-7, SAMPLES):
        block = metric(tmp_path / f"a{wrong}")
        rows = [[number] for number in range(23)] + [[wrong]]
        block["index_to_sample_path"] = pair(tmp_path / f"ids{wrong}", rows)
        with pytest.raises(DataError, match="made of another dataset"):
            CurriculumSampler({"a": block}, SAMPLES, 12)
    few = metric(tmp_path / "few", VALUES[:50], by="percentile")
    with pytest.raises(DataError, match="50 samples give 0 for each of 100 points"):
        CurriculumSampler({"a": few}, 50, 12)
