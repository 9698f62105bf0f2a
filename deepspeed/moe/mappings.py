"""Split replicated tokens among the ranks of a tensor-parallel group, and gather them again."""

from __future__ import annotations

import torch

from deepspeed.comm.collectives.autograd import gather_from, scatter_to
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import ArgumentError


def drop_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return this rank's slice, in `dim`, of a tensor replicated along `tp`; backward, a collective, all-gathers.

    Raises:
        ArgumentError: the size of `dim` is not a multiple of the number of ranks.
    """
    axis = current_mesh().axis("tp")
    if input_.shape[dim] % axis.size:
        raise ArgumentError(
            f"drop_tokens: dim {dim} of shape {tuple(input_.shape)} is no multiple of the {axis.size} ranks along tp"
        )
    return scatter_to(input_, axis, dim, label="gradients of shared-out tokens")


def gather_tokens(input_: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """All-gather (a collective) the slices of the ranks along `tp` in `dim`; backward returns this rank's slice."""
    return gather_from(input_, current_mesh().axis("tp"), dim, label="shared-out tokens")
