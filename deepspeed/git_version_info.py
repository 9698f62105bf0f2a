"""Version of the package, under the name of DeepSpeed's module. Commit and branch are None."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.version import __version__ as version

git_hash = git_branch = None
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": torch.version.hip or "0.0",
    "nccl_version": "0.0",
    "bf16_support": True,
}

__all__ = ["git_branch", "git_hash", "torch_info", "version"]


def __getattr__(name: str) -> Any:
    if name in ("compatible_ops", "installed_ops"):  # nothing is built ahead, so what can be loaded is installed
        from deepspeed.ops.op_builder import compatible_ops

        return compatible_ops()
    if name == "accelerator_name":
        from deepspeed.accelerator import get_accelerator

        return get_accelerator().device_name()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
