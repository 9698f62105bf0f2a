"""Rejects imports of modules whose feature this version does not have."""

from __future__ import annotations

import sys

from deepspeed.errors import NotAvailableError

# module: the feature it belongs to. One that is there is found before anybody asks here.
LATER_MODULES = {
    "deepspeed.linear": "low-rank linear layers",
    "deepspeed.model_implementations": "the inference engine",
    "deepspeed.moe": "mixture of experts",
    "deepspeed.ops.sparse_attention": "block-sparse attention layouts",
    "deepspeed.ops.transformer": "the inference engine",
    "deepspeed.runtime.data_pipeline": "data efficiency",
    "deepspeed.runtime.fp16.onebit": "optimizers with one-bit communication",
    "deepspeed.runtime.hybrid_engine": "the hybrid engine",
    "deepspeed.runtime.pipe.schedule": "schedules as classes; schedules are data, see deepspeed.pipe.schedule",
    "deepspeed.runtime.tensor_parallel": "tensor parallelism",
}


class Later:
    """The last of Python's finders: modules of features that are not there say so when they are imported."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        """Raise NotAvailableError, which is an ImportError, for a module of `LATER_MODULES`."""
        if fullname in LATER_MODULES:
            error = NotAvailableError(f"{fullname} is not available yet: it belongs to {LATER_MODULES[fullname]}")
            error.name = fullname
            raise error


def install() -> None:
    """Have Python ask `Later` when nobody else knows a module."""
    if Later not in sys.meta_path:
        sys.meta_path.append(Later)  # pyright: ignore[reportArgumentType]
