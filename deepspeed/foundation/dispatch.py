"""A look at every operator that runs, without torch's compiler."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """torch's own wraps `__torch_dispatch__` for its compiler, whose import takes seconds; nothing is compiled here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
