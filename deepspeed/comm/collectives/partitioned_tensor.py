"""A tensor that is split over the ranks of a group and can be gathered."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from deepspeed.comm.collectives.torch_api import all_gather_into_tensor
from deepspeed.comm.process_groups.process_group import get_rank, get_world_size
from deepspeed.errors import ArgumentError
from deepspeed.foundation.partition import partition_uniform


class PartitionedTensor:
    """Part of a tensor that is split over the ranks of a group. Parts are contiguous ranges of the flattened tensor.

    Args:
        tensor: the whole tensor, equal on all ranks.
        group: process group over which the tensor is split; None: all ranks.
    """

    def __init__(self, tensor: torch.Tensor, group: Any = None) -> None:
        self.group, self.orig_size, self.orig_device = group, list(tensor.shape), tensor.device
        self.num_parts, self.rank = get_world_size(group), get_rank(group)
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        low, high = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[low:high].clone()

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: torch.device | None = None
    ) -> PartitionedTensor:
        """Rebuild an instance from `to_meta` and `data`, for example after both were sent to another rank.

        Args:
            meta: result of `to_meta`.
            local_part: 1-D, the part of this rank.
            group: process group over which the tensor is now split; it has as many ranks as the original group.
            device: device for the result of `full`; None: the device of the part.

        Raises:
            ArgumentError: the size of the part or of the group differs from `meta`.
        """
        numbers = meta.tolist()
        dims = numbers[0]
        part = object.__new__(cls)
        part.group, part.orig_size = group, numbers[1 : 1 + dims]
        part.orig_device = local_part.device if device is None else device
        part.num_parts, part.rank = numbers[1 + dims], get_rank(group)
        part.partition, part.local_data = numbers[3 + dims :], local_part
        low, high = part.partition[part.rank : part.rank + 2]
        if part.num_parts != get_world_size(group) or local_part.numel() != high - low:
            raise ArgumentError(
                f"a part of {local_part.numel()} elements for rank {part.rank} of {get_world_size(group)}: the meta is "
                f"of {part.num_parts} parts, that one of {high - low} elements"
            )
        return part

    def to_meta(self) -> torch.Tensor:
        """Return the metadata for `from_meta`: int64, [dims, *shape, parts, rank, *bounds of the parts]."""
        return torch.tensor([len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition])

    def data(self) -> torch.Tensor:
        """Return this rank's part, 1-D."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of the part."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size

    def full(self, device: torch.device | None = None) -> torch.Tensor:
        """Return the whole tensor, gathered from all ranks of the group, which must all call this.

        device: device of the result; None: the device of the original tensor, or that of `from_meta`.
        """
        widest = max(high - low for low, high in pairwise(self.partition))
        part = self.local_data.new_zeros(widest)
        part[: self.local_data.numel()] = self.local_data
        parts = part.new_empty(self.num_parts, widest)
        all_gather_into_tensor(parts.view(-1), part, group=self.group)
        runs = [parts[i, : high - low] for i, (low, high) in enumerate(pairwise(self.partition))]
        return torch.cat(runs).view(self.orig_size).to(self.orig_device if device is None else device)
