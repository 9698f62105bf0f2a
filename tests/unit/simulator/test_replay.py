"""Replays whose times are known: one stream, perfect overlap, orders, shared links, a slow host."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.errors import ArgumentError
from deepspeed.simulator.machine import Machine, cards
from deepspeed.simulator.replay import draw, repeated, replay
from deepspeed.simulator.trace import COPY, DISK, HOST, KERNEL, MARK, MESSAGE, ORDER, WAIT, HostEvent, Recording

CARD = Machine(
    ranks=8, memory=1 << 36, matrix={"fp32": [[0, 1e12]], "bf16": [[0, 1e13]]}, bandwidth=1e12, overhead=0.0,
    collective=1e11, between=5e9, link=1e10, host=1e10, disk=1e9, launch=1e-9,
)  # fmt: skip
HOST_OF_8, TWO_HOSTS = tuple(range(8)), tuple(range(16))


def seconds(*entries: HostEvent, machine: Machine = CARD) -> float:
    return replay(Recording("case", 0, 8, list(entries)), machine).seconds


def kernel(flops: float, stream: int = 0) -> HostEvent:
    return HostEvent(KERNEL, "mm", stream, flops, dtype="bf16")


def gather(nbytes: float, stream: int = 0, lane: int = 0) -> HostEvent:
    return HostEvent(MESSAGE, "all_gather", stream, nbytes=nbytes, group=HOST_OF_8, lane=lane)


def test_one_stream_is_the_sum_of_its_kernels() -> None:
    assert seconds(*[kernel(1e12)] * 5) == pytest.approx(0.5)


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic() -> None:
    assert seconds(HostEvent(KERNEL, "add", flops=1e12, nbytes=3e11, dtype="bf16")) == pytest.approx(0.3)


def test_streams_run_side_by_side_unless_one_is_ordered() -> None:
    assert seconds(kernel(1e12), kernel(2e12, 1)) == pytest.approx(0.2)
    assert seconds(kernel(1e12), HostEvent(ORDER, "order", 1, after=0), kernel(2e12, 1)) == pytest.approx(0.3)


def test_messages_hide_behind_kernels_and_what_is_left_is_exposed() -> None:
    # 8/7 of 1e10 bytes: each rank receives 1e10, in 0.1 s.
    made = replay(Recording("case", 0, 8, [gather(8e10 / 7), kernel(3e12)]), CARD)
    assert made.seconds == pytest.approx(0.3) and made.exposed() == pytest.approx(0.0, abs=1e-8)
    awaited = [gather(8e10 / 7), HostEvent(ORDER, "order", 0, after=0), kernel(3e12)]
    made = replay(Recording("case", 0, 8, awaited), CARD)
    assert made.seconds == pytest.approx(0.4) and made.exposed() == pytest.approx(0.1)


def test_a_message_starts_behind_the_stream_that_it_is_posted_from() -> None:
    assert seconds(kernel(1e12), gather(8e10 / 7)) == pytest.approx(0.2)
    assert seconds(kernel(1e12), gather(8e10 / 7, 1)) == pytest.approx(0.1)


def test_one_link_serves_all_communicators_and_the_first_that_is_ready() -> None:
    assert seconds(gather(8e10 / 7, 1), gather(8e10 / 7, 2, 1)) == pytest.approx(0.2)
    late_first = [kernel(2e12), gather(8e10 / 7), gather(8e10 / 7, 1, 1)]  # lane 1 need not wait for 0's kernel
    assert seconds(*late_first) == pytest.approx(0.3)
    one_lane = [kernel(2e12), gather(8e10 / 7), gather(8e10 / 7, 1)]
    assert seconds(*one_lane) == pytest.approx(0.4)


def test_the_host_waits_and_limits() -> None:
    assert seconds(
        kernel(1e12), HostEvent(WAIT, "wait", after=0), HostEvent(HOST, "adam", nbytes=1e9)
    ) == pytest.approx(0.2)
    slow = replay(Recording("case", 0, 8, [kernel(1e9)] * 100), CARD, host_time=1e-2)
    assert slow.seconds == pytest.approx(1.0, rel=1e-3) and slow.idle == pytest.approx(0.99, rel=1e-3)


def test_copies_and_the_disk_work_beside_kernels() -> None:
    both = [HostEvent(COPY, "to_host", 1, nbytes=1e9), HostEvent(COPY, "to_device", 2, nbytes=1e9), kernel(1e12)]
    assert seconds(*both) == pytest.approx(0.1)
    assert seconds(*both, HostEvent(COPY, "to_host", 3, nbytes=1e9)) == pytest.approx(0.2)
    assert seconds(HostEvent(DISK, "read", nbytes=1e8), kernel(1e12)) == pytest.approx(0.1)


def test_messages_of_a_machine_whose_ranks_share_cores_hide_behind_nothing() -> None:
    shared = Machine(8, 1, {"fp32": [[0, 1e12]], "bf16": [[0, 1e13]]}, 1e12, 0.0, 1e11, launch=1e-9, shared=True)
    assert seconds(gather(8e10 / 7), kernel(1e12), machine=shared) == pytest.approx(0.2)


def test_bytes_between_hosts_are_a_rings_or_everybodys_own() -> None:
    nbytes = 16e9
    assert CARD.message("all_gather", nbytes, TWO_HOSTS)[0] == pytest.approx(nbytes / 2 / 8 / 5e9)
    assert CARD.message("all_to_all", nbytes, TWO_HOSTS)[0] == pytest.approx(nbytes / 2 / 5e9)
    assert CARD.message("all_reduce", nbytes, TWO_HOSTS)[0] == pytest.approx(2 * nbytes / 2 / 8 / 5e9)
    assert CARD.message("all_gather", nbytes, (0, 8))[0] == pytest.approx(nbytes / 2 / 5e9)
    assert CARD.message("all_gather", nbytes, (3,)) == (0.0, 0.0)
    with pytest.raises(ArgumentError, match="between"):
        CARD.moved(between=0.0).message("all_gather", nbytes, TWO_HOSTS)


def test_a_step_of_more_micro_batches() -> None:
    one = [
        HostEvent(MARK, "forward"),
        kernel(1e12),
        HostEvent(ORDER, "order", 1, after=1),
        kernel(1e12, 1),
        HostEvent(MARK, "step"),
    ]
    made = Recording("case", 0, 8, [*one, HostEvent(ORDER, "order", 0, after=3), kernel(1e12)], facts={"tokens": 5})
    three = repeated(made, 3)
    assert three.facts["tokens"] == 15 and three.entries[-2].after == 3 + 2 * 4
    assert replay(three, CARD).seconds == pytest.approx(0.5)  # three kernels, the last on stream 1, the step's


def test_cards_are_machine_files() -> None:
    assert {"H100-80GB", "A100-80GB", "RTX-4090-Ethernet"} <= set(cards())
    for name in cards():
        card = Machine.load(name)
        assert 0 < card.matrix_efficiency <= 1 and 0 < card.memory_efficiency <= 1 and card.notes
    with pytest.raises(ArgumentError, match="H100-80GB"):
        Machine.load("no-such-card")


def test_a_recording_and_its_picture_from_files(tmp_path: Path) -> None:
    made = Recording("case", 0, 8, [gather(1e9), kernel(1e12)], facts={"tokens": 3})
    made.save(tmp_path / "case.json")
    again = Recording.load(tmp_path / "case.json")
    assert again == made and again.launches == 2 and again.sent() == {"all_gather": 1e9}
    draw([replay(made, CARD)] * 2, tmp_path / "case.png", "twice")
    assert (tmp_path / "case.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ArgumentError, match="broken.json"):
        Recording.load(tmp_path / "broken.json")
