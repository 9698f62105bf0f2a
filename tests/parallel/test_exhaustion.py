"""Running out of memory: the category that it was for is named, and the keys that are suggested fit the same limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.pool import WorkerError, WorkerPool
from tests.parallel.exhaustion_plants import PLANTS, laid_over, reports, run_limited, suggestion

Workers = Callable[[int], WorkerPool]
_FAST = "one picture a rank"


@pytest.mark.parametrize("name", [_FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in PLANTS if n != _FAST)])
def test_the_category_is_named_and_the_suggestion_fits(workers: Workers, tmp_path: Path, name: str) -> None:
    category, ranks, model, room, config = PLANTS[name]
    workers(ranks).kill()  # new ones, without what other tests have mapped
    with pytest.raises(WorkerError):
        workers(ranks).run(run_limited, model, room, config, str(tmp_path), timeout=60)
    said = reports(str(tmp_path))
    assert said
    for report in said:
        assert report["category"] == category, said
        assert report["message"].startswith(f"memory ran out for {category}"), said
        assert suggestion(report["message"]) == report["suggestion"] != {}, said
    # In processes without the holes of the first run, as a user would.
    workers(ranks).run(run_limited, model, room, laid_over(config, said[0]["suggestion"]), str(tmp_path), timeout=60)
