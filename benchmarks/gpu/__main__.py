"""See the package. The emulated device has to be there before torch is imported, so nothing here imports it."""

from __future__ import annotations

import sys

from benchmarks.gpu.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
