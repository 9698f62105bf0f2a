"""Process groups in real processes: alone, by each launcher's variables, adopted, restarted, and what goes wrong."""

from __future__ import annotations

import pytest

from deepspeed.comm.process_groups.init import _limit_of
from tests.unit.comm.ranks import run_ranks, torchrun


def alone(rank, world, port):
    return {}


def slurm(rank, world, port):
    names = {"SLURM_PROCID": rank, "SLURM_NTASKS": world, "SLURM_LOCALID": rank, "MASTER_PORT": port}
    step = {"SLURM_JOB_NODELIST": "localhost", "SLURM_STEP_ID": "0"}
    return {name: str(value) for name, value in names.items()} | step


def open_mpi(rank, world, port):
    names = {"RANK": rank, "SIZE": world, "LOCAL_RANK": rank, "LOCAL_SIZE": world}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}


def sagemaker(rank, world, port):
    return open_mpi(rank, world, port) | {"SM_TRAINING_ENV": "{}", "SM_HOSTS": '["localhost"]'}


SUM_RANKS = """
dist.init_distributed()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print(dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), total.item(), os.environ.get("RANK"))
"""


ALONE = """
import threading
from torch.testing._internal.distributed.fake_pg import FakeStore
from deepspeed.errors import ArgumentError, UsageError

assert threading.active_count() == 1 and not dist.is_initialized()  # importing starts nothing

for call in (dist.get_rank, dist.get_world_size, dist.barrier, lambda: dist.all_reduce(torch.ones(1))):
    try:
        call()
    except UsageError as error:
        print("init_distributed" in str(error), isinstance(error, AssertionError))
try:
    dist.init_distributed(timeout=1800)
except ArgumentError as error:
    print(error)
os.environ.update(RANK="two", WORLD_SIZE="2")
try:
    dist.init_distributed()
except ArgumentError as error:
    print(error)
del os.environ["RANK"], os.environ["WORLD_SIZE"]

torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=1024)
dist.init_distributed()
print(dist.get_rank(), dist.get_world_size(), threading.active_count())  # it needs no watch
torch.distributed.destroy_process_group()

dist.init_distributed("nccl")
print(dist.get_backend())
dist.destroy_process_group()
"""


def test_one_process_without_variables():
    """What is said before there is a group and of wrong arguments, and the group that no launcher starts."""
    contradiction = "\ndist.init_distributed(world_size=3)"
    (only,) = run_ranks(ALONE + SUM_RANKS + contradiction, 1, alone, limit=120, DS_ACCELERATOR="cpu")
    assert only.code == 1, only.err
    *before, timeout, variables, fake, backend, world = only.out.splitlines()
    assert before == ["True True"] * 4
    assert timeout.startswith("timeout=1800 is not a positive datetime.timedelta")
    assert variables.startswith("RANK='two' is not a whole number")
    assert (fake, backend, world) == ("3 1024 1", "gloo", "0 1 0 1.0 None")
    assert only.err.count("'nccl' needs CUDA") == 1
    assert "1 rank(s) by no launcher, backend gloo" in only.err
    assert "world_size=3) contradicts the existing group: rank 0 of 1" in only.err


@pytest.mark.parametrize(
    "launcher", [torchrun, *(pytest.param(each, marks=pytest.mark.slow) for each in (slurm, sagemaker))]
)
def test_two_ranks_by(launcher):
    ends = run_ranks(SUM_RANKS, 2, launcher)
    assert [end.out for end in ends] == ["0 2 0 3.0 0\n", "1 2 1 3.0 1\n"], [end.err for end in ends]
    assert [end.code for end in ends] == [0, 0]
    assert [len(end.complaints) for end in ends] == [1, 0], "one line on rank 0, no complaint at exit"


def test_an_existing_group_is_adopted_with_its_timeout():
    ends = run_ranks(
        """
        import datetime
        torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(seconds=77))
        dist.init_distributed()
        dist.barrier()
        from deepspeed.comm.watchdog import watchdog as watch
        print(watch.timeout().total_seconds(), dist.get_world_group() is torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()
        """,
        2,
    )
    assert [(end.code, end.out) for end in ends] == [(0, "77.0 True\n")] * 2, ends


def test_a_backend_without_options_has_the_default_limit(monkeypatch):
    """torch's own base class refuses, older ones have no such attribute, and some say None."""

    class Refusing:
        @property
        def options(self):
            raise RuntimeError("Backend bare does not implement getBackendOptions")

    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "2")
    none = type("NoOptions", (), {"options": None})()
    assert [_limit_of(each).total_seconds() for each in (Refusing(), object(), none)] == [120.0] * 3


@pytest.mark.slow
def test_restart_counts_that_differ_between_hosts_do_not_matter():
    """torchrun counts the restarts that each of its agents caused: after one they differ, rightly."""
    snippet = """
    dist.init_distributed(verbose=False)
    one = torch.ones(1)
    dist.all_reduce(one)
    print(one.item())
    """

    def restarted(rank, world, port):
        return {**torchrun(rank, world, port), "TORCHELASTIC_RESTART_COUNT": str(rank), "TORCHELASTIC_RUN_ID": "none"}

    ends = run_ranks(snippet, 2, restarted)
    assert [end.out for end in ends] == ["2.0\n"] * 2, ends


def test_another_jobs_rank_is_sent_away():
    snippet = "dist.init_distributed(verbose=False)"

    def two_jobs(rank, world, port):
        return {**torchrun(rank, world, port), "DS_JOB_ID": f"job{rank}"}

    ends = run_ranks(snippet, 2, two_jobs, limit=60, DEEPSPEED_TIMEOUT="0.05")
    assert [end.code for end in ends] == [1, 1]
    assert "rank(s) 1 did not arrive" in ends[0].err
    assert "job 'job0' meets at this address and port, and this is job 'job1'" in ends[1].err


def test_a_file_as_the_meeting_point(tmp_path):
    snippet = f"""
    dist.init_distributed(init_method="file://{tmp_path}/meet", rank=int(os.environ["ME"]), world_size=2)
    dist.barrier()
    print(dist.get_rank())
    """
    ends = run_ranks(snippet, 2, lambda rank, world, port: {"ME": str(rank)})
    assert [(end.code, end.out) for end in ends] == [(0, "0\n"), (0, "1\n")], ends


def test_a_rank_that_never_starts():
    def only_rank_zero_of_two(rank, world, port):
        return torchrun(0, 2, port)

    snippet = "print(time.monotonic(), flush=True); dist.init_distributed()"
    (waiting,) = run_ranks(snippet, 1, only_rank_zero_of_two, DEEPSPEED_TIMEOUT="0.05")
    assert waiting.code == 1
    assert waiting.last_word - float(waiting.out) < 3 + 5
    assert "CommTimeoutError: rank 0 of 2 (RANK and WORLD_SIZE) could not join at 127.0.0.1" in waiting.err
