"""Methods of upstream's communication backend that programs call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.collectives.torch_api import all_gather, all_gather_into_tensor, reduce_scatter_tensor


class TorchBackend:
    """The collectives by what they do; process groups come from `init_distributed`."""

    @classmethod
    def get_all_gather_function(cls) -> Any:
        """The all-gather into one tensor."""
        return all_gather_into_tensor

    @classmethod
    def get_reduce_scatter_function(cls) -> Any:
        """The reduce-scatter of one tensor."""
        return reduce_scatter_tensor


def all_gather_dp_groups(
    groups_flat: Sequence[torch.Tensor] | None,
    partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """Fill the shards of all ranks in each parameter group from the ranks that own them, in place.

    Args:
        groups_flat: flat buffers that the shards are views of; None where there are none. They are not looked at.
        partitioned_param_groups: for each group the shards by rank: 1-D, equal sizes; the rank's own one is sent.
        dp_process_group: for each group its process group; None for all ranks.
        start_alignment_factor: accepted, without effect: shards are sent as they lie.
        allgather_bucket_size: largest number of elements that one message fills over all ranks.
    """
    for shards, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        length = max(1, allgather_bucket_size // size)
        for start in range(0, shards[rank].numel() if size > 1 else 0, length):
            pieces = [shard.detach().view(-1)[start : start + length] for shard in shards]
            all_gather(pieces, pieces[rank].clone(), group=group)
