"""Encoded messages on the device: the losses of the CPU, no race, no wait that has no reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.process_groups import axis as axes
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed
from tests.emulated.test_across_hosts import PER_HOST, on_hosts_of

need_compiler()

CELLS = [
    Cell(stage=0, ranks=2, small_buckets=True, wire="int8"),
    Cell(stage=2, ranks=2, small_buckets=True, wire="int4", dtype="bf16", accumulation=2),
    Cell(stage=3, ranks=2, small_buckets=True, wire="int8"),
    *(
        pytest.param(cell, marks=pytest.mark.slow)
        for cell in (
            Cell(stage=1, ranks=2, small_buckets=True, wire="int8", dtype="fp16"),
            Cell(stage=2, ranks=4, small_buckets=True, wire="int4", tier="cpu"),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int4", tier="cpu-cpu", accumulation=2),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hybrid=True),
            Cell(stage=3, ranks=2, small_buckets=True, wire="int8", own_stream=True, checkpointing=True, init=True),
            Cell(stage=2, ranks=2, small_buckets=True, wire="bf16", own_stream=True),
        )
    ),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_are_those_of_the_cpu(workers, emulated, cell: Cell) -> None:
    found = emulated(cell.ranks).run(runs.train, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    theirs = [rank.losses for rank in workers(cell.ranks).run(runs.train, cell, timeout=LIMIT)]
    for ours, others in zip([rank.losses for rank in found], theirs, strict=True):
        # A value next to the middle of two codes may be rounded to the other one.
        assert ours == pytest.approx(others, rel=1e-4 if cell.dtype == "fp32" else 1e-3)


@contextlib.contextmanager
def on_two_hosts() -> Iterator[None]:
    """Inside, every two neighbours say that they are a host of their own, and share memory with each other alone."""
    shares = axes.shared_memory_of

    def shared_memory_of(group: dist.ProcessGroup) -> object:
        hosts = {rank // PER_HOST for rank in dist.get_process_group_ranks(group)}
        return shares(group) if len(hosts) == 1 else None

    with pytest.MonkeyPatch.context() as patch, on_hosts_of(PER_HOST):
        patch.setattr(axes, "boot", lambda: f"host {dist.get_rank() // PER_HOST}")
        patch.setattr(axes, "shared_memory_of", shared_memory_of)
        yield


def trained(cell: Cell) -> runs.Seen:
    """A cell on two hosts; `extra`: codecs of the buckets' messages, and whether they go in two steps."""
    with on_two_hosts(), observed(cell.own_stream) as seen:
        engine = runs.engine_of(cell)
        made = [bucket.encoded for bucket in engine._state.components.reducer.buckets]
        seen.extra = {(each.slices.codec.name, each.two_steps is not None) for each in made if each is not None}
        for step in range(runs.STEPS):
            seen.losses += [runs.micro_step(engine, step, micro) for micro in range(cell.accumulation)]
        if cell.stage < 3:
            weights = torch.cat([param.detach().float().flatten() for param in engine.module.parameters()])
            every = [torch.empty_like(weights) for _ in range(cell.ranks)]
            dist.all_gather(every, weights)
            seen.extra.add(("alike", all(torch.equal(every[0], other) for other in every)))
        engine.destroy()
        del engine
    return seen


HOSTS = [
    Cell(stage=2, ranks=4, small_buckets=True, wire="int4", dtype="bf16", accumulation=2, hosts=True),
    *(
        pytest.param(cell, marks=pytest.mark.slow)
        for cell in (
            Cell(stage=0, ranks=4, small_buckets=True, wire="int8", hosts=True),
            Cell(stage=1, ranks=4, small_buckets=True, wire="int8", dtype="fp16", hosts=True),
            Cell(stage=2, ranks=4, small_buckets=True, wire="bf16", hosts=True, own_stream=True),
            Cell(stage=2, ranks=4, small_buckets=True, wire="int8", tier="cpu", hosts=True),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int8", hosts=True, own_stream=True, init=True),
            Cell(stage=3, ranks=4, small_buckets=True, wire="int4", hosts=True, checkpointing=True, accumulation=2),
        )
    ),
]


@pytest.mark.parametrize("cell", HOSTS, ids=str)
def test_sums_are_formed_within_hosts_first(workers, emulated, cell: Cell) -> None:
    found = emulated(cell.ranks).run(trained, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    alike = {("alike", True)} if cell.stage < 3 else set()
    for rank in found:
        assert rank.extra == {(cell.wire, True)} | alike
        assert rank.counters["nccl.all_to_all_single"] > 0
    theirs = [rank.losses for rank in workers(cell.ranks).run(trained, cell, timeout=LIMIT)]
    for ours, others in zip([rank.losses for rank in found], theirs, strict=True):
        assert ours == pytest.approx(others, rel=1e-4 if cell.dtype == "fp32" else 1e-3)
