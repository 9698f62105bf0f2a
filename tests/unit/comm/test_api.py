"""The names of torch.distributed on two real ranks, and the comms logger."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepspeed.comm.watchdog.comms_logger import (
    CommsLogger,
    Curve,
    calc_bw_log,
    convert_size,
    trimmed_mean,
)
from deepspeed.errors import ArgumentError
from tests.unit.comm.ranks import run_ranks


@pytest.mark.parametrize(
    "switched", [{}, pytest.param({"DS_NATIVE": "0"}, marks=pytest.mark.slow)], ids=["native", "messages"]
)
def test_every_name_on_two_ranks(switched):
    script = Path(__file__).with_name("every_name.py").read_text()
    script = script.replace("from __future__ import annotations\n", "")
    ends = run_ranks("warnings.simplefilter('error')\n" + script, 2, **switched)
    assert [(end.code, end.out) for end in ends] == [(0, "all as expected\n")] * 2, [end.err for end in ends]
    for title in ("Comm. Op  Message Size", "tput_avg (Gbps)", "all_reduce       3.91 KB", "Total straggler(ms)"):
        assert title in ends[0].err


def test_bandwidths_follow_the_convention_of_nccl_tests():
    log = CommsLogger(enabled=True)
    log.record("all_reduce", 1_000_000, 4, 0.001, "")
    log.record("all_gather_into_tensor", 1_000_000, 4, 0.001, "")
    log.record("broadcast", 1_000_000, 4, 0.002, "")
    rows = {row["op"]: (round(row["algbw_gbs"], 6), round(row["busbw_gbs"], 6)) for row in log.summary()}
    assert rows == {"all_reduce": (1, 1.5), "all_gather_into_tensor": (1, 0.75), "broadcast": (0.5, 0.5)}


def test_both_tables_have_the_same_speeds():
    log = CommsLogger(enabled=True)
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "all_to_all_single"):
        log.record(name, 1_000_000, 4, 0.001, "")
    for row in log.summary():
        _, _, (speed,), (bus,) = log.comms_dict[row["op"]][1_000_000]
        moved = 2 if row["op"] == "all_reduce" else 1  # the convention of `calc_bw_log`
        assert (speed, bus) == pytest.approx((8 * moved * row["algbw_gbs"], 8 * row["busbw_gbs"])), row["op"]
    log.append("all_gather", "gather of a part", 1.0, 250_000)
    assert log.comms_dict["gather of a part"][250_000][2] == [pytest.approx(2.0)]  # one rank here


def test_messages_of_one_size_in_two_groups_are_told_together():
    log = CommsLogger(enabled=True)
    for ranks, seconds in ((2, 0.001), (4, 0.003), (4, 0.002)):
        log.record("all_reduce", 8, ranks, seconds, "")
    told = log.log_all(print_log=False, show_straggler=True, return_dict=True)
    waits, figures = (told[name]["all_reduce"][8] for name in ("straggler_analysis", "summary"))
    assert waits["count"] == figures["count"] == 3
    assert waits["total_comm_lat_ms"] == pytest.approx(6.0) == figures["total_latency_ms"]


def test_a_setting_that_is_none_leaves_the_block():
    log = CommsLogger()
    log.configure(SimpleNamespace(enabled=True, verbose=True), enabled=None, verbose=False)
    assert log.enabled and not log.verbose


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
    assert CommsLogger.as_table([]) == "no collective was timed"
    assert CommsLogger.as_table([{"op": "x", "ms": 1.0}, {"op": "long", "ms": 10.0}]).splitlines() == [
        "  op      ms",
        "   x   1.000",
        "long  10.000",
    ]


def test_the_comms_logger_as_scripts_drive_it():
    log = CommsLogger()
    log.start_profiling_op(["all_reduce"])
    log.configure(SimpleNamespace(enabled=True, prof_all=False, prof_ops=["barrier"], verbose=False, debug=False))
    assert log.wants("barrier", False) and not log.wants("all_reduce", False)
    log.start_profiling_op(["all_reduce", "barrier"])
    log.stop_profiling_op(["barrier"])
    assert log.prof_ops == ["all_reduce"]
    log.start_profiling_comms()
    assert log.wants("gather", False)
    log.stop_profiling_comms()
    assert not log.wants("gather", False)
    for milliseconds in (1.0, 2.0, 3.0):
        log.append("all_reduce", "all_reduce | [Caller Func: step]", milliseconds, 10**6)
    (row,) = log.comms_dict["all_reduce | [Caller Func: step]"].values()
    assert row == [3, [1.0, 2.0, 3.0], pytest.approx([16.0, 8.0, 16 / 3]), [0.0, 0.0, 0.0]]  # a bus of one rank
    told = log.log_all(print_log=False, show_straggler=True, return_dict=True)
    figures = told["summary"]["all_reduce | [Caller Func: step]"][10**6]
    assert (figures["avg_latency_ms"], figures["total_latency_ms"], figures["msg_size_str"]) == (2.0, 6.0, "976.56 KB")
    waits = told["straggler_analysis"]["all_reduce | [Caller Func: step]"][10**6]
    assert (waits["total_comm_lat_ms"], waits["total_straggler_ms"]) == (6.0, 0.0)
    assert log.log_all(print_log=False) is None and told["metadata"]["world_size"] == 1


@pytest.mark.parametrize(
    ("operation", "speeds"),
    [
        ("all_reduce", (16.0, 12.0)),
        ("all_gather", (32.0, 24.0)),
        ("all_to_all_single", (8.0, 6.0)),
        ("send", (8.0, 8.0)),
    ],
)
def test_speeds_of_four_ranks_in_gigabits(operation, speeds):
    assert calc_bw_log(operation, 10**6, 1.0, 4) == pytest.approx(speeds)


def test_sizes_and_means_in_words():
    assert [convert_size(size) for size in (0, 1, 1024, 1536 * 1024)] == ["0.0 B", "1.0 B", "1.0 KB", "1.5 MB"]
    assert trimmed_mean([100.0, *[1.0] * 9]) == 1.0 and trimmed_mean([]) == 0.0 and trimmed_mean([1.0, 3.0]) == 2.0


def test_a_long_run_keeps_the_newest_times_and_counts_all():
    log = CommsLogger(enabled=True)
    for number in range(10_000):
        log.record("all_reduce", 8, 2, number / 1e3, "", received=8)
    (row,) = log.summary()
    assert (row["count"], row["received_bytes"]) == (10_000, 80_000)
    assert row["total_ms"] == pytest.approx(sum(range(10_000)))
    count, times, *_ = log.comms_dict["all_reduce"][8]
    assert count == 10_000 and times == pytest.approx(range(10_000 - len(times), 10_000)) and len(times) < 10_000


def test_the_machines_curve_stands_beside(tmp_path):
    file = tmp_path / "curve.json"
    rows = [{"bytes": 1 << 10, "busbw": 1.0}, {"bytes": 1 << 14, "busbw": 4.0}]
    file.write_text(json.dumps({"curve": {"all_reduce": rows, "reduce_scatter": rows}}))
    curve = Curve.read(str(file))
    assert [curve.busbw("all_reduce", 1 << p) for p in (8, 10, 12, 14, 20)] == pytest.approx([1.0, 1.0, 2.0, 4.0, 4.0])
    assert curve.busbw("reduce", 1 << 12) == pytest.approx(2.0) and curve.busbw("broadcast", 8) == 0.0
    for text in ("", "[]", "{}"):
        file.write_text(text)
        with pytest.raises(ArgumentError, match="is no file that ds_bench has written"):
            Curve.read(str(file))
