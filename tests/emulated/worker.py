"""A persistent worker of the harness whose torch has the emulated device."""

from __future__ import annotations

from tests.emulated import device  # isort: skip  before torch
from tests.harness import worker


def join() -> None:
    """Watch the host, then meet the other ranks on the backends that a GPU machine would use."""
    import deepspeed

    device.watch_host()
    deepspeed.init_distributed(timeout=worker.TIMEOUT)


def main() -> None:
    """Serve until the pipe closes."""
    worker.main(join)


if __name__ == "__main__":
    main()
