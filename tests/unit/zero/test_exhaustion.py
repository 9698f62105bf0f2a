"""What counts as running out of memory."""

from __future__ import annotations

import subprocess
import sys

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
