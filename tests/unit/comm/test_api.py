"""The names of torch.distributed on two real ranks, and the comms logger."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.comm.logging import CommsLogger, as_table
from tests.unit.comm.ranks import run_ranks


@pytest.mark.parametrize("switched", [{}, {"DS_NATIVE": "0"}], ids=["native", "messages"])
def test_every_name_on_two_ranks(switched):
    script = Path(__file__).with_name("every_name.py").read_text()
    script = script.replace("from __future__ import annotations\n", "")
    ends = run_ranks("warnings.simplefilter('error')\n" + script, 2, **switched)
    assert [(end.code, end.out) for end in ends] == [(0, "all as expected\n")] * 2, [end.err for end in ends]
    assert "all_reduce   4000" in ends[0].err and "straggler_ms" in ends[0].err


def test_bandwidths_follow_the_convention_of_nccl_tests():
    log = CommsLogger(enabled=True)
    log.record("all_reduce", 1_000_000, 4, 0.001, "")
    log.record("all_gather_into_tensor", 1_000_000, 4, 0.001, "")
    log.record("broadcast", 1_000_000, 4, 0.002, "")
    rows = {row["op"]: (round(row["algbw_gbs"], 6), round(row["busbw_gbs"], 6)) for row in log.summary()}
    assert rows == {"all_reduce": (1, 1.5), "all_gather_into_tensor": (1, 0.75), "broadcast": (0.5, 0.5)}


def test_the_straggler_is_what_a_rank_lost_to_waiting():
    log = CommsLogger(enabled=True)
    log.record("all_reduce", 8, 2, 0.005, "")
    log.record("all_reduce", 8, 2, 0.003, "")
    (row,) = log.summary({("all_reduce", 8, 2): [1.0, 3.0]})
    assert row["straggler_ms"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("settings", "prof", "wanted"),
    [
        ({}, True, False),
        ({"enabled": True}, False, True),
        ({"enabled": True, "prof_all": False}, False, False),
        ({"enabled": True, "prof_all": False}, True, True),
        ({"enabled": True, "prof_all": False, "prof_ops": ["barrier"]}, False, True),
    ],
)
def test_what_is_timed(settings, prof, wanted):
    assert CommsLogger(**settings).wants("barrier", prof) is wanted


def test_the_table_lines_up():
    assert as_table([]) == "no collective was timed"
    assert as_table([{"op": "x", "ms": 1.0}, {"op": "long", "ms": 10.0}]).splitlines() == [
        "  op      ms",
        "   x   1.000",
        "long  10.000",
    ]
