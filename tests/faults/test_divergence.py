"""Ranks that take different paths, with the divergence check on: all end in time, non-zero, and the report says which
rank did what, on which host and in which line of the script."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.harness.fresh import IMPORTS
from tests.harness.pool import PATIENCE, WORKER_IMPORTS
from tests.unit.comm.ranks import Ended, run_ranks

TIMEOUT = 3.0  # seconds of one collective
MARGIN = 5.0  # seconds after it until everybody has been told
TEARDOWN = 15.0 * PATIENCE  # seconds the interpreter may take to unload torch on a busy machine

SCRIPT = """
import os, sys, time
import torch
import deepspeed
from deepspeed import comm

rank, plant, stage, native = int(os.environ["RANK"]), sys.argv[1], int(sys.argv[2]), sys.argv[3]
odd = rank == int(sys.argv[4])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
config = {
    "train_micro_batch_size_per_gpu": 2, "divergence_check_interval": 4, "steps_per_print": None,
    "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage},
}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
groups = [comm.new_group([0, 1]), comm.new_group([0, 1, 2] if comm.get_world_size() > 2 else [1])]
steps = 39 if plant == "loader" and odd else 40
for step in range(steps):
    wrong = odd and step == 20
    if wrong or plant == "loader" and step == 38:
        os.write(1, f"{time.monotonic()}\\n".encode())
    engine.backward(engine(torch.ones(2, 4)).mean())
    engine.step()  # step
    total = torch.ones(5 if plant == "shape" and wrong else 4)
    if plant == "exit" and wrong:
        sys.exit(0)
    if not (plant == "skip" and wrong):
        comm.all_reduce(total, log_name="sum of 0.weight")  # head
    comm.all_reduce(total, log_name="sum of 1.weight")  # after
    if plant == "group" and rank < 2:
        comm.all_reduce(total, group=groups[wrong], log_name="sum of 0.bias")  # group
    time.sleep(0.05)
comm.barrier(log_name="end of epoch")  # end
os.write(1, b"finished\\n")
"""


def line_of(mark: str) -> int:
    """The line of the script with this comment."""
    return 1 + next(i for i, line in enumerate(SCRIPT.splitlines()) if line.endswith(f"# {mark}"))


def diverge(folder: Path, plant: str, stage: int = 2, world: int = 3, odd: int = 1, native: str = "1") -> list[Ended]:
    """Run the script with a planted divergence of one rank; check that all ended in time and, but for it, non-zero."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    words = ["train.py", plant, str(stage), native, str(odd)]
    snippet = f"sys.argv = {words!r}\nexec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))"
    switched = {} if native == "1" else {"DS_NATIVE": native}
    imported = IMPORTS if switched else WORKER_IMPORTS
    limit, timeout = 120 * PATIENCE, str(TIMEOUT / 60)
    ends = run_ranks(snippet, world, limit=limit, imported=imported, DEEPSPEED_TIMEOUT=timeout, **switched)
    assert any(end.out for end in ends), f"no rank came to the divergence: {ends[0].err}"
    begun = min(float(end.out.split()[0]) for end in ends if end.out)
    for rank, end in enumerate(ends):
        assert "finished" not in end.out
        assert end.code or (plant, rank) == ("exit", odd), f"rank {rank}: {end.err}"
        assert end.last_word - begun < TIMEOUT + MARGIN, f"rank {rank} was told after {end.last_word - begun:.1f} s"
        assert not end.err or end.ended - end.last_word < TEARDOWN
    return ends


def says(ends: list[Ended], *lines: str) -> None:
    """Every rank that had a report (gloo aborts some without a word) has these lines in it."""
    told = [end.err for end in ends if "The paths part" in end.err]
    assert told, "\n\n".join(end.err for end in ends)
    for text in told:
        for line in lines:
            assert line in text, f"{line}\nis not in\n{text}"


def entered(folder: Path, rank: int, label: str, mark: str) -> str:
    return f"rank {rank} on {socket.gethostname()}: {label!r} at {folder}/train.py:{line_of(mark)} in <module>"


SKIPS = [(2, 2, "1"), *(pytest.param(s, w, n, marks=pytest.mark.slow) for s, w, n in [(3, 3, "1"), (0, 3, "0")])]


@pytest.mark.parametrize(("stage", "world", "native"), SKIPS)
def test_a_skipped_collective_before_one_of_the_same_size(tmp_path, stage, world, native):
    """Nothing fails and nothing hangs for some steps: sums of different things are added."""
    ends = diverge(tmp_path, "skip", stage, world, native=native)
    says(
        ends,
        entered(tmp_path, 0, "sum of 0.weight float32[4]", "head"),
        entered(tmp_path, 1, "sum of 1.weight float32[4]", "after"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("odd", [0, 1])
def test_another_shape(tmp_path, odd, native):
    ends = diverge(tmp_path, "shape", odd=odd, native=native)
    if native == "0" and not any("The paths part" in end.err for end in ends):
        # gloo has aborted both that met the other shape: what they entered last is in their pages, without a line
        assert "last in 'sum of 0.weight float32[4]'" in ends[odd].err, ends[odd].err
        assert f"'sum of 0.weight float32[5]' at {tmp_path}/train.py:{line_of('head')} in <module>" in ends[odd].err
        return
    says(
        ends,
        entered(tmp_path, odd, "sum of 0.weight float32[5]", "head"),
        entered(tmp_path, 2, "sum of 0.weight float32[4]", "head"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_exits(tmp_path, odd, native):
    ends = diverge(tmp_path, "exit", odd=odd, native=native)
    says(ends, f"rank {odd} on {socket.gethostname()}: has not entered it", f"rank {odd}: has ended, after")
    for rank in {0, 1, 2} - {odd}:  # with rank 0 the store has gone, and each knows of itself
        says(ends if odd else [ends[rank]], entered(tmp_path, rank, "sum of 0.weight float32[4]", "head"))


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
def test_a_loader_that_is_shorter_on_one_rank(tmp_path, native):
    ends = diverge(tmp_path, "loader", native=native)
    says(
        ends,
        entered(tmp_path, 1, "end of epoch", "end"),
        f"rank 0 on {socket.gethostname()}: 'agreement on gradients [",
        f"train.py:{line_of('step')} in <module>",
    )


@pytest.mark.slow
@pytest.mark.parametrize("native", ["1", "0"])
def test_another_group(tmp_path, native):
    ends = diverge(tmp_path, "group", native=native)
    says(
        ends,
        entered(tmp_path, 0, "sum of 0.bias float32[4]", "group"),
        f"rank 1 on {socket.gethostname()}: has not entered it",
    )


@pytest.mark.slow
def test_ranks_that_agree_are_left_alone(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    for stage in (0, 1, 2, 3):
        snippet = f"sys.argv = ['train.py', '', '{stage}', '1', '1']\nexec(open({str(path)!r}).read())"
        since = time.monotonic()
        ends = run_ranks(snippet, 3, limit=120 * PATIENCE)
        assert [end.code for end in ends] == [0, 0, 0], ends[0].err
        assert all("finished" in end.out for end in ends), time.monotonic() - since
