"""Planted divergences between ranks: each ends everywhere, in time, non-zero, with the last label of every rank."""

from __future__ import annotations

import re

import pytest

from deepspeed.native import library
from tests.harness.pool import PATIENCE
from tests.unit.comm.ranks import Ended, run_ranks

TIMEOUT = 2.0  # seconds of one collective
MARGIN = 5.0  # seconds after it within which every rank has reported
TEARDOWN = 10.0 * PATIENCE  # seconds the interpreter may take to unload torch on a busy machine

SETUP = """
dist.init_distributed(verbose=False)
rank = dist.get_rank()
x, y = torch.ones(1000), torch.ones(2000)
dist.all_reduce(x, log_name="step 1")
print(time.monotonic(), flush=True)
"""


def diverge(snippet: str, world: int = 2, native: str = "1") -> list[Ended]:
    """Run a divergence on `world` ranks, and check that all of them ended in time."""
    switched = {} if native == "1" else {"DS_NATIVE": native}  # on is the default, and off where the session says so
    ends = run_ranks(SETUP + snippet, world, limit=120, DEEPSPEED_TIMEOUT=str(TIMEOUT / 60), **switched)
    for rank, end in enumerate(ends):
        assert end.out, f"rank {rank} did not reach the divergence: {end.err}"
        told, ended = end.last_word - float(end.out), end.ended - end.last_word
        assert told < TIMEOUT + MARGIN, f"rank {rank} had its report after {told:.1f} s: {end.err}"
        assert ended < TEARDOWN, f"rank {rank} went on for {ended:.1f} s after its last word: {end.err}"
    return ends


def report(end: Ended) -> list[str]:
    """What the report that a rank ended with says of each rank."""
    lines = dict(re.findall(r"rank (\d+): (.*)", end.err.rsplit("The last collective of each rank:", 1)[-1]))
    return [lines[rank] for rank in sorted(lines)]


@pytest.mark.parametrize("native", ["1", "0"])  # through shared memory where it is built, and through gloo
def test_collectives_in_another_order(native):
    ends = diverge(
        """
if rank == 0:
    dist.all_reduce(x, log_name="reduce layer.1.weight")
else:
    dist.broadcast(x, 0, log_name="broadcast layer.1.bias")
    dist.all_reduce(x, log_name="reduce layer.1.weight")
""",
        native=native,
    )
    for end in ends:
        assert end.code == 1
        assert report(end)[0].startswith("in 'reduce layer.1.weight float32[1000]' #2")
        assert report(end)[1].startswith("in 'broadcast layer.1.bias float32[1000]' #2")
    if native == "1" and library() is not None:
        assert any("of the group runs another collective" in end.err for end in ends)
    else:
        late = r"CommTimeoutError: '(reduce layer.1.weight|broadcast layer.1.bias) float32\[1000\]' timed out"
        assert any(re.search(late, end.err) for end in ends)  # of whichever rank's time ran out first


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_collective_that_one_of_three_ranks_skips(native):
    ends = diverge(
        """
if rank != 2:
    dist.all_reduce(x, log_name="reduce layer.1.weight")
dist.barrier(log_name="end of step")
""",
        world=3,
        native=native,
    )
    for end in ends:
        assert end.code == 1
        skipped = "reduce layer.1.weight float32[1000]"
        assert [line.split("'")[1] for line in report(end)] == [skipped, skipped, "end of step"]


@pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_different_sizes(native):
    snippet = "dist.all_reduce(x if rank == 0 else y, log_name='reduce layer.1.weight'); dist.barrier()"
    ends = diverge(snippet, native=native)
    assert all(end.code for end in ends)
    told = next(end for end in ends if "The last collective" in end.err)  # gloo aborts the other one without a word
    assert [line.split("'")[1] for line in report(told)] == [
        "reduce layer.1.weight float32[1000]",
        "reduce layer.1.weight float32[2000]",
    ]


@pytest.mark.parametrize("leaver", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_exits(leaver):
    ends = diverge(f"sys.exit(3) if rank == {leaver} else dist.all_reduce(x, log_name='reduce layer.1.weight')")
    assert (ends[leaver].code, ends[1 - leaver].code) == (3, 1)
    assert report(ends[1 - leaver])[leaver].startswith("has ended, after 'step 1 float32[1000]' #1")
    assert report(ends[1 - leaver])[1 - leaver].startswith("in 'reduce layer.1.weight")


def test_the_backends_threads_are_at_rest_when_the_interpreter_ends():
    snippet = """
dist.init_distributed(verbose=False)
held = torch.distributed.group.WORLD  # so that leaving the group does not end its threads
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})  # they run once this one waits
sys.setswitchinterval(1000)  # and get the interpreter only then
x = torch.ones(1000)
torch.distributed.all_reduce(x)
sys.exit(3)
"""
    (only,) = run_ranks(snippet)
    assert only.code == 3, only.err  # not -6: the thread that lets go of `x` needs the interpreter


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed(victim):
    ends = diverge(
        f"""
if rank == {victim}:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(x, log_name="reduce layer.1.weight")
"""
    )
    assert (ends[victim].code, ends[1 - victim].code) == (-9, 1)
    assert report(ends[1 - victim])[victim].startswith(
        "no answer (process gone or stuck); last after 'step 1 float32[1000]' #1"
    )


@pytest.mark.parametrize("sleeper", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_sleeps(sleeper):
    ends = diverge(
        f"""
if rank == {sleeper}:
    time.sleep(100)
dist.all_reduce(x, log_name="reduce layer.1.weight")
"""
    )
    for end in ends:
        assert end.code == 1
        assert report(end)[sleeper].startswith("in no collective, after 'step 1 float32[1000]' #1")
        assert report(end)[1 - sleeper].startswith("in 'reduce layer.1.weight float32[1000]' #2")
    assert "This process ends." in ends[sleeper].err


@pytest.mark.slow
def test_a_wait_that_the_backend_never_ends():
    ends = diverge(
        """
from deepspeed.comm.watchdog.collective_event import CollectiveEvent
from tests.harness.pool import PATIENCE
CollectiveEvent("a wait of its own kind" if rank == 0 else "another one").begin()
time.sleep(100)
"""
    )
    for end in ends:
        assert end.code == 1
        assert [line.split("'")[1] for line in report(end)] == ["a wait of its own kind", "another one"]


def test_a_rank_that_finishes_early_disturbs_nobody():
    ends = run_ranks(SETUP + "time.sleep(3 * rank)", 2, DEEPSPEED_TIMEOUT=str(TIMEOUT / 60))
    assert [(end.code, end.complaints) for end in ends] == [(0, []), (0, [])]
    assert ends[0].ended < ends[1].ended


def test_the_wait_of_a_pending_collective_is_labelled():
    ends = diverge(
        """
if rank == 0:
    pending = dist.all_reduce(x, async_op=True, log_name="reduce layer.1.weight")
    pending.wait()
time.sleep(100)
"""
    )
    assert [end.code for end in ends] == [1, 1]
    assert report(ends[0])[0].startswith("in 'wait for reduce layer.1.weight float32[1000]' #3")


def test_an_error_of_the_caller_is_not_an_alarm():
    ends = run_ranks(
        SETUP
        + """
try:
    dist.all_reduce(torch.ones(4).to(torch.float8_e4m3fn))
except RuntimeError as error:
    print(error)
dist.all_reduce(x)  # no barrier: it waits for the work before it, and may raise its error again
""",
        2,
        DEEPSPEED_TIMEOUT=str(TIMEOUT / 60),
    )
    assert [(end.code, end.out.splitlines()[1]) for end in ends] == [(0, "Invalid scalar type")] * 2, ends
