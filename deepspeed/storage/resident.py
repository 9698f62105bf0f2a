"""The tier of tensors that stay on the device: borrowing is the identity."""

from __future__ import annotations

import torch


class ResidentTier:
    """Tensors rest where they are computed on."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A zeroed 1-D tensor on `device`."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def give_back(self, tensor: torch.Tensor, borrowed: torch.Tensor) -> None:
        """Nothing to do: it never left."""
