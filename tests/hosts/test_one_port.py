"""Two jobs that are told one port: both finish, or one is refused by name; their ranks never train together."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.harness.pool import PATIENCE
from tests.hosts.runs import need_hosts

need_hosts()

PORT = "29641"
# Every rank adds its job's number: any other sum than that of its own job's ranks is a mixture.
SUM = """
    import os, sys, time
    import torch
    from deepspeed import comm
    comm.init_distributed(verbose=False)
    number = float(sys.argv[-1])
    for _ in range(20):
        total = torch.tensor([number])
        comm.all_reduce(total)
        assert total.item() == number * comm.get_world_size(), f"MIXED {total.item()}"
        time.sleep(0.1)
    os.write(1, f"finished {sys.argv[-1]}\\n".encode())
"""
REFUSED = ("in use", "taken", "another job", "two jobs on one port", "could not join")


def judge(ended, ranks, limit=20):
    """At least one job finished whole; one that did not says why."""
    whole = 0
    for code, out, err in ended:
        assert "MIXED" not in err and "MIXED" not in out, err
        if code == 0:
            assert out.count("finished") == ranks
            whole += 1
        else:
            assert any(words in err for words in REFUSED), err
    assert whole >= 1, ended
    return whole


def ends(started):
    said = [process.communicate(timeout=90 * PATIENCE) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("round", range(3))
def test_by_ssh_from_one_host(runs, round):
    started = [runs.start(SUM, "--master_port", PORT, args=[str(n)]) for n in (1, 10)]
    judge(ends(started), 4)
    assert runs.left() == []


@pytest.mark.slow
def test_by_ssh_from_two_hosts(runs):
    (runs.folder / "hostfile").write_text("h0 slots=2\nh1 slots=2\n")
    started = [runs.start(SUM, "--master_port", PORT, args=[str(n)], on=on) for n, on in ((1, "h0"), (10, "h1"))]
    judge(ends(started), 4)
    assert runs.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("round", range(3))
def test_with_the_command_on_every_host(runs, round):
    started = []
    for number in (1, 10):
        for index in (0, 1):
            flags = ["--no_ssh", "--node_rank", str(index), "--master_addr", runs.cluster.address("h0")]
            started.append(runs.start(SUM, *flags, "--master_port", PORT, args=[str(number)], on=f"h{index}"))
    ended = ends(started)
    jobs = [(ended[0], ended[1]), (ended[2], ended[3])]
    judge([(max(a[0], b[0]), a[1] + b[1], a[2] + b[2]) for a, b in jobs], 4)
    assert runs.left() == []


def torchrun(runs, index, job, *flags):
    """An agent of torch's own launcher on host `index`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2", f"--rdzv_id={job}"]
    return runs.run([*command, *flags, "train.py", job.removeprefix("job")], on=f"h{index}")


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 4.0])
def test_under_torchrun(runs, pause):
    """Two jobs of torch's own launcher with names of their own and one rendezvous port."""
    runs.command(SUM)
    started = []
    for number in (1, 10):
        for index in (0, 1):
            place = [f"--node_rank={index}", f"--master_addr={runs.cluster.address('h0')}", f"--master_port={PORT}"]
            started.append(torchrun(runs, index, f"job{number}", *place))
        time.sleep(pause)
    ended = []
    end = time.monotonic() + 60 * PATIENCE
    for process in started:
        try:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # torchrun's own agents wait for theirs
            runs.kill(process)
            out, err = process.communicate()
        ended.append((process.returncode, out, err))
    finished = [sum(out.count("finished") for _, out, _ in job) for job in (ended[:2], ended[2:])]
    for _, out, err in ended:
        assert "MIXED" not in out + err, err
    assert set(finished) <= {0, 4} and 4 in finished, ended
