"""Runs that lose a host or a rank and go on: fewer hosts, spares, and growth when one comes back."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.harness.pool import PATIENCE
from tests.hosts.runs import need_hosts

need_hosts()

COUNT = """
    import os, signal, sys, time
    world, attempt = os.environ["WORLD_SIZE"], os.environ["DS_ATTEMPT"]
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
    os.write(1, f"attempt {attempt} world {world} rank {os.environ['RANK']} pid {os.getpid()}\\n".encode())
    ends = sys.argv[-1].split(",")
    time.sleep(60 if attempt not in ends else 1)
"""


def attempts(text):
    """World size by attempt."""
    return {int(a): int(w) for a, w in re.findall(r"attempt (\d+) world (\d+)", text)}


@pytest.mark.slow
def test_a_lost_host_shrinks_the_world_and_grows_it_back(fragile):
    started = fragile.start(COUNT, "--elastic_training", "--heartbeat", "3", args=["2"])
    fragile.until_said(started, "attempt 0", 4)
    fragile.cluster.kill("h1")
    fragile.until_said(started, "attempt 1 world 2", 2)
    fragile.cluster.boot("h1")
    fragile.until_said(started, "attempt 2 world 4", 4)
    _, err = started.communicate(timeout=60)
    assert started.returncode == 0, err
    assert "attempt 1 follows: host h1 (ranks 2 to 3) was lost" in err
    assert "this host runs the launcher and ranks" in err
    assert fragile.left() == []


@pytest.mark.slow
def test_a_killed_rank_starts_all_again(runs):
    started = runs.start(COUNT, "--elastic_training", "--enable_each_rank_log", "logs", args=["1"])
    lines = runs.until_said(started, "[rank", 4)
    victim = next(p for p in runs.cluster.processes("h1") if "--local_rank=0" in p.cmdline())
    victim.kill()
    assert lines
    out, err = started.communicate(timeout=60)
    assert started.returncode == 0, err
    assert attempts(out) == {1: 4}
    assert "attempt 1 follows: rank 2 of 4 failed first" in err
    for number in (0, 1):  # a folder per attempt
        for rank in range(4):
            text = (runs.folder / f"logs/attempt{number}/rank{rank}.log").read_text()
            assert text.startswith(f"attempt {number} world 4 rank {rank} ")


@pytest.mark.slow
def test_the_largest_valid_size_and_spares(runs):
    block = {"enabled": True, "max_train_batch_size": 6, "micro_batch_sizes": [1, 2], "version": 0.1, "max_gpus": 3}
    (runs.folder / "ds.json").write_text(json.dumps({"elasticity": block}))
    done = runs.to_end(COUNT, "--elastic_training", args=["--deepspeed_config", "ds.json", "0"])
    assert done.code == 0
    assert attempts(done.out) == {0: 3}


@pytest.mark.slow
def test_an_error_of_the_scripts_own_is_not_tried_for_ever(runs):
    done = runs.to_end("raise ValueError('boom')", "--elastic_training", limit=90)
    assert done.code == 1 and done.err.splitlines()[-1] == "ValueError: boom"
    assert "attempt 2 follows" in done.err and "attempt 3 follows" not in done.err


@pytest.mark.slow
def test_too_few_hosts_is_refused(runs):
    done = runs.to_end("pass", "--elastic_training", "--min_elastic_nodes", "3")
    assert done.code == 2 and "--min_elastic_nodes 3" in done.err


DIES_DURING_IMPORT = """
    import os, signal
    if os.environ["RANK"] == "3" and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    import torch
    from deepspeed import comm
    comm.init_distributed(verbose=False)
    total = torch.tensor([float(comm.get_rank())])
    comm.all_reduce(total)
    os.write(1, f"finished {total.item()}\\n".encode())
"""


@pytest.mark.slow
def test_torchrun_starts_again_after_a_rank_died_during_import(runs):
    """Its count of restarts is one agent's own: where it is part of what ranks meet by, they never do."""
    runs.command(DIES_DURING_IMPORT)
    flags = ["--nnodes=2", "--nproc_per_node=2", "--max_restarts=3", "--rdzv_backend=c10d", "--rdzv_id=job"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *flags,
        f"--rdzv_endpoint={runs.cluster.address('h0')}:29650",
    ]
    started = [runs.run([*torchrun, "train.py"], on=name) for name in ("h0", "h1")]
    said = [process.communicate(timeout=60 * PATIENCE) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert sorted(line for out, _ in said for line in out.splitlines()) == ["finished 6.0"] * 4, said
    assert (runs.folder / "died").exists() and runs.left() == []
