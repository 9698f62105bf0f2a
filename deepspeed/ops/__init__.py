"""Optimizer kernels and other operators; every kernel also has a plain-torch form."""

from __future__ import annotations

from typing import Any

from deepspeed.ops import adagrad, adam, aio, lamb, lion, muon, op_builder
from deepspeed.ops.op_builder import ALL_OPS as __op_builders__
from deepspeed.ops.op_builder import compatible_ops

__all__ = ["__op_builders__", "adagrad", "adam", "aio", "lamb", "lion", "muon", "op_builder"]


def __getattr__(name: str) -> Any:
    if name == "__compatible_ops__":  # depends on the machine, so not evaluated at import
        return compatible_ops()
    raise AttributeError(f"module 'deepspeed.ops' has no attribute {name!r}")
