"""What the tests of this folder need: Triton, which lies in an environment of its own (`make kernels`)."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest


def need_triton() -> None:
    """Skip the calling module by name without Triton; before Triton is imported, make it interpret its kernels."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton lies in an environment of its own: `make kernels`", allow_module_level=True)
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton is imported already, and not for the interpreter; set TRITON_INTERPRET=1")
    os.environ["TRITON_INTERPRET"] = "1"
