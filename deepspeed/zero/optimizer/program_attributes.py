"""Attributes that programs read of `engine.optimizer`, of the reference's optimizers of stages 1 to 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import get_own_group
from deepspeed.errors import NotAvailableError
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.optimizer.update import publish
from deepspeed.zero.parameters.parameter import is_managed

if TYPE_CHECKING:
    from deepspeed.zero.parameters.shard_group import ShardGroup


class ProgramAttributes:
    """What programs read, from the groups of the optimizer.

    Attributes:
        nccl_start_alignment_factor: shards start at multiples of as many elements in the reference; here anywhere.
    """

    reducer: Reducer
    groups: Sequence[ShardGroup]
    bit16_groups: list[list[Parameter]]
    scaler: Any
    nccl_start_alignment_factor = 1

    @property
    def dp_process_group(self) -> Any:
        """The process group of the ranks with the same slice of the model, over which gradients are averaged."""
        group = self.reducer.axes.dp_sp_group.group
        return get_own_group() if group is None else group

    @property
    def real_dp_process_group(self) -> list[Any]:
        """`dp_process_group` for each group of the optimizer."""
        return [self.dp_process_group for _ in self.bit16_groups]

    @property
    def param_names(self) -> dict[Parameter, str]:
        """The name of each parameter that is updated."""
        managed: list[Any] = [param for group in self.bit16_groups for param in group if is_managed(param)]
        return {param: param._ds_member.name for param in managed}

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return bool(getattr(self.scaler, "dynamic", False))

    @property
    def cpu_offload(self) -> bool:
        """Whether masters and moments rest outside of the device."""
        return any(group.updated.memory is None or group.updated.memory.device != group.device for group in self.groups)

    @property
    def partition_gradients(self) -> bool:
        """Whether a rank keeps the gradients of its shards only."""
        return any(group.policy.reduces_as_gradients_arrive for group in self.groups)

    @property
    def allgather_bucket_size(self) -> int:
        """Most elements that one all-gather of updated parameters fills: those of the largest group."""
        return max((group.full.numel() for group in self.groups), default=0)

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        """The parameters of each flat group as they lie in memory, one after the other: 1-D, in their dtype.

        Raises:
            NotAvailableError: at stage 3, where nobody has them whole.
        """
        if any(group.policy.gathers_before_use for group in self.groups):
            raise NotAvailableError("bit16_groups_flat: at stage 3 no rank has flat parameters; see GatheredParameters")
        return [group.full for group in self.groups]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[torch.Tensor]]:
        """The shard of each rank in each of `bit16_groups_flat`: views of it."""
        bounds = [group.layout.cuts for group in self.groups]
        return [
            [flat[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
            for flat, cuts in zip(self.bit16_groups_flat, bounds, strict=True)
        ]

    def update_lp_params(self) -> None:
        """Round the masters into the parameters of the model. All ranks call together."""
        publish(self.groups)

    def check_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient of this window is not finite on any rank. All ranks call together, before `step`.

        Args:
            partition_gradients: accepted: shards are looked at where there are shards.
        """
        finite = True
        for bucket in self.reducer.buckets:
            for member in bucket.group.members:
                gradient = self.reducer.grad_of(member)
                finite = finite and (gradient is None or bool(gradient.isfinite().all()))
        return not all(all_gather_objects(self.reducer.axes.model_replica_group, finite))

    def quantize_nontrainable_params(self) -> None:
        """Not available: frozen parameters stay in their dtype.

        Raises:
            NotAvailableError: always.
        """
        raise NotAvailableError("quantize_nontrainable_params is not available yet: it belongs to quantized gathers")
