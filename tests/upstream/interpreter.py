"""The interpreter of an environment of its own in which upstream is installed, named by `UPSTREAM_PYTHON`."""

from __future__ import annotations

import os
import subprocess

import pytest

NEEDS_UPSTREAM = pytest.mark.skipif(
    "UPSTREAM_PYTHON" not in os.environ, reason="UPSTREAM_PYTHON names no interpreter with upstream"
)


def run_upstream(*command: str) -> None:
    """Run its interpreter; ours is not on its path.

    Raises:
        AssertionError: It ended with an error; the message has the end of what it said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["DS_ACCELERATOR"] = "cpu"
    command = (os.environ["UPSTREAM_PYTHON"], *command)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
