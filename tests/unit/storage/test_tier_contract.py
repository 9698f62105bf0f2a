"""What every tier promises to those who store in it; one suite, three tiers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.ops.aio.memory import aligned_bytes
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import ResidentTier
from deepspeed.storage.host_tier import HostTier
from deepspeed.storage.nvme_tier import NvmeTier
from deepspeed.storage.tensor_file import Disk
from deepspeed.storage.tier import StoredTensor, Tier

DEVICE = torch.device("cpu")
BEHAVIOURS = ["resident", "host", "nvme", "nvme, nothing ahead or behind", "nvme, one buffer"]


@pytest.fixture(params=BEHAVIOURS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "resident":
        yield ResidentTier()
    elif request.param == "host":
        yield HostTier(BufferPool())
    else:
        disk = Disk(tmp_path, settings=Aio(block_size=4096, queue_depth=4))
        busy = "nothing" not in request.param
        yield NvmeTier(disk, BufferPool(), 1 if "one" in request.param else 4, busy, busy)
        disk.close()


def store(tier: Tier, numel: int = 1000, dtype: torch.dtype = torch.float32, label: str = "values") -> StoredTensor:
    return tier.store(label, numel, dtype, DEVICE)


def fill(stored: StoredTensor, value: float) -> None:
    with stored.borrowed(changed=True, read=False) as lent:
        lent.fill_(value)


def values(stored: StoredTensor) -> torch.Tensor:
    with stored.borrowed() as lent:
        return lent.clone()


@pytest.mark.drawn(25)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 7, 1024, 5000])
def test_a_new_one_holds_zeros_and_then_what_was_written(tier: Tier, numel: int, dtype: torch.dtype) -> None:
    stored = store(tier, numel, dtype)
    assert (stored.numel, stored.dtype, stored.nbytes) == (numel, dtype, numel * dtype.itemsize)
    assert torch.equal(values(stored), torch.zeros(numel, dtype=dtype))
    wanted = torch.arange(numel).to(dtype)
    with stored.borrowed(changed=True) as lent:
        assert lent.shape == (numel,) and lent.dtype == dtype and lent.is_contiguous()
        assert lent.device == tier.lends_on(DEVICE)
        lent.copy_(wanted)
    for _ in range(2):
        assert torch.equal(values(stored), wanted)


def test_tensors_do_not_share(tier: Tier) -> None:
    many = [store(tier, 300 + index, label=f"number {index}") for index in range(12)]
    for index, stored in enumerate(many):
        fill(stored, index)
    for stored in reversed(many):
        stored.prefetch()
    for index, stored in enumerate(many):
        assert values(stored).eq(index).all()


def test_a_second_borrower_sees_the_same_memory(tier: Tier) -> None:
    stored = store(tier)
    outer = stored.acquire()
    with stored.borrowed(changed=True) as inner:
        assert inner.data_ptr() == outer.data_ptr()
        inner.fill_(3)
    assert outer.eq(3).all()
    stored.release(changed=False)  # the inner borrower's change counts
    assert values(stored).eq(3).all()


def test_reading_ahead_changes_nothing(tier: Tier) -> None:
    stored = store(tier)
    stored.prefetch()
    fill(stored, 2)
    stored.prefetch()
    stored.prefetch()
    assert values(stored).eq(2).all()


def test_written_again_while_the_last_write_is_under_way(tier: Tier) -> None:
    stored = store(tier, 1 << 18)
    for value in range(1, 6):
        fill(stored, value)
    assert values(stored).eq(5).all()


def test_a_place_that_was_dropped_serves_another(tier: Tier) -> None:
    for value in range(1, 4):
        stored = store(tier, 2048, label=f"life {value}")
        assert values(stored).eq(0).all()
        fill(stored, value)
        assert values(stored).eq(value).all()
        stored.drop()


def test_lent_memory_says_where_it_rests(tier: Tier) -> None:
    stored = store(tier)
    rests = stored.memory
    assert (rests is None) == tier.moves
    if rests is not None:
        with stored.borrowed() as lent:
            assert rests.data_ptr() == lent.data_ptr()


def test_settled_use_allocates_nothing(tier: Tier) -> None:
    pool = getattr(tier, "pool", None)
    many = [store(tier, 1000, label=f"number {index}") for index in range(9)]

    def step() -> None:
        for now, coming in zip(many, [*many[1:], None], strict=True):
            if coming is not None:
                coming.prefetch()
            with now.borrowed(changed=True) as lent:
                lent.add_(1)

    step()
    step()
    made = pool.allocations if pool is not None else 0
    for _ in range(5):
        step()
    assert pool is None or pool.allocations == made
    assert all(values(stored).eq(7).all() for stored in many)


def test_with_the_last_tensor_the_memory_of_buffers_goes(tmp_path: Path) -> None:
    """Slices that are born on a disk are laid elsewhere by the engine, which has buffers of its own."""
    disk, pool = Disk(tmp_path, settings=Aio(block_size=4096, queue_depth=4)), BufferPool()
    tier = NvmeTier(disk, pool, 2)
    first, second = store(tier), store(tier)
    fill(first, 1.0)
    fill(second, 2.0)
    second.drop()
    assert pool.nbytes > 0 and float(values(first).sum()) == 1000.0
    first.drop()
    assert pool.nbytes == 0 and pool.idle
    third = store(tier)
    fill(third, 3.0)
    assert float(values(third).sum()) == 3000.0
    third.drop()
    disk.close()


def test_buffers_are_few(tmp_path: Path) -> None:
    """Tensors on disk take memory while they are borrowed, and a few ahead and behind."""
    disk = Disk(tmp_path, settings=Aio())
    pool = BufferPool()
    tier = NvmeTier(disk, pool, 2)
    many = [store(tier, 1024, label=f"number {index}") for index in range(30)]
    for stored in many:
        fill(stored, 1)
    for stored in many:
        stored.prefetch()
    for stored in many:
        assert values(stored).eq(1).all()
    assert pool.nbytes <= 5 * 4096
    disk.close()


@pytest.mark.drawn(8)
@pytest.mark.parametrize("shift", [0, 1, 16], ids=lambda shift: f"{shift} elements behind a page")
def test_values_come_and_go_past_the_buffers(tier: Tier, shift: int) -> None:
    """Into and out of memory that begins anywhere, beside loans; three blocks and the rest of one."""
    numel = 3 * 4096 // 4 + 5
    stored = store(tier, numel)
    memory = aligned_bytes(4 * (numel + shift)).view(torch.float32)[shift:]
    wanted = torch.arange(numel, dtype=torch.float32)
    stored.replace(wanted)
    straight = stored.bring(memory)
    assert straight == isinstance(tier, NvmeTier)
    with stored.borrowed() as lent:  # a read of the same place, while the other may be under way
        assert torch.equal(lent, wanted)
        if straight:
            assert not stored.bring(torch.empty(numel)), "a buffer has the values: they are copied from there"
    stored.brought()
    assert torch.equal(memory, wanted) or not straight
    stored.replace(memory.copy_(wanted + 1))
    assert torch.equal(values(stored), wanted + 1)
    fill(stored, 7)
    if stored.bring(memory):
        stored.brought()
        assert memory.eq(7).all()
    assert not store(tier).bring(memory[:1000]), "nothing was stored yet"
