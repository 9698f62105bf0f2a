"""The accelerators of this machine as the ranks will see them, found without importing torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Names of the devices that a CUDA program would see, in its order; empty on a machine without accelerator.

    `CUDA_VISIBLE_DEVICES` is taken as given, indices, UUIDs and MIG names alike; as in CUDA, an invalid index
    hides itself and all that follow. `DS_ACCELERATOR=cpu` hides every device.
    """
    count = 0 if environment.get("DS_ACCELERATOR") == "cpu" else _installed()
    if count == 0 or VISIBLE not in environment:
        return [str(index) for index in range(count)]
    names: list[str] = []
    for name in (entry.strip() for entry in environment[VISIBLE].split(",")):
        is_index = name.lstrip("-").isdigit()
        if not name or (is_index and not 0 <= int(name) < count):
            break
        names.append(name)
    return names


def _installed() -> int:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
