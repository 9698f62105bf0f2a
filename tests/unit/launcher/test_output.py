"""How a rank's output is passed on and what is remembered of it."""

from __future__ import annotations

import io
import os

import pytest

from deepspeed.launcher.rank_logs import TAIL_BYTES, Stream, open_channel, terminal_size
from deepspeed.launcher.rank_process import Rank

TRACEBACK = "Traceback (most recent call last):\n  File 'x'\n{}"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


@pytest.fixture
def flow():
    """A stream, with functions that write into it and read what came out."""
    open_descriptors = []

    def make(**options):
        shown: list[bytes] = []
        reader, writer = open_channel(None)
        stream = Stream(reader, shown.append, **options)
        open_descriptors.append(writer)

        def put(text):
            os.write(writer, text.encode())
            assert stream.pump()

        def taken():
            text = b"".join(shown).decode()
            shown.clear()
            return text

        return stream, put, taken

    yield make
    for descriptor in open_descriptors:
        os.close(descriptor)


def test_bytes_pass_as_they_come(flow):
    _, put, shown = flow()
    put("50%\r")
    assert shown() == "50%\r"


def test_lines_are_prefixed_whole_and_logged_as_written(flow):
    log = io.BytesIO()
    stream, put, shown = flow(prefix=b"[rank 1] ", log=log)
    put("one\ntw")
    assert shown() == "[rank 1] one\n"
    put("o\r")
    assert shown() == "[rank 1] two\r"
    put("end")
    stream.close()
    assert shown() == "[rank 1] end\n"
    assert log.getvalue() == b"one\ntwo\rend"


def test_the_last_traceback_is_told_from_earlier_ones(flow):
    stream, put, _ = flow()
    put(TRACEBACK.format("OldError\n") + "going on\n" + TRACEBACK.format("ValueError: boom\n"))
    assert stream.last_traceback().rstrip() == TRACEBACK.format("ValueError: boom")
    assert stream.traceback_at is not None


def test_chained_exceptions_stay_together_and_rank_prefixes_go(flow):
    stream, put, _ = flow()
    text = TRACEBACK.format("KeyError: 1\n") + CAUSE + TRACEBACK.format("ValueError: boom")
    put("noise\n" + "".join(f"[rank3]: {line}\n" for line in text.splitlines()))
    assert stream.last_traceback().rstrip() == text


def test_without_a_traceback_the_last_lines_are_kept(flow):
    stream, put, _ = flow()
    put("".join(f"line {i}\n" for i in range(100)))
    assert stream.last_lines().splitlines() == [f"line {i}" for i in range(80, 100)]
    assert stream.traceback_at is None


@pytest.mark.parametrize(("seconds_later", "shown"), [(1.0, "Traceback"), (100.0, "line 0")])
def test_only_a_traceback_near_the_end_belongs_to_it(flow, seconds_later, shown):
    stream, put, _ = flow()
    put(TRACEBACK.format("KeyError: caught\n"))
    put("".join(f"line {i}\n" for i in range(20)))
    rank = object.__new__(Rank)
    rank.errors, rank.ended_at = stream, stream.traceback_at + seconds_later
    assert rank.last_words().startswith(shown)
    assert rank.failed_at == (stream.traceback_at if shown == "Traceback" else rank.ended_at)


def test_a_traceback_cut_by_two_writes_is_seen(flow):
    stream, put, _ = flow()
    put("Traceback (most rec")
    put("ent call last):\nE")
    assert stream.traceback_at is not None


def test_memory_is_bounded(flow):
    stream, put, shown = flow()
    for _ in range(2 * TAIL_BYTES // 4096):
        put("x" * 4096)
        shown()
    assert len(stream.last_lines()) <= TAIL_BYTES


def test_progress_bars_see_a_terminal_where_there_is_one():
    controller, terminal = os.openpty()
    reader, writer = open_channel(terminal_size(terminal))
    assert os.isatty(writer)
    assert os.get_terminal_size(writer) == os.get_terminal_size(terminal)
    for descriptor in (controller, terminal, reader, writer):
        os.close(descriptor)
