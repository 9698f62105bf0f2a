"""The table: every stage, precision, accumulation and layout gives what one plain process gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.parity.cells import FEWER, STEPS, TIERS, Cell, Record, reference, run_cell
from tests.parity.reference import DTYPES, distance, largest_difference, largest_entry

STAGES = (0, 1, 2, 3)
BUCKETS = (100, 2000, None)  # below one parameter, below one group, default
OPTIMIZERS = ("sgd", "adamw", "adamw-default-eps")


def full_product() -> list[Cell]:
    axes = itertools.product(STAGES, (1, 2, 3), DTYPES, (1, 3), BUCKETS, OPTIMIZERS, (True, False), (0.0, 0.1))
    cells = [Cell(*values) for values in axes]
    # In low precision the bar is on the masters, and the default eps amplifies noise there.
    return [c for c in cells if c.precision == "fp32" or c.optimizer != "adamw-default-eps"]


def representatives() -> list[Cell]:
    """Every stage × ranks × precision × accumulation once; the other settings take turns, and one cell at defaults."""
    axes = itertools.product(STAGES, (1, 2, 3), DTYPES, (1, 3))
    cells = []
    for index, (stage, ranks, precision, accumulation) in enumerate(axes):
        optimizers = OPTIMIZERS if precision == "fp32" else OPTIMIZERS[:2]
        turn = index + index // 6  # so that no setting follows an axis in step
        bucket, optimizer = BUCKETS[turn % 3], optimizers[(turn // 2) % len(optimizers)]
        cells.append(
            Cell(stage, ranks, precision, accumulation, bucket, optimizer, turn % 2 == 0, 0.1 * (turn % 4 < 2))
        )
    return [*cells, Cell(3, 2, "bf16", 3, sharded=False)]


def faults_found(cell: Cell, records: list[Record], steps: int = STEPS) -> list[str]:
    """The bars of the table that a cell misses, in words."""
    found = []
    for rank, (record, wanted) in enumerate(zip(records, reference(cell, steps), strict=True)):
        measured = _exact(cell, record, wanted) if cell.precision == "fp32" else _low(record, wanted)
        measured["published"] = (published_error(cell, record), 0.0)
        measured["skipped steps"] = (abs(record.skipped - wanted.skipped), 0)
        found += [f"rank {rank}: {k} {v:.3g} > {bar:g}" for k, (v, bar) in measured.items() if not v <= bar]
    return found


def _exact(cell: Cell, record: Record, wanted: Record) -> dict[str, tuple[float, float]]:
    measured = {
        "loss": (relative(record.losses, wanted.losses), 1e-6),
        "gradient norm": (relative(record.norms, wanted.norms), 1e-5),
    }
    if record.gradients:
        pairs = zip(record.gradients, wanted.gradients, strict=True)
        errors = [largest_difference(ours, theirs) / largest_entry(theirs.values()) for ours, theirs in pairs]
        measured["gradient"] = (max(errors), 1e-6)
    if cell.optimizer != "adamw-default-eps":
        measured["parameter"] = (largest_difference(record.last, wanted.last), 1e-6)
    return measured


def _low(record: Record, wanted: Record) -> dict[str, tuple[float, float]]:
    return {
        "loss": (relative(record.losses, wanted.losses), 1e-2),
        "master after one step": (largest_difference(record.first, wanted.first), 1e-6),
    }


def relative(ours: list[float], theirs: list[float]) -> float:
    """The largest relative difference of two equally long lists."""
    return max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def published_error(cell: Cell, record: Record) -> float:
    """How far the parameters are from their masters cast to the dtype of computation."""
    dtype = DTYPES[cell.precision]
    return max(distance(value, record.last[name].to(dtype)) for name, value in record.published.items())


def grid(stages: tuple[int, ...], *fast: tuple[int, str]) -> list[Any]:
    """Stages × precisions; all but the fast ones are slow."""
    cells = itertools.product(stages, ("fp32", "bf16"))
    return [pytest.param(*cell, marks=() if cell in fast else pytest.mark.slow) for cell in cells]


def inspects(cell: Cell) -> bool:
    return cell.precision == "fp32" and cell.optimizer == "adamw-default-eps"


@pytest.mark.drawn(10)
@pytest.mark.parametrize("cell", representatives(), ids=str)
def test_same_numbers(workers: Any, cell: Cell) -> None:
    assert not faults_found(cell, workers(cell.ranks).run(run_cell, cell, FEWER, inspects(cell)), FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("cell", full_product(), ids=str)
def test_same_numbers_full_product(workers: Any, cell: Cell) -> None:
    assert not faults_found(cell, workers(cell.ranks).run(run_cell, cell, 20, inspects(cell)))


def tiers_of(stage: int) -> list[str]:
    """The tiers a stage can have, without the device."""
    return [name for name, sections in TIERS.items() if sections and (stage == 3 or "offload_param" not in sections)]


def offloaded() -> list[Cell]:
    """Every stage × precision × accumulation once; tiers and the other settings take turns."""
    cells = []
    for index, (stage, precision, accumulation) in enumerate(itertools.product(STAGES[1:], DTYPES, (1, 3))):
        tiers, ranks = tiers_of(stage), 1 + index % 3
        optimizer, client = OPTIMIZERS[index % 2], index % 4 < 2
        bucket, clip, tier = BUCKETS[index % 3], 0.1 * (index % 2), tiers[index % len(tiers)]
        cells.append(Cell(stage, ranks, precision, accumulation, bucket, optimizer, client, clip, tier=tier))
    return cells


@pytest.mark.drawn(6)
@pytest.mark.parametrize("cell", offloaded(), ids=str)
def test_same_numbers_offloaded(workers: Any, cell: Cell) -> None:
    assert not faults_found(cell, workers(cell.ranks).run(run_cell, cell, FEWER, inspects(cell)), FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [c for c in full_product() if c.stage], ids=str)
def test_same_numbers_offloaded_full_product(workers: Any, cell: Cell) -> None:
    for tier in tiers_of(cell.stage):
        moved = replace(cell, tier=tier)
        assert not faults_found(moved, workers(cell.ranks).run(run_cell, moved, 20, inspects(moved)))


@pytest.mark.parametrize(("stage", "precision"), grid(STAGES[1:], (3, "bf16")))
def test_where_state_rests_changes_no_bit(workers: Any, stage: int, precision: str) -> None:
    """The client's optimizer is one kernel on every tier."""
    cell = Cell(stage, 2, precision, 3, 2000, optimizer="adamw", clip=0.1)
    wanted = workers(2).run(run_cell, cell, 3)[0]
    for tier in tiers_of(stage):
        found = workers(2).run(run_cell, replace(cell, tier=tier), 3)[0]
        same = [name for name in found.last if torch.equal(found.last[name], wanted.last[name])]
        assert same == list(wanted.last), f"{tier} changed {sorted(found.last.keys() - set(same))}"
        assert found.losses == wanted.losses, tier


LAYOUTS = [
    {"reduce_bucket_size": 100, "allgather_bucket_size": 100, "overlap_comm": True},
    {"reduce_bucket_size": 2000, "allgather_bucket_size": 700, "overlap_comm": False},
    {"overlap_comm": True},
    {"overlap_comm": False, "stage3_prefetch_bucket_size": 0},
    {"overlap_comm": True, "stage3_prefetch_bucket_size": 100000, "stage3_max_live_parameters": 100000},
]


@pytest.mark.parametrize(("stage", "precision"), grid(STAGES, (2, "fp32"), (3, "bf16")))
def test_layout_settings_change_no_bit(workers: Any, stage: int, precision: str) -> None:
    """Three ranks and three micro-batches: here another order of summation would show."""
    outcomes = []
    for layout in LAYOUTS:
        cell = Cell(stage, 3, precision, 3, optimizer="adamw", clip=0.1, zero=tuple(layout.items()))
        outcomes.append(workers(3).run(run_cell, cell, 3)[0])
    for layout, other in zip(LAYOUTS[1:], outcomes[1:], strict=True):
        same = [name for name in other.last if torch.equal(other.last[name], outcomes[0].last[name])]
        assert same == list(other.last), f"{layout} changed {sorted(other.last.keys() - set(same))}"
        assert other.losses == outcomes[0].losses, layout


def sum_instead_of_mean(patch: pytest.MonkeyPatch) -> None:
    from deepspeed.zero.gradients.reducer import GradScales

    form = GradScales._form

    def planted(entries: Any, *args: Any) -> Any:
        entries._window.factor = 1.0
        return form(entries, *args)

    patch.setattr(GradScales, "_form", planted)


def drop_one_bucket(patch: pytest.MonkeyPatch) -> None:
    from deepspeed.zero.gradients.reduce_scatter import GradReduceScatter

    launch = GradReduceScatter.launch

    def planted(wire: Any, bucket: Any, current: Any) -> None:
        if any(member.name.startswith("blocks.1") for member in bucket.group.members):
            current.arrived.clear()  # what has not arrived counts as zero
        launch(wire, bucket, current)

    patch.setattr(GradReduceScatter, "launch", planted)


def publish_nothing(patch: pytest.MonkeyPatch) -> None:
    from deepspeed.zero.optimizer import update

    patch.setattr(update, "start_all_gather_updated", lambda *_: [])


def run_with(fault: Callable[[pytest.MonkeyPatch], None], cell: Cell) -> Record:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return run_cell(cell, FEWER)


FAULTS = [(sum_instead_of_mean, "fp32"), (drop_one_bucket, "fp32"), (publish_nothing, "bf16")]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("fault", "precision"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_planted_faults_miss_the_bars(workers: Any, fault: Any, precision: str, stage: int) -> None:
    cell = Cell(stage, 2, precision, 1, bucket=2000)
    assert not faults_found(cell, workers(2).run(run_cell, cell, FEWER), FEWER)
    assert faults_found(cell, workers(2).run(run_with, fault, cell), FEWER)
