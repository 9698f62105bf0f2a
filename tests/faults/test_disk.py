"""Faults of the disk under offloaded state: full, cut, removed, short writes, killed ranks."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.config.sections.memory import Aio
from deepspeed.errors import StorageError
from deepspeed.native import library
from deepspeed.ops.aio import queue
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.tensor_file import Disk, Extent
from tests.harness.fresh import end_of
from tests.harness.pool import WORKER_IMPORTS
from tests.unit.comm.ranks import Ended, run_ranks

MB = 2**20
SETTINGS = Aio(block_size=256 * 1024)
ROOT = Path(__file__).parents[2]


def slow(*values: str) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture(params=["threads", *(["native"] if library() else [])])
def disk(request, tmp_path, monkeypatch) -> Iterator[Disk]:
    """A disk on each kind of queue, of which nothing is left."""
    if request.param == "threads":
        monkeypatch.setattr(queue, "library", lambda: None)
    made = Disk(tmp_path / "nvme", settings=SETTINGS)
    yield made
    made.close()
    assert not (tmp_path / "nvme").exists() or os.listdir(tmp_path / "nvme") == []


def stored(disk: Disk, label: str, seed: int, nbytes: int = 3 * MB + 100) -> tuple[Extent, torch.Tensor]:
    """An extent with data in it, and the data."""
    values = BufferPool().take(nbytes).random_(generator=torch.Generator().manual_seed(seed))
    extent = disk.create(label, nbytes)
    disk.write(extent, values).wait()
    return extent, values


def read(disk: Disk, extent: Extent) -> torch.Tensor:
    into = BufferPool().take(extent.nbytes)
    disk.read(extent, into).wait()
    return into


@contextmanager
def longest_file(nbytes: int) -> Iterator[None]:
    """The system cuts writes of this process short at `nbytes` of any file, then refuses them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("into_block", [0, 4096, 1000], ids=["at a block", "at a page", "at an odd byte"])
def test_a_short_write_names_the_tensor_and_leaves_no_data(disk, into_block):
    first, kept = stored(disk, "layers.0.weight, exp_avg", 0)
    second, values = stored(disk, "layers.1.weight, exp_avg", 1)
    with longest_file(second.offset + MB + into_block):
        transfer = disk.write(second, values.fill_(7))
        with pytest.raises(StorageError) as failure:
            transfer.wait()
        told = str(failure.value)
        for word in ("writing 'layers.1.weight, exp_avg'", disk.folder, "File too large", "GB free"):
            assert word in told, told
    with pytest.raises(StorageError, match=r"'layers\.1\.weight, exp_avg'.*last write of it failed"):
        disk.read(second, values)
    assert torch.equal(read(disk, first), kept)
    disk.write(second, values).wait()
    assert torch.equal(read(disk, second), values)


def test_a_file_cut_between_steps_is_found_by_whatever_comes_next(disk):
    first, values = stored(disk, "layers.0.weight", 0)
    second, _ = stored(disk, "layers.1.weight", 1)
    os.truncate(f"/proc/self/fd/{disk._file.plain}", second.offset + MB)
    # A write would grow the file again, with zeros in the gap.
    for start, verb, extent in ((disk.write, "writing", first), (disk.read, "reading", second)):
        with pytest.raises(StorageError) as failure:
            start(extent, values)
        for word in (f"{verb} '{extent.label}'", disk.folder, "truncated the file to", "GB free"):
            assert word in str(failure.value), failure.value
    with pytest.raises(StorageError, match=r"making room for 'layers\.2\.weight'.*truncated the file"):
        disk.create("layers.2.weight", 100)


def test_a_file_cut_under_a_read_is_found(disk):
    extent, _ = stored(disk, "layers.0.weight", 0, 64 * MB)
    transfer = disk.read(extent, BufferPool().take(extent.nbytes))
    os.truncate(f"/proc/self/fd/{disk._file.plain}", 0)
    with pytest.raises(StorageError, match=r"reading 'layers\.0\.weight'.*stopped after \d+ bytes"):
        transfer.wait()


def test_a_removed_folder_does_not_touch_the_run(disk):
    extent, values = stored(disk, "layers.0.weight", 0)
    shutil.rmtree(disk.folder)
    assert torch.equal(read(disk, extent), values)
    later, more = stored(disk, "layers.1.weight", 1)
    assert torch.equal(read(disk, later), more)


def script(text: str) -> str:
    """A program that has `disk`, `stored` and `read` in `sys.argv[1]`."""
    start = f"""
        import os, signal, sys, time
        sys.path.insert(0, {str(ROOT)!r})
        from tests.faults.test_disk import *
        disk = Disk(sys.argv[1], settings=SETTINGS)
    """
    return textwrap.dedent(start) + textwrap.dedent(text)


def killed(folder: Path) -> None:
    text = """
        extent, values = stored(disk, "layers.0.weight", 0, 64 * MB)
        print("ready", flush=True)
        while True:
            disk.write(extent, values).wait()
    """
    process = subprocess.Popen([sys.executable, "-c", script(text), str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()


def test_a_killed_rank_leaves_nothing_and_the_next_run_starts_clean(tmp_path):
    before = shutil.disk_usage(tmp_path).free
    killed(tmp_path)
    assert os.listdir(tmp_path) == []
    assert shutil.disk_usage(tmp_path).free > before - 32 * MB
    disk = Disk(tmp_path, settings=SETTINGS)
    extent, values = stored(disk, "layers.0.weight", 0)
    assert torch.equal(read(disk, extent), values)
    disk.close()


@pytest.mark.parametrize("end", ["raise ValueError", "os.abort()", *slow("pass", "disk.close()")])
def test_however_a_run_ends_nothing_is_left(tmp_path, end):
    text = f"""
        extent, values = stored(disk, "layers.0.weight", 0)
        forgotten = disk.write(extent, values)
        {end}
    """
    code, words = end_of(script(text), str(tmp_path))
    assert os.listdir(tmp_path) == [], words
    assert (code == 0) == (end in ("pass", "disk.close()")), words


FULL = """
    import subprocess, shutil
    def fill():
        with open(os.path.join(disk.folder, "other"), "wb", buffering=0) as other:
            try:
                while other.write(bytes(4096)):
                    pass
            except OSError:
                pass
    def told(call):
        try:
            call()
        except StorageError as error:
            print(error)
        else:
            print("no error")

    told(lambda: disk.preflight(9 * MB))
    extent, values = stored(disk, "layers.0.weight", 0, 4 * MB)
    told(lambda: disk.preflight(7 * MB))  # 4 are reserved, 4 are free
    told(lambda: disk.create("layers.1.weight", 5 * MB))
    fill()
    told(lambda: disk.create("layers.2.weight", MB))
    disk.write(extent, values.fill_(9)).wait()  # its space was reserved
    print(torch.equal(read(disk, extent), values))

    # a file system that takes the reservation back, as copy-on-write ones may
    subprocess.run(["fallocate", "-p", "-o", str(MB), "-l", str(2 * MB), f"/proc/{os.getpid()}/fd/{disk._file.plain}"],
                   check=True)
    fill()
    told(lambda: disk.write(extent, values).wait())
    told(lambda: disk.read(extent, values))
"""


@pytest.mark.parametrize("native", ["1", *slow("0")])
def test_a_full_disk(tmp_path, native):
    mount = [
        "unshare",
        "--map-root-user",
        "--mount",
        "sh",
        "-c",
        'mount -t tmpfs -o size=8m tmpfs "$1" && shift && "$@"',
    ]
    command = [*mount, "sh", str(tmp_path), sys.executable, "-c", script(FULL), str(tmp_path)]
    if subprocess.run([*mount, "sh", str(tmp_path), "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a small file system")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"DS_NATIVE": native}, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    expected = [
        ("8.4 MB free", "needs 9.4 MB"),
        ("no error",),
        ("making room for 'layers.1.weight'", "No space left on device", "4.2 MB free", str(tmp_path)),
        ("making room for 'layers.2.weight'", "No space left on device", "has 0 bytes free"),
        ("True",),
        ("writing 'layers.0.weight'", "No space left on device", "has 0 bytes free", str(tmp_path)),
        ("reading 'layers.0.weight'", "last write of it failed"),
    ]
    for line, words in zip(lines, expected, strict=True):
        assert all(word in line for word in words), line
    assert os.listdir(tmp_path) == []


# -- a training run over it -------------------------------------------------------------------------------------------

TRAIN = """
from torch import nn
import deepspeed
rank, folder = int(os.environ["RANK"]), os.environ["NVME"]
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)])
nvme = {"device": "nvme", "nvme_path": folder}
zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": nvme, "offload_param": nvme}
zero["offload_param"] = {**nvme, "max_in_cpu": 0}
config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

def train(steps):
    for step in range(steps):
        loss = engine(torch.full((2, 64), 0.1)).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()

def files():
    links = {f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd")}
    return [link for link in links if os.path.islink(link) and os.readlink(link).startswith(folder)]

train(2)
assert files() and os.listdir(folder) == []
"""

FAULTS = {
    "cut": "for file in files(): os.truncate(file, 4096)",
    "short": """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(os.stat(file).st_size for file in files()) // 2, -1))
    """,
    "removed": "os.rmdir(folder)",
    "none": "",
}


def trained(folder: Path, fault: str) -> Ended:
    """One rank that trains two steps, meets a fault and trains two more."""
    snippet = TRAIN + textwrap.dedent(FAULTS[fault]) + "\nprint(train(2))"
    (end,) = run_ranks(snippet, limit=120, imported=WORKER_IMPORTS, NVME=str(folder))
    assert not folder.exists() or os.listdir(folder) == []
    return end


@pytest.mark.parametrize(
    ("fault", "word"),
    [("cut", "truncated the file to "), pytest.param("short", "File too large", marks=pytest.mark.slow)],
)
def test_a_fault_between_steps_ends_the_run_by_name(tmp_path, fault, word):
    end = trained(tmp_path, fault)
    last = end.err.strip().splitlines()[-1]
    assert end.code == 1 and "StorageError" in last, end.err
    assert word in last and str(tmp_path) in last and ".weight" in last, last


@pytest.mark.slow
def test_a_folder_removed_between_steps_changes_nothing(tmp_path):
    removed, whole = trained(tmp_path / "a", "removed"), trained(tmp_path / "b", "none")
    assert removed.code == whole.code == 0, removed.err
    assert removed.out == whole.out


@pytest.mark.slow
def test_a_killed_rank_leaves_no_file_of_any_rank(tmp_path):
    snippet = TRAIN + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntrain(2)"
    first, second = run_ranks(snippet, 2, limit=120, NVME=str(tmp_path), DEEPSPEED_TIMEOUT=str(3 / 60))
    assert second.code == -signal.SIGKILL and first.code not in (0, -signal.SIGKILL), first.err
    assert os.listdir(tmp_path) == []
