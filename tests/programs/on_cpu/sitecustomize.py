"""Put on PYTHONPATH before a program that expects GPUs: what asks for CUDA finds CPU ranks over gloo.

Nothing of the program, of its clients or of DeepSpeed is edited. Accelerate counts one rank when no device gives a
backend its name, so gloo is named for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _accelerate_names_gloo(module: ModuleType) -> None:
    before = module.PartialState.__init__

    @functools.wraps(before)
    def on_gloo(self: Any, cpu: bool = False, **keywords: Any) -> None:
        if not cpu and "LOCAL_RANK" in os.environ and keywords.get("backend") is None:
            keywords["backend"] = "gloo"
        before(self, cpu, **keywords)

    module.PartialState.__init__ = on_gloo


def _declare_what_torchvision_has_for_cuda(_: ModuleType) -> None:
    """The index's torchvision is built for CUDA and finds no operators here; it asks for two on import."""
    import torch

    if hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _leave_out_torchaudios_operators(module: ModuleType) -> None:
    """The index's torchaudio is built for CUDA too; its package works without its operators."""
    vars(module)["_load_lib"] = lambda _: False


_kept: list[Any] = []  # a library's operators live as long as it does
AFTER: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.state": _accelerate_names_gloo,
    "torchaudio._extension.utils": _leave_out_torchaudios_operators,
    "torchvision.extension": _declare_what_torchvision_has_for_cuda,
}


class _After(importlib.abc.MetaPathFinder):
    """Calls what `AFTER` has for a module when the module has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in AFTER:
            return None
        change = AFTER.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        before = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            before(module)
            change(module)

        spec.loader.exec_module = run
        return spec


sys.meta_path.insert(0, _After())
