"""The public aio handle, and the command that measures a disk."""

from __future__ import annotations

import os

import pytest
import torch

from deepspeed.errors import ArgumentError, StorageError
from deepspeed.foundation import log
from deepspeed.ops.aio import AsyncIOBuilder, bench


@pytest.fixture
def handle(engine):
    made = AsyncIOBuilder().load().aio_handle(block_size=64 * 1024, queue_depth=4)
    yield made
    made._stop()  # what its collection does


def test_the_old_address_is_the_same_class():
    from deepspeed.ops.op_builder import AsyncIOBuilder as old

    assert old is AsyncIOBuilder and old().is_compatible()


def test_options_are_told():
    made = AsyncIOBuilder().load().aio_handle(4096, 2, True, True, 3)
    told = (made.get_block_size(), made.get_queue_depth(), made.get_single_submit(), made.get_overlap_events())
    assert (*told, made.get_intra_op_parallelism()) == (4096, 2, True, True, 3)


def test_a_handle_without_requests_is_refused():
    with pytest.raises(ArgumentError, match="queue_depth=0"):
        AsyncIOBuilder().load().aio_handle(queue_depth=0)


@pytest.mark.drawn(8)
@pytest.mark.parametrize("numel", [1, 1000, 1024, 100_003])
@pytest.mark.parametrize("locked", [True, False])
def test_every_way_to_write_and_read(handle, tmp_path, numel, locked):
    path = str(tmp_path / "tensor")
    example = torch.empty(0, dtype=torch.float64)
    new = handle.new_cpu_locked_tensor if locked else lambda count, like: torch.empty(count, dtype=like.dtype)
    source = new(numel, example).copy_(torch.randn(numel))
    ways = [
        (lambda: handle.write(source, path), lambda into: handle.read(into, path)),
        (lambda: handle.sync_pwrite(source, path), lambda into: handle.sync_pread(into, path)),
        (lambda: handle.pwrite(source, path, True, False), lambda into: handle.pread(into, path, True, False)),
    ]
    for write, read in ways:
        into = new(numel, example).zero_()
        assert write() == 1 and read(into) == 1
        assert torch.equal(into, source)
        assert os.path.getsize(path) == source.nbytes
        os.unlink(path)
    assert handle.async_pwrite(source, path) == 0
    assert handle.pwrite(source, path + "2", False, True) == 0
    assert handle.wait() == 2 and handle.wait() == 0
    first, second = new(numel, example).zero_(), new(numel, example).zero_()
    handle.async_pread(first, path)
    handle.async_pread(second, path + "2")
    assert handle.wait() == 2
    assert torch.equal(first, source) and torch.equal(second, source)


def test_offsets_leave_the_rest_of_the_file_alone(handle, tmp_path):
    path = tmp_path / "tensor"
    path.write_bytes(bytes(range(200)) * 100)
    for offset, count in ((4096, 8192), (4096, 5000), (100, 33)):
        content = bytearray(path.read_bytes())
        part = handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=torch.uint8)).fill_(offset % 251)
        handle.sync_pwrite(part, str(path), offset)
        content[offset : offset + count] = bytes([offset % 251]) * count
        assert path.read_bytes() == bytes(content)
        back = torch.empty(count, dtype=torch.uint8)
        handle.sync_pread(back, str(path), offset)
        assert torch.equal(back, part)


def test_a_file_that_is_too_short_or_missing_is_named(handle, tmp_path):
    path = tmp_path / "short"
    path.write_bytes(b"x" * 5000)
    into = handle.new_cpu_locked_tensor(3000, torch.empty(0))
    with pytest.raises(StorageError, match=r"reading 12000 bytes at 0 of '.*short' stopped after 5000 bytes: .* free"):
        handle.sync_pread(into, str(path))
    with pytest.raises(StorageError, match=r"reading '.*none'.*No such file"):
        handle.sync_pread(into, str(tmp_path / "none"))
    with pytest.raises(ArgumentError, match="contiguous"):
        handle.sync_pread(torch.empty(4, 4).t(), str(path))


def test_wait_tells_the_first_failure_and_ends_the_others(handle, tmp_path):
    source = torch.arange(5000)
    short, good = tmp_path / "short", tmp_path / "good"
    short.write_bytes(b"")
    handle.async_pread(torch.empty(10), str(short))
    handle.async_pwrite(source, str(good))
    with pytest.raises(StorageError, match="short"):
        handle.wait()
    assert good.read_bytes() == source.numpy().tobytes() and handle.wait() == 0


def test_a_freed_tensor_lets_go_of_its_memory(handle):
    tensor = handle.new_cpu_locked_tensor(1000, torch.empty(0))
    assert handle.free_cpu_locked_tensor(tensor) and tensor.numel() == 0


def test_files_without_direct_io_are_served_through_the_cache(handle, monkeypatch, capsys):
    monkeypatch.setattr(log, "_said", set())
    into = handle.new_cpu_locked_tensor(4096, torch.empty(0, dtype=torch.uint8))[:10]
    for _ in range(2):
        handle.sync_pread(into, "/proc/self/cmdline")  # procfs has no direct I/O
    with open("/proc/self/cmdline", "rb") as file:
        assert bytes(into.numpy()) == file.read(10)
    assert capsys.readouterr().err.count("no direct I/O in '/proc/self'") == 1


def test_the_command_prints_the_curve_and_a_suggestion(engine, tmp_path, capsys):
    bench.main(["--folder", str(tmp_path), "--io_size", "1M", "--block_size", "64K", "128K", "--queue_depth", "4", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:-1]] == [
        ["65536", "4"],
        ["65536", "8"],
        ["131072", "4"],
        ["131072", "8"],
    ]
    assert all(float(number.replace(",", "")) > 0 for line in lines[1:-1] for number in line.split()[2:])
    assert lines[-1].startswith('suggested: {"aio": {"block_size": ')
    assert os.listdir(tmp_path) == []


def test_the_command_ends_by_name_where_it_cannot_write(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--folder", str(tmp_path / "none"), "--io_size", "1M"])
    assert ended.value.code == 1 and "No such file" in capsys.readouterr().err


def test_the_suggestion_is_the_smallest_of_the_fastest():
    curve = {(4096, 4): (1e9, 1e9), (4096, 32): (2e9, 2e9), (8192, 8): (1.98e9, 1.98e9), (2**20, 8): (2e9, 2e9)}
    assert bench.suggestion(curve) == {"block_size": 8192, "queue_depth": 8}
