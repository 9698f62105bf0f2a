"""Sums of narrow gradients over ranks on several hosts: within each host first, on the emulated device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.collectives.collectives import sum_in_rank_order
from deepspeed.comm.collectives.hierarchical import reduce_to_owners
from deepspeed.comm.collectives.torch_api import forget_routes
from deepspeed.comm.process_groups import axis as axes
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed
from tests.emulated.test_parity import bar_of

SHARE = 1000
PER_HOST = 2


@contextlib.contextmanager
def on_hosts_of(ranks: int) -> Iterator[None]:
    """Inside, every so many neighbours say that they are a host of their own, and sums are formed there first."""
    before, fewest = os.environ["LOCAL_RANK"], axes.FEWEST_PER_HOST
    os.environ["LOCAL_RANK"], axes.FEWEST_PER_HOST = str(dist.get_rank() % ranks), ranks
    forget_routes()
    axes.forget_axes()
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"], axes.FEWEST_PER_HOST = before, fewest
        forget_routes()
        axes.forget_axes()


def everybodys(dtype: torch.dtype, whole: bool) -> list[torch.Tensor]:
    """What each rank contributes."""
    made = []
    for rank in range(dist.get_world_size()):
        torch.manual_seed(rank)
        values = torch.randn(SHARE * dist.get_world_size()) * 100
        made.append((values.round() if whole else values).to(dtype))
    return made


def summed(dtype: torch.dtype, whole: bool, in_rank_order: bool) -> dict[str, object]:
    """The sum of this rank's slice, twice in a row over the same buffers, and what it cost."""
    with on_hosts_of(PER_HOST):
        world = axes.world_axis("dp", torch.device("cuda", torch.cuda.current_device()))
        axes.axes_here().separate_reductions([world], world)
        reducing, size = world.reductions, world.size
        given = everybodys(dtype, whole)
        cuts = [rank * SHARE for rank in range(size + 1)]
        out = torch.empty(SHARE, device="cuda")
        kept: list[torch.Tensor] = []

        def scratch(like: torch.Tensor) -> torch.Tensor:
            made = kept.pop() if kept else torch.empty_like(like)
            return made

        def finish(parts: list[torch.Tensor]) -> None:
            sum_in_rank_order(parts, out, 1.0, add=False, any_order=not in_rank_order)
            if parts[0]._base is not None:
                kept.append(parts[0]._base)

        flats = [given[world.rank].to("cuda") for _ in range(2)]
        with observed() as seen:
            for flat in flats:
                reduce_to_owners(reducing, flat, cuts, 0, "sum", finish, scratch, in_rank_order).wait()
        rows = [torch.stack(given[at : at + PER_HOST]).sum(0, dtype=torch.float32) for at in range(0, size, PER_HOST)]
        low, high = cuts[world.rank], cuts[world.rank + 1]
        in_order = torch.empty(SHARE)
        sum_in_rank_order([one[low:high] for one in given], in_order, 1.0, add=False)
        return {
            "by host": torch.equal(out.cpu(), torch.stack(rows)[:, low:high].sum(0)),
            "in order": torch.equal(out.cpu(), in_order),
            "counters": seen.counters, "waits": seen.waits, "reports": seen.reports,
        }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_sums_are_those_of_hosts_first_and_cross_hosts_once(emulated, dtype):
    need_compiler()
    for seen in emulated(4).run(summed, dtype, False, False, timeout=LIMIT):
        assert seen["by host"] and seen["reports"] == [] and seen["waits"] == []
        counters = seen["counters"]
        assert counters["nccl.all_to_all_single"] == 2 * (2 + 1)  # a stretch for each host, and the sums
        whole = 2 * 4 * SHARE  # bytes; half of it within the host, and half of twice a half to the other
        assert counters["bytes.wire"] == 2 * (whole // 2 + whole // 2)


def test_sums_without_rounding_are_the_same_bits_in_any_order(emulated):
    need_compiler()
    assert all(seen["in order"] for seen in emulated(4).run(summed, torch.bfloat16, True, False, timeout=LIMIT))


def test_sums_in_rank_order_go_straight_to_their_owners(emulated):
    need_compiler()
    for seen in emulated(4).run(summed, torch.bfloat16, False, True, timeout=LIMIT):
        assert seen["in order"] and "nccl.all_to_all_single" not in seen["counters"]


def trained(cell: Cell) -> runs.Seen:
    """A cell on two hosts."""
    with on_hosts_of(PER_HOST):
        return runs.train(cell)


CELLS = [
    Cell(stage=3, ranks=4, dtype="bf16", small_buckets=True, own_stream=True),
    pytest.param(Cell(stage=1, ranks=4, dtype="bf16", small_buckets=True), marks=pytest.mark.slow),
    pytest.param(Cell(stage=0, ranks=4, dtype="fp16"), marks=pytest.mark.slow),
    pytest.param(Cell(stage=2, ranks=4, dtype="fp16", tier="cpu", small_buckets=True), marks=pytest.mark.slow),
    pytest.param(Cell(stage=3, ranks=4, dtype="bf16", tier="nvme-nvme", checkpointing=True), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_losses_on_two_hosts_are_the_cpus(workers, emulated, cell):
    need_compiler()
    theirs = workers(cell.ranks).run(runs.train, cell, timeout=LIMIT)
    for ours, other in zip(emulated(cell.ranks).run(trained, cell, timeout=LIMIT), theirs, strict=True):
        assert ours.reports == [] and ours.counters["nccl.all_to_all_single"] > 0
        assert ours.losses == pytest.approx(other.losses, rel=bar_of(cell))
