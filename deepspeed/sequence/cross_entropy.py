"""Per-token loss of a split sequence, gathered on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from deepspeed.comm.collectives.autograd import gather_to
from deepspeed.comm.process_groups.axis import group_axis


def vocab_sequence_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor, sp_group: Any) -> torch.Tensor:
    """Compute the cross entropy of every token, equal on all ranks of `sp_group`; backward sums the ranks' gradients.

    Args:
        logits: `[sequence / ranks, batch, vocabulary]`, for this rank's tokens.
        target: `[sequence / ranks, batch]`, int64; tokens with -100 are ignored.
        sp_group: process group of the ranks that share the sequence; all must call this together.

    Returns:
        `[sequence, batch]`, fp32; its mean is a valid loss for `engine.backward`.
    """
    own = F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    return gather_to(own, group_axis("sp", sp_group), dim=0, label="losses of the tokens of a sequence")
