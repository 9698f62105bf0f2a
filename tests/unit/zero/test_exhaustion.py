"""What counts as running out of memory."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from deepspeed.errors import MemoryExhaustedError
from deepspeed.zero import out_of_memory
from deepspeed.zero.out_of_memory import behind, exhausted

_THREADS = """
import resource, threading, time
import psutil
from deepspeed.zero.out_of_memory import is_exhaustion
room = psutil.Process().memory_info().vms + (256 << 20)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
end, said = threading.Event(), None
try:
    while True:
        threading.Thread(target=end.wait, daemon=True).start()
except RuntimeError as error:
    said = error
resource.setrlimit(resource.RLIMIT_AS, before)
end.set()
print(said, is_exhaustion(said), is_exhaustion(RuntimeError("another")))
"""


def test_a_thread_without_room_for_its_stack_is_a_lack_of_memory() -> None:
    ran = subprocess.run([sys.executable, "-c", _THREADS], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split()[-2:] == ["True", "False"], (ran.stdout, ran.stderr)


def test_a_clean_up_without_memory_does_not_hide_the_first_error() -> None:
    first = MemoryExhaustedError("memory ran out")
    for later in (MemoryError(), OSError(errno.ENOMEM, "no"), RuntimeError("out of memory")):
        with behind(first):
            raise later
        with pytest.raises(type(later)), behind(None):
            raise later
    with pytest.raises(OSError, match="denied"), behind(first):
        raise PermissionError(errno.EACCES, "denied")


def test_pieces_of_no_memory_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        reserved = 0

        def device_name(self) -> str:
            return "cuda"

        def memory_reserved(self) -> int:
            return self.reserved

        def memory_allocated(self) -> int:
            return 0

    monkeypatch.setattr(out_of_memory, "get_accelerator", Device)
    assert "pieces" not in str(exhausted("training", MemoryError("no")))
    monkeypatch.setattr(Device, "reserved", 2**30)
    assert "Of 1.00 GiB" in str(exhausted("training", MemoryError("no")))
