"""The riskiest thing on one page: a tiny Llama over a sequence that two ranks share, ZeRO-3, equal to dense."""

from __future__ import annotations

from typing import Any

from tests.parallel.sequence_runs import close, trained


def test_a_sequence_in_two_equals_the_whole_one(workers: Any) -> None:
    for windows in workers(2).run(trained, "Llama", {"sp": 2}, 3, 1, 0.0, 10, timeout=120):
        close(windows)
