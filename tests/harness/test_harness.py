"""The harness itself: results in rank order, failures with rank and traceback, hangs that end, leaks that fail."""

from __future__ import annotations

import itertools
import os
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.collectives.same_error import alarmed
from tests.harness import WorkerError, WorkerPool, WorkerTimeout
from tests.harness.drawn import drawn
from tests.harness.forks import in_a_fork, in_forks
from tests.harness.fresh import end_of, run_fresh
from tests.harness.pool import WORKER_IMPORTS


def rank_and_sum(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    tensor = tensor * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return os.getpid(), tensor


def raise_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("planted")
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 0:
        time.sleep(100)


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def caught_by_one() -> bool:
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="planted"), alarmed(lambda: "the plant"):
            raise ValueError("planted")
    return dist.get_rank() == 0


def leak_variable() -> None:
    os.environ["LEAKED_BY_TEST"] = "1"


def test_results_come_in_rank_order_from_the_same_processes(workers):
    first = workers(2).run(rank_and_sum, torch.ones(3))
    second = workers(2).run(rank_and_sum, torch.ones(3))
    assert [pid for pid, _ in first] == [pid for pid, _ in second] == workers(2).pids
    assert all(torch.equal(total, torch.full((3,), 3.0)) for _, total in first)


def order_of_a_set() -> int:
    return hash("a word")


def test_ranks_of_a_group_have_other_orders_of_sets(workers):
    """As in a job: a rank that iterates over a set of words does so in another order than its neighbours in a mesh."""
    orders = workers(4).run(order_of_a_set)
    assert all(orders[one] != orders[other] for one, other in ((0, 1), (2, 3), (0, 2), (1, 3)))


def test_drawn_cells_are_always_the_same_and_have_every_value():
    values = [["0", "1", "2", "3"], ["fp32", "bf16"], ["cpu", "nvme", "device"]]
    cells = ["-".join(cell) for cell in itertools.product(*values)]
    chosen = drawn(cells, 5)
    assert chosen == drawn(cells[::-1], 5) and len(set(chosen)) == 5
    assert [{cell.split("-")[at] for cell in chosen} for at in range(3)] == [set(each) for each in values]
    assert sorted(drawn(cells, 100)) == sorted(cells)


@pytest.mark.slow
def test_a_fresh_program_that_fails_is_shown():
    with pytest.raises(AssertionError, match="planted"):
        run_fresh(["pass", "raise ValueError('planted')"])


@pytest.fixture
def pool():
    made = WorkerPool(2, imported=WORKER_IMPORTS)
    yield made
    made.close()


def test_failures_name_the_rank_and_the_pool_recovers(pool):
    with pytest.raises(WorkerError, match=r"^\S+ on 2 ranks; rank 1: ValueError: planted\n(.|\n)*rank 1 failed:\n"):
        pool.run(raise_on_one)
    assert len(pool.run(rank_and_sum, torch.ones(1))) == 2


def test_a_pool_whose_group_was_told_to_end_starts_afresh(pool):
    assert pool.run(caught_by_one) == [True, False]
    assert pool.pids == []
    assert len(pool.run(rank_and_sum, torch.ones(1))) == 2


@pytest.mark.slow
def test_leaks_hangs_and_deaths_are_named_too(pool):
    with pytest.raises(WorkerError, match="left behind: environment variable LEAKED_BY_TEST"):
        pool.run(leak_variable)
    with pytest.raises(WorkerTimeout, match=r"rank 0 gave no answer(.|\n)*hang_on_one"):
        pool.run(hang_on_one, timeout=6)
    with pytest.raises(WorkerError, match="rank 1 failed:\nthe process ended with code 7"):
        pool.run(die_on_one)
    assert len(pool.run(rank_and_sum, torch.ones(1))) == 2


def test_an_unpinned_skip_fails_the_session(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_skipped():\n    pytest.skip('no reason')\n")
    command = ["-q", "-p", "tests.conftest", str(tmp_path)]
    code, words = end_of(f"import pytest; sys.exit(pytest.main({command}))")
    assert code == 1 and "SKIPPED BUT NOT PINNED" in words, words


def runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("answers", [False, True])
def test_a_process_that_a_child_has_started_does_not_outlast_its_limit(answers, tmp_path):
    def work():
        started = os.fork()
        if not started:
            time.sleep(30)  # with the child's end of the pipe
            os._exit(0)
        (tmp_path / "pid").write_text(str(started))
        time.sleep(0 if answers else 30)
        return {"is": 1}

    began = time.monotonic()
    assert in_a_fork(work, 1.0) == ({"is": 1} if answers else {"failed": "no answer within 1 s"})
    assert time.monotonic() - began < 15
    started = int((tmp_path / "pid").read_text())
    while runs(started) and time.monotonic() - began < 15:
        time.sleep(0.02)
    assert not runs(started)


def test_a_fork_that_dies_or_raises_says_so():
    def dies() -> dict[str, object]:
        os.kill(os.getpid(), 9)
        return {}

    def raises() -> dict[str, object]:
        raise ValueError("planted")

    large = {"is": "x" * (1 << 20)}
    assert in_forks([dies, raises, lambda: large], 20.0) == [
        {"failed": "its process died"},
        {"failed": "ValueError: planted"},
        large,
    ]
