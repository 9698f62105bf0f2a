"""Figures of the comms logger where more calls were made than are kept one by one."""

from __future__ import annotations

import pytest

from deepspeed.comm.logging import CommsLogger


def test_the_total_is_of_as_many_calls_as_are_counted() -> None:
    logger = CommsLogger(enabled=True)
    for _ in range(20_000):
        logger.record("all_reduce", 1024, 2, 1e-3, "")
    told = logger.log_all(print_log=False, return_dict=True)
    assert told is not None
    row = told["summary"]["all_reduce"][1024]
    assert row["count"] == 20_000 and row["total_latency_ms"] == pytest.approx(20_000)
    assert row["avg_latency_ms"] == pytest.approx(1.0)
