"""Ranks of two hosts that take different paths: the report says which rank of which host did what, in which line."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.faults.test_divergence import MARGIN, SCRIPT, TEARDOWN, TIMEOUT, line_of
from tests.hosts.runs import Runs, need_hosts

need_hosts()


def diverge(runs: Runs, plant: str, stage: int, odd: int) -> str:
    """Run to the end with a divergence of one rank; what was said on standard error, the report in time."""
    told = runs.folder / "err"
    with told.open("w") as err:
        limit = f"DEEPSPEED_TIMEOUT={TIMEOUT / 60}"
        started = runs.start(
            SCRIPT, "--no_local_rank", "--export", limit, args=[plant, str(stage), "1", str(odd)], stderr=err
        )
        assert started.stdout is not None
        begun = float(next(started.stdout).split()[0])
        while "The paths part" not in told.read_text() and time.monotonic() < begun + TIMEOUT + MARGIN:
            time.sleep(0.02)
        said = told.read_text()
        try:
            out, _ = started.communicate(timeout=TEARDOWN + MARGIN)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {told.read_text()}") from None
    assert "The paths part" in said, f"no report {TIMEOUT + MARGIN:g} s after the divergence: {told.read_text()}"
    assert started.returncode not in (0, None) and "finished" not in out
    assert runs.left() == []
    return told.read_text()


def entered(runs: Runs, rank: int, label: str, mark: str) -> str:
    return f"rank {rank} on h{rank // 2}: {label!r} at {runs.folder}/train.py:{line_of(mark)} in <module>"


@pytest.mark.slow
@pytest.mark.parametrize(("odd", "stage"), [(3, 2), (2, 3), (1, 0)])
def test_a_rank_of_one_host_skips_a_collective(runs, odd, stage):
    """Nothing fails and nothing hangs by itself: sums of different things are added."""
    said = diverge(runs, "skip", stage, odd)
    for rank in range(4):
        label, mark = ("sum of 1.weight", "after") if rank == odd else ("sum of 0.weight", "head")
        assert entered(runs, rank, f"{label} float32[4]", mark) in said, said
    assert said.splitlines()[-1].strip(), said


@pytest.mark.slow
def test_the_ranks_of_one_host_have_another_shape(runs):
    said = diverge(runs, "shape", 2, 2)
    assert entered(runs, 2, "sum of 0.weight float32[5]", "head") in said, said
    assert entered(runs, 0, "sum of 0.weight float32[4]", "head") in said, said


@pytest.mark.slow
def test_a_rank_of_one_host_has_fewer_batches(runs):
    said = diverge(runs, "loader", 2, 3)
    assert entered(runs, 3, "end of epoch", "end") in said, said
    assert "rank 0 on h0: 'agreement on gradients [" in said, said
    assert f"train.py:{line_of('step')} in <module>" in said, said
