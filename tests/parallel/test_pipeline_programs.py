"""Random programs in stages equal the same programs in one piece, under delays."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.pipeline_programs import run_programs


@pytest.mark.parametrize(
    ("ranks", "first", "count"),
    [
        (2, 0, 15),
        *(pytest.param(ranks, 1000 * ranks, 200 if ranks < 4 else 100, marks=pytest.mark.slow) for ranks in (2, 3, 4)),
    ],
)
def test_random_programs_equal_one_process(workers: Any, ranks: int, first: int, count: int) -> None:
    for wrong in workers(ranks).run(run_programs, first, count, timeout=500):
        assert not wrong, "\n".join(map(str, wrong))
