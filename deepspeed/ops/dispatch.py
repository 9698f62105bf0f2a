"""Dispatch mode without torch's compiler: intercepts every operator that runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Base class of dispatch modes; unlike a plain `TorchDispatchMode`, it does not import torch's compiler (slow).

    Inside the mode, torch's encoder layers do not use their fused operator, which would hide its matrix products.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fast_paths: list[bool] = []  # previous values, one per nested entry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Any:
        self._fast_paths.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.backends.mha.set_fastpath_enabled(self._fast_paths.pop())
