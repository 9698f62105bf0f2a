"""Running out of memory: the category that it was for is named, and the keys that are suggested fit the same limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.pool import WorkerError, WorkerPool
from tests.parallel.exhaustion_plants import (
    HOPELESS,
    MEASURED,
    PLANTS,
    Plant,
    predicted_and_mapped,
    reports,
    run_limited,
    save_first,
    suggestion,
)

Workers = Callable[[int], WorkerPool]
_APART = 8  # MiB: by how much runs map more or less than others, as their threads come


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Ranks in interpreters of their own: forked ones have room in what was mapped before."""
    pools: dict[int, WorkerPool] = {}
    yield lambda size: pools.setdefault(size, WorkerPool(size))
    for pool in pools.values():
        pool.close()


def said_by(workers: Workers, plant: Plant, folder: str) -> list[dict[str, Any]]:
    """What ranks say that run out of memory."""
    workers(plant.ranks).kill()  # new ones, without what other tests have mapped
    if plant.resumes:
        workers(plant.ranks).run(save_first, plant, folder, timeout=60)
        workers(plant.ranks).kill()
    with pytest.raises(WorkerError):
        workers(plant.ranks).run(run_limited, plant, {}, folder, timeout=60)
    said = reports(folder)
    assert said
    return said


def named(workers: Workers, plant: Plant, folder: str) -> list[dict[str, Any]]:
    """What ranks say, which is right."""
    said = said_by(workers, plant, folder)
    for report in said:
        assert report["category"] == plant.category, said
        assert report["message"].startswith(f"memory ran out for {plant.category}"), said
        assert suggestion(report["message"]) == report["suggestion"] != {}, said
        assert not report["resumed"], said
    if plant.alone is not None:
        assert [report["rank"] for report in said] == [plant.alone], said
    return said


def test_the_category_is_named(workers: Workers, tmp_path: Path) -> None:
    named(workers, PLANTS["one picture a rank"], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_the_category_is_named_and_the_suggestion_fits(workers: Workers, tmp_path: Path, name: str) -> None:
    plant, folder = PLANTS[name], str(tmp_path)
    said = named(workers, plant, folder)
    # In processes without the holes of the first run, as a user would.
    left = workers(plant.ranks).run(run_limited, plant, said[0]["suggestion"], folder, timeout=60)
    print(f"{name}: {plant.category}, {said[0]['suggestion']}, {left} MiB were left")


@pytest.mark.slow
@pytest.mark.parametrize("name", HOPELESS)
def test_where_no_key_helps_the_error_says_so(workers: Workers, tmp_path: Path, name: str) -> None:
    plant = HOPELESS[name]
    for report in said_by(workers, plant, str(tmp_path)):
        assert report["category"] == plant.category, report
        assert report["suggestion"] == {} and "What would fit" not in report["message"], report
        assert "No stage and no place" in report["message"], report


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_a_prediction_covers_what_a_run_maps(workers: Workers, tmp_path: Path, name: str) -> None:
    """Far above it would be no answer either: settings that fit would not be suggested."""
    ranks, model, config, loose = MEASURED[name]
    workers(ranks).kill()
    for predicted, mapped in workers(ranks).run(predicted_and_mapped, model, config, str(tmp_path), timeout=60):
        print(f"{name}: predicted {predicted} MiB, mapped {mapped}, {predicted / mapped:.2f}")
        assert mapped <= 1.05 * predicted + _APART and predicted <= loose * mapped
