"""The loss of each token of a split sequence, on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from deepspeed.comm.collectives.autograd import gather_to
from deepspeed.comm.process_groups.axis import group_axis


def vocab_sequence_parallel_cross_entropy(logits: torch.Tensor, target: torch.Tensor, sp_group: Any) -> torch.Tensor:
    """Cross entropy of every token of the sequence, the same on all ranks of `sp_group`; backward sums their gradients.

    Args:
        logits: `[sequence / ranks, batch, vocabulary]`, of this rank's tokens.
        target: `[sequence / ranks, batch]`, int64; -100 counts nothing.
        sp_group: process group of the ranks that share the sequence.

    Returns:
        `[sequence, batch]`, fp32; its mean is a loss as `engine.backward` takes it.
    """
    own = F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), reduction="none").view(target.shape)
    return gather_to(own, group_axis("sp", sp_group), dim=0, label="losses of the tokens of a sequence")
