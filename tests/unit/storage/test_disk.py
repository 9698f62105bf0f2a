"""Tensors on a disk come back as they were, whatever their size; what is not data cannot be read."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import time

import pytest
import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.errors import StorageError, UsageError
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.tensor_file import Disk

BLOCK = 64 * 1024
SETTINGS = Aio(block_size=BLOCK, queue_depth=4)
SIZES = [0, 1, 511, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 4096, 9 * BLOCK + 17]


@pytest.fixture
def disk(engine, tmp_path):
    made = Disk(tmp_path, settings=SETTINGS)
    yield made
    made.close()
    assert os.listdir(tmp_path) == []


def filled(pool: BufferPool, nbytes: int, seed: int) -> torch.Tensor:
    return pool.take(nbytes).random_(generator=torch.Generator().manual_seed(seed))


def stored(disk: Disk, pool: BufferPool, nbytes: int, label: str = "layers.0.weight"):
    """An extent with data in it, and the data."""
    extent, values = disk.create(label, nbytes), filled(pool, nbytes, nbytes)
    disk.write(extent, values).wait()
    return extent, values


@pytest.mark.parametrize("shift", [0, 64])
def test_every_size_comes_back(disk, shift):
    pool = BufferPool()
    kept = []
    for nbytes in SIZES:
        extent = disk.create(f"tensor of {nbytes}", nbytes)
        values = filled(pool, nbytes + shift, nbytes)[shift:]  # 64 is where torch's own memory begins in a page
        kept.append((extent, values))
        disk.write(extent, values).wait()
    for extent, values in kept:
        guarded = pool.take(extent.nbytes + shift + 100).zero_()
        disk.read(extent, guarded[shift : shift + extent.nbytes]).wait()
        assert torch.equal(guarded[shift : shift + extent.nbytes], values), extent.label
        assert not guarded[shift + extent.nbytes :].any(), "bytes behind the tensor were touched"


def test_transfers_of_no_bytes_leave_nothing_behind(disk):
    pool = BufferPool()
    empty, block = disk.create("empty", 0), disk.create("block", 4096)
    for seed in range(2000):  # a job of no bytes that was freed while it stood in the queue took the next one's place
        disk.write(empty, pool.take(0)).wait()
        values = filled(pool, 4096, seed)
        disk.write(block, values).wait()
    again = pool.take(4096).zero_()
    disk.read(block, again).wait()
    assert torch.equal(again, values)


def test_many_transfers_at_once_in_any_order(disk):
    pool, order = BufferPool(), random.Random(0)
    extents = [disk.create(f"tensor {index}", order.choice(SIZES)) for index in range(40)]
    for round_of in range(3):
        values = [filled(pool, extent.nbytes, 100 * round_of + index) for index, extent in enumerate(extents)]
        writes = [disk.write(extent, value) for extent, value in zip(extents, values, strict=True)]
        for transfer in order.sample(writes, len(writes)):
            transfer.wait()
        targets = [pool.take(extent.nbytes) for extent in extents]
        reads = [disk.read(extent, target) for extent, target in zip(extents, targets, strict=True)]
        for transfer in order.sample(reads, len(reads)):
            transfer.wait()
            transfer.wait()  # again does nothing
            assert transfer.done()
        assert all(torch.equal(*pair) for pair in zip(values, targets, strict=True))
        for buffer in values + targets:
            pool.put(buffer)


def test_other_dtypes_and_shapes(disk):
    values = torch.randn(33, 7, requires_grad=True)
    extent = disk.create("weight", values.nbytes)
    disk.write(extent, values).wait()
    target = torch.empty(7 * 33, 2, dtype=torch.bfloat16)
    disk.read(extent, target).wait()
    assert torch.equal(target.view(torch.float32).view(33, 7), values)


def test_what_is_not_data_cannot_be_read(disk):
    pool = BufferPool()
    extent = disk.create("layers.3.weight", BLOCK)
    buffer = filled(pool, BLOCK, 0)
    with pytest.raises(UsageError, match=r"'layers\.3\.weight'.*nothing was written"):
        disk.read(extent, buffer)
    transfer = disk.write(extent, buffer)
    for start in (disk.read, disk.write):
        with pytest.raises(UsageError, match=r"'layers\.3\.weight'.*not waited for"):
            start(extent, buffer)
    transfer.wait()
    disk.read(extent, buffer).wait()


@pytest.mark.parametrize("tensor", [torch.empty(99), torch.empty(10, 20)[:, :10], torch.empty(100, device="meta")])
def test_a_tensor_that_does_not_fit_is_refused(disk, tensor):
    extent = disk.create("weight", 400)
    with pytest.raises(UsageError, match=r"'weight' takes a contiguous CPU tensor of 400 bytes"):
        disk.write(extent, tensor)


def test_aligned_pieces_go_past_the_page_cache(disk):
    assert fcntl.fcntl(disk._file.direct, fcntl.F_GETFL) & os.O_DIRECT
    assert not fcntl.fcntl(disk._file.plain, fcntl.F_GETFL) & os.O_DIRECT


def test_at_least_four_requests_are_in_flight(engine, tmp_path):
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    disk = Disk(tmp_path, settings=Aio(queue_depth=1))
    assert threads() == before + 4
    wide = Disk(tmp_path, settings=Aio(queue_depth=3, intra_op_parallelism=2))
    assert threads() == before + 4 + 6
    wide.close()
    disk.close()
    end = time.monotonic() + 2
    while threads() > before and time.monotonic() < end:
        time.sleep(0.01)  # a joined thread is still listed for a moment
    assert threads() == before


def test_space_is_reserved_and_given_back(disk):
    def blocks() -> int:
        return os.fstat(disk._file.plain).st_blocks * 512

    disk.preflight(2**20)
    assert blocks() < 2**20  # the trial is gone
    disk.create("weight", 10 * 2**20 + 1)
    assert 10 * 2**20 < blocks() < 11 * 2**20


def test_preflight_measures_and_says_so_in_one_line(disk, capsys):
    speed = disk.preflight(10**9)
    lines = capsys.readouterr().err.splitlines()
    assert speed > 1 and len(lines) == 1
    assert all(word in lines[0] for word in (disk.folder, "1.0 GB of", "free, direct", "MB/s", "s for that")), lines


def test_preflight_refuses_what_does_not_fit(disk):
    with pytest.raises(StorageError, match=r"nvme_path '.*' has .* GB free, .* needs 1,000,000,000.0 GB"):
        disk.preflight(10**18)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(StorageError, match="nvme_path '.*file'"):
        Disk(path, settings=SETTINGS)


def test_a_folder_is_made_and_a_closed_disk_refuses(engine, tmp_path):
    disk = Disk(tmp_path / "new" / "folder", settings=SETTINGS)
    extent = disk.create("weight", 10)
    disk.close()
    disk.close()
    with pytest.raises(UsageError, match="closed"):
        disk.write(extent, torch.zeros(10, dtype=torch.uint8))


def test_forgotten_transfers_keep_their_memory_and_end_with_the_disk(engine, tmp_path):
    disk, pool = Disk(tmp_path, settings=SETTINGS), BufferPool()
    for index in range(5):
        extent, _ = stored(disk, pool, 50 * BLOCK, f"tensor {index}")
        disk.read(extent, torch.empty(50 * BLOCK, dtype=torch.uint8))
        disk.write(disk.create(f"another {index}", 50 * BLOCK), torch.zeros(50 * BLOCK, dtype=torch.uint8))
        gc.collect()
    del disk
    gc.collect()  # the police counts the threads
