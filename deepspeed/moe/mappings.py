"""Tokens that the ranks of a tensor-parallel group have alike, shared out among them and joined again."""

from __future__ import annotations

import torch

from deepspeed.comm.collectives.autograd import gather_from, scatter_to
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError


def drop_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """This rank's even share of a tensor that all ranks along `tp` have; its gradient is joined.

    Raises:
        ArgumentError: the dim is no multiple of the ranks.
    """
    axis = current_mesh().axis("tp")
    if input_.shape[dim] % axis.size:
        raise ArgumentError(
            f"drop_tokens: dim {dim} of shape {tuple(input_.shape)} is no multiple of the {axis.size} ranks along tp"
        )
    return scatter_to(input_, axis, dim, label="gradients of shared-out tokens")


def gather_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The shares of all ranks along `tp`, joined along `dim`; the gradient of this rank's share is its own."""
    return gather_from(input_, current_mesh().axis("tp"), dim, label="shared-out tokens")
