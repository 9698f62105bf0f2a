"""The interface of a tier: a place where the state of a group rests and from which it is borrowed for a step."""

from __future__ import annotations

from typing import Protocol

import torch


class Tier(Protocol):
    """A place for tensors. A step borrows what it needs and gives it back.

    The contract every tier keeps: `allocate` gives zeros; what was written between `borrow` and `give_back` is what
    the next `borrow` sees; a tensor is borrowed once at a time.
    """

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed 1-D tensor whose home is this tier."""
        ...

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of `tensor` where they can be computed on."""
        ...

    def give_back(self, tensor: torch.Tensor, borrowed: torch.Tensor) -> None:
        """Return what `borrow` gave, with its new values."""
        ...
