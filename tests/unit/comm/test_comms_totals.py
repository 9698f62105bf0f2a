"""Figures of the comms logger where more calls were made than are kept one by one."""

from __future__ import annotations

import pytest

from deepspeed.comm.watchdog.comms_logger import CommsLogger


def test_the_total_is_of_as_many_calls_as_are_counted() -> None:
    logger = CommsLogger(enabled=True)
    for _ in range(20_000):
        logger.record("all_reduce", 1024, 2, 1e-3, "")
    told = logger.log_all(print_log=False, return_dict=True)
    assert told is not None
    row = told["summary"]["all_reduce"][1024]
    assert row["count"] == 20_000 and row["total_latency_ms"] == pytest.approx(20_000)
    assert row["avg_latency_ms"] == pytest.approx(1.0)


def test_bytes_are_counted_by_the_ranks_they_came_from() -> None:
    logger = CommsLogger(enabled=True)
    for ranks in ((0, 1), (0, 2), (0, 1)):
        logger.arrived(ranks, 64)
    assert logger.received == {(0, 1): 128, (0, 2): 64}
    logger.reset()
    assert logger.received == {}


@pytest.mark.parametrize(
    ("operation", "parts"),
    [("all_reduce", 6), ("all_gather_into_tensor", 3), ("reduce_scatter_tensor", 3), ("all_to_all_single", 3),
     ("broadcast", 4), ("irecv", 4), ("send", 0), ("barrier", 0)],
)  # fmt: skip
def test_what_a_rank_gets_of_a_message(operation: str, parts: int) -> None:
    """Of four ranks, in quarters of the message: each sums its own quarter and gets three; or it gets all."""
    assert CommsLogger.received_in(operation, 4096, 4) == parts * 1024
