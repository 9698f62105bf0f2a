"""What the end of a rank means: the container's own numbers, the disk, the device, a lost peer."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from deepspeed.launcher.exit_codes import LOST_ANOTHER, CgroupMemory, machine_memory, meaning

MIB = 1 << 20


def version_1(root: Path, limit: int, kills: int) -> CgroupMemory:
    """A group of cgroup version 1 within one without a limit."""
    own = root / "memory/docker/abc"
    own.mkdir(parents=True)
    for folder, allowed in ((own, limit), (own.parent, 1 << 62), (own.parent.parent, 1 << 62)):
        (folder / "memory.limit_in_bytes").write_text(f"{allowed}\n")
        (folder / "memory.max_usage_in_bytes").write_text(f"{150 * MIB}\n")
    (own / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
    (root / "groups").write_text("5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/unused\n")
    return CgroupMemory(root, root / "groups")


def version_2(root: Path, limit: int, kills: int) -> CgroupMemory:
    """A pod's group that has no limit of its own; the limit is that of the group around it."""
    own = root / "pod/main"
    own.mkdir(parents=True)
    for folder, allowed in ((own, "max"), (own.parent, str(limit))):
        (folder / "memory.max").write_text(f"{allowed}\n")
        (folder / "memory.peak").write_text(f"{150 * MIB}\n")
        (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills}\n")
    (root / "groups").write_text("0::/pod/main\n")
    return CgroupMemory(root, root / "groups")


def test_of_a_container_without_its_path(tmp_path: Path):
    """Inside a container the listing may name a path that is not mounted there: the mount itself is the group."""
    (tmp_path / "memory.max").write_text(f"{200 * MIB}\n")
    (tmp_path / "groups").write_text("0::/system.slice/elsewhere\n")
    assert CgroupMemory(tmp_path, tmp_path / "groups").limit() == 200 * MIB


@pytest.mark.parametrize("version", [version_1, version_2])
def test_the_out_of_memory_killer_of_a_container(tmp_path: Path, version):
    memory = version(tmp_path, 200 * MIB, kills=3)
    assert (memory.limit(), memory.peak(), memory.kills()) == (200 * MIB, 150 * MIB, 3)
    text = meaning(-signal.SIGKILL, 190 * MIB, "", memory, kills_before=2)
    assert text == (
        "ended by SIGKILL (signal 9): by the kernel's out-of-memory killer; "
        "its peak memory was 0.19 of the container's 0.20 GiB (all of the container: 0.15)"
    )
    by_hand = meaning(-signal.SIGKILL, 190 * MIB, "", memory, kills_before=3)
    assert "by the out-of-memory killer of the machine or container, or by hand" in by_hand


def test_without_a_container_the_machine_counts(tmp_path: Path):
    memory = CgroupMemory(tmp_path, tmp_path / "absent")
    assert memory.limit() == memory.peak() == 0
    text = meaning(-signal.SIGKILL, 1 << 30, "", memory, memory.kills())
    assert f"1.00 of the machine's {machine_memory() / 2**30:.2f} GiB" in text


@pytest.mark.parametrize(
    ("code", "words", "says"),
    [
        (1, "OSError: [Errno 28] No space left on device: '/dev/shm/x'", "exit code 1: a disk is full: /dev/shm has "),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "the memory of the device is used up"),
        (1, "MemoryError", "memory is used up; its peak memory was"),
        (1, "RuntimeError: Connection closed by peer [10.0.0.2]:4711", LOST_ANOTHER),
        (1, "CommError: 'barrier' failed: connection closed: process 7 of another rank has ended", LOST_ANOTHER),
        (1, "ValueError: boom", "exit code 1"),
        (85, "", "exit code 85: saved on request, to be started again"),
        (127, "", "exit code 127: the program was not found"),
        (
            -signal.SIGBUS,
            "",
            "ended by SIGBUS (signal 7): usually /dev/shm or another memory-mapped file system is full",
        ),
        (-signal.SIGSEGV, "", "a native library touched memory that is not its own"),
    ],
)
def test_what_an_end_means(tmp_path: Path, code, words, says):
    assert says in meaning(code, MIB, words, CgroupMemory(tmp_path, tmp_path / "absent"), 0)
