"""Faults once seen on the emulated device, one test each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import emulates, observed

need_compiler()

TWO = Cell(stage=2, ranks=2, small_buckets=True)


FAST_WAITS = {(0, "fp16"), (2, "fp32"), (3, "bf16")}


def losses_of(pool, cell: Cell) -> list[list[float]]:
    found = pool.run(runs.train, cell, timeout=LIMIT)
    assert [report for rank in found for report in rank.reports] == []
    return [rank.losses for rank in found]


def expect_the_cpus(workers, emulated, cell: Cell) -> None:
    theirs = [rank.losses for rank in workers(cell.ranks).run(runs.train, cell, timeout=LIMIT)]
    for ours, others in zip(losses_of(emulated(cell.ranks), cell), theirs, strict=True):
        assert ours == pytest.approx(others, rel=2e-6)


def test_parameters_on_disk_are_not_read_over_while_the_device_copies_them(workers, emulated):
    expect_the_cpus(workers, emulated, Cell(stage=3, tier="nvme-nvme", small_buckets=True))


@pytest.mark.slow
def test_gradients_on_the_users_own_stream(workers, emulated):
    expect_the_cpus(workers, emulated, Cell(stage=2, ranks=2, small_buckets=True, own_stream=True))


def big_gradients() -> float:
    import deepspeed
    from tests.parallel.tiny import tiny

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "gradient_clipping": 0.0}
    model = tiny()
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    loss = engine(torch.ones(2, 6, device=engine.device)).sum() * 1e25
    engine.backward(loss)
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    return float(norm)


def test_finite_gradients_have_a_finite_norm(workers, emulated):
    ours, theirs = (pool.run(big_gradients, timeout=LIMIT)[0] for pool in (emulated(1), workers(1)))
    assert ours == pytest.approx(theirs, rel=1e-5)


def launches_of_a_sum(dtype: torch.dtype, add: bool, together: bool = False) -> int:
    from deepspeed.comm.collectives.collectives import sum_in_rank_order

    size = 1 << 20
    if together:
        parts = list(torch.ones(8 * size, dtype=dtype, device="cuda").split(size))
    else:
        parts = [torch.ones(size, dtype=dtype, device="cuda") for _ in range(8)]
    out = torch.ones(size, device="cuda")
    with observed() as seen:
        sum_in_rank_order(parts, out, 0.5, add, any_order=together)
    assert out.eq(4.0 + add).all()
    return seen.counters["launch"]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("add", [False, True], ids=["set", "add"])
def test_a_sum_is_one_launch_per_rank(emulated, dtype, add):
    assert emulated(1).run(launches_of_a_sum, dtype, add, timeout=LIMIT)[0] <= 8 + 3


def test_parts_that_lie_behind_each_other_are_summed_by_one_launch(emulated):
    assert emulated(1).run(launches_of_a_sum, torch.bfloat16, False, True, timeout=LIMIT)[0] <= 2


def one_step(cell: Cell, traced: bool = False) -> runs.Seen:
    """What one step of a warm engine does."""
    native = emulates()
    engine = runs.engine_of(cell)
    for step in range(2):
        runs.micro_step(engine, step)
    native.set("trace", traced)
    with observed() as seen:
        ids, targets = (part.to(engine.device) for part in runs.batch(2, 0, torch.distributed.get_rank()))
        native.clear()
        engine.backward(engine(ids, targets))
        engine.step()
    native.set("trace", False)
    engine.destroy()
    return seen


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        pytest.param(stage, dtype, marks=() if (stage, dtype) in FAST_WAITS else pytest.mark.slow)
        for stage in range(4)
        for dtype in ("fp32", "bf16", "fp16")
    ],
)
def test_the_host_waits_at_most_once_per_step(emulated, stage, dtype):
    for seen in emulated(2).run(one_step, Cell(stage=stage, ranks=2, dtype=dtype), timeout=LIMIT):
        assert len(seen.waits) <= 1, seen.waits


def test_fp32_goes_by_the_backends_reduce_scatter_and_gathers_are_in_place(emulated):
    for seen in emulated(2).run(one_step, Cell(stage=3, ranks=2, small_buckets=True), timeout=LIMIT):
        found = seen.counters
        assert found["nccl.reduce_scatter_tensor"] and "nccl.all_to_all" not in found
        assert found["nccl.in_place"] == found["nccl.reduce_scatter_tensor"] + found["nccl.all_gather_into_tensor"]


def in_rank_order(stage: int) -> tuple[list[float], dict[str, int]]:
    """The sum over ranks of gradients whose fp32 sum depends on the order, and what was called."""
    import deepspeed

    model = torch.nn.Linear(8, 2, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "deterministic_reduction": True,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    rank = torch.distributed.get_rank()
    with observed() as seen:
        x = torch.full((1, 8), 1.0 if rank == 0 else 2.0**-24, device=engine.device)
        engine.backward(engine(x).sum() * 4)
        gradient = deepspeed.utils.safe_get_full_grad(model.weight).flatten().tolist()
    engine.destroy()
    return gradient, seen.counters


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))])
def test_sums_are_in_rank_order_by_key(emulated, stage):
    for gradient, counters in emulated(4).run(in_rank_order, stage, timeout=LIMIT):
        assert gradient == [1.0] * 16  # the small ones together would have counted
        assert counters["nccl.all_to_all"] and not {"nccl.reduce_scatter_tensor", "nccl.all_reduce"} & set(counters)


def what_is_rounded(stage: int) -> tuple[bool, list[bool]]:
    """Whether the host's optimizer is the one that folds, and for each leaf whether its pass rounds too."""
    from deepspeed.ops.cpu_optimizer import HostOptimizer

    engine, found = runs.engine_of(Cell(stage=stage, ranks=2, dtype="bf16", tier="cpu")), []
    inner = engine.optimizer.optimizer
    inner.register_step_pre_hook(
        lambda optimizer, *_: found.extend(f.out is not None for f in optimizer.folds.values())
    )
    with observed() as seen:
        runs.micro_step(engine, 0)
    assert seen.reports == []
    engine.destroy()
    return isinstance(inner, HostOptimizer), found


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_the_hosts_optimizer_rounds_in_its_own_pass_for_values_on_a_device(emulated, stage):
    for folds, rounded in emulated(2).run(what_is_rounded, stage, timeout=LIMIT):
        assert folds and rounded and all(rounded)


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [
        pytest.param(stage, dtype, marks=() if (stage, dtype) in FAST_WAITS else pytest.mark.slow)
        for stage in (1, 2, 3)
        for dtype in ("fp32", "bf16")
    ],
)
def test_the_host_waits_at_most_once_per_offloaded_group_beside(emulated, stage, dtype):
    cell = Cell(stage=stage, ranks=2, dtype=dtype, tier="cpu", small_buckets=True)
    most = 1 + emulated(2).run(count_groups, cell, timeout=LIMIT)[0]
    for seen in emulated(2).run(one_step, cell, timeout=LIMIT):
        assert len(seen.waits) <= most, (most, seen.waits)


def count_groups(cell: Cell) -> int:
    engine = runs.engine_of(cell)
    found = len(engine._components.groups)
    engine.destroy()
    return found


def test_offloaded_parameters_are_not_copied_on_the_compute_stream(emulated):
    cell = Cell(stage=3, ranks=2, tier="cpu-cpu", small_buckets=True)
    for rank, seen in enumerate(emulated(2).run(one_step, cell, True, timeout=LIMIT)):
        copies = [stream for what, stream, size, _ in seen.trace if what == "copy to device" and size > 1000]
        assert copies and rank not in copies, seen.trace  # the default stream has the device's number


@pytest.mark.parametrize("cell", [Cell(stage=3, ranks=2), Cell(stage=3, ranks=4, hybrid=True)], ids=["dp", "hybrid"])
def test_gathers_and_reductions_have_communicators_of_their_own(emulated, cell):
    for seen in emulated(cell.ranks).run(one_step, cell, True, timeout=LIMIT):
        gathers = {stream for what, stream, *_ in seen.trace if what.startswith("nccl all_gather")}
        reductions = {stream for what, stream, *_ in seen.trace if what.startswith("nccl reduce_scatter")}
        assert gathers and reductions and not gathers & reductions


def births() -> dict[str, int]:
    with observed() as seen:
        engine = runs.engine_of(Cell(stage=3, init=True))
    engine.destroy()
    return seen.counters


def test_the_cache_is_emptied_once_at_birth(emulated):
    assert emulated(1).run(births, timeout=LIMIT)[0].get("empty_cache", 0) <= 1


def pinned_after_reload() -> tuple[int, int]:
    native = emulates()
    engine = runs.engine_of(Cell(stage=3))
    runs.micro_step(engine, 0)
    before = native.pinned_bytes()
    engine.offload_states()
    engine.reload_states(non_blocking=True)
    runs.micro_step(engine, 1)
    runs.micro_step(engine, 2)
    after = native.pinned_bytes()
    engine.destroy()
    return before, after


def test_reload_states_gives_its_pinned_memory_back(emulated):
    before, after = emulated(1).run(pinned_after_reload, timeout=LIMIT)[0]
    assert after == before


def movers() -> list[int]:
    from deepspeed.storage.async_copy import mover_of

    target = torch.zeros(8, device="cuda:1")
    mover_of(torch.device("cuda:1")).copy(target, torch.ones(8).pin_memory()).wait()
    assert target.sum().item() == 8
    devices = [torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda:1")]
    return [mover_of(device)._stream.device_index for device in devices]


def test_a_mover_belongs_to_its_device(emulated):
    assert emulated(1).run(movers, timeout=LIMIT)[0] == [0, 0, 1]


class Swapped(runs.LM):
    """Rank 1 runs its two blocks in the other order, so its gradients arrive in another order."""

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        blocks = list(self.blocks)[:: -1 if torch.distributed.get_rank() else 1]
        x = self.embedding(ids)
        for block in blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def swapped(cell: Cell) -> runs.Seen:
    with observed() as seen:
        engine = runs.engine_of(cell, Swapped)
        seen.losses = [runs.micro_step(engine, step) for step in range(3)]
        engine.destroy()
    return seen


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1))])
def test_ranks_whose_gradients_arrive_in_another_order(workers, emulated, stage):
    cell = Cell(stage=stage, ranks=2, small_buckets=True)
    theirs = workers(2).run(swapped, cell, timeout=LIMIT)
    pool = emulated(2)
    ours = pool.run(swapped, cell, timeout=LIMIT)
    for rank, other in zip(ours, theirs, strict=True):
        assert rank.losses == pytest.approx(other.losses, rel=2e-6) and rank.reports == []


def in_flight() -> tuple[int, int, int, int]:
    """Most elements on the wire after any gradient, the limit, transit buffers that were made, and groups."""
    engine = runs.engine_of(Cell(stage=2, ranks=2, dtype="bf16", small_buckets=True))
    reducer = engine._components.reducer
    wire, found = reducer.reduce_scatter, []
    reducer.settings = wire.settings = replace(wire.settings, in_flight=wire.settings.in_flight // 2)  # one bucket
    for param in engine.module.parameters():
        param.register_post_accumulate_grad_hook(lambda _: found.append(wire._elements))
    for step in range(2):
        runs.micro_step(engine, step)
    buffers, groups = sum(map(len, wire._pool.values())), engine._components.groups
    limit = max(reducer.settings.in_flight, *(group.numel for group in groups))
    engine.destroy()
    return max(found), limit, buffers, len(groups)


def test_what_is_on_the_wire_is_bounded_where_waiting_does_not_block(emulated):
    for most, limit, buffers, groups in emulated(2).run(in_flight, timeout=LIMIT):
        assert 0 < most <= limit and 0 < buffers < groups


def told_when_memory_runs_out(pieces: bool) -> str:
    from deepspeed.errors import MemoryExhaustedError
    from deepspeed.zero.out_of_memory import raise_if_exhausted

    native = emulates()
    torch.cuda.empty_cache()
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    if pieces:
        del held  # torch keeps it
    try:
        try:
            torch.empty(native.limit() + 1, dtype=torch.uint8, device="cuda")
        except RuntimeError as error:
            raise_if_exhausted("a test ran", error)
            raise
    except MemoryExhaustedError as error:
        return str(error)
    finally:
        torch.cuda.empty_cache()
    return ""


@pytest.mark.parametrize("pieces", [True, False])
def test_memory_in_pieces_is_told_with_what_joins_them(emulated, pieces):
    said = emulated(1).run(told_when_memory_runs_out, pieces, timeout=LIMIT)[0]
    assert "offload_optimizer" in said and ("expandable_segments:True" in said) == pieces
