"""Attributes and methods of a sharded parameter: `ds_*`, `all_gather`, `partition`."""

from __future__ import annotations

import enum
from typing import Any

import torch

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.errors import UsageError
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.zero.layout.layout import by_group
from deepspeed.zero.layout.stages import policy_for
from deepspeed.zero.parameters.record import ParamRecord, ZeroParamStatus


class ZeroParamType(enum.Enum):
    """Storage of a parameter's values between uses."""

    NORMAL = 1  # unsharded, on each rank
    PARTITIONED = 2  # one shard per rank, on the device
    REMOTE = 3  # one shard per rank, in host memory or on disk


class GatherHandle:
    """Handle of a complete all-gather, returned by `all_gather_coalesced`."""

    def wait(self, **_: Any) -> None:
        """Return immediately; keyword arguments are ignored."""


class ClientSurface:
    """Public attributes and methods of parameters of an engine or of `zero.Init`, with the names of upstream DeepSpeed.

    The class adds no fields, so that `__class__` of a parameter can be assigned.
    """

    __slots__ = ()

    _ds_member: ParamRecord

    @property
    def ds_shape(self) -> torch.Size:
        """Return the unsharded shape."""
        return self._ds_member.shape

    @property
    def ds_numel(self) -> int:
        """Return the number of elements of the unsharded parameter."""
        return self._ds_member.shape.numel()

    @property
    def ds_id(self) -> int:
        """Return a number that identifies the parameter in this process."""
        return self._ds_member.uid

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Return whether the parameter is gathered, sharded, or in an all-gather in progress."""
        return self._ds_member.group.status

    @property
    def ds_param_type(self) -> ZeroParamType:
        """Return how the values are stored between uses."""
        if self.ds_persist:
            return ZeroParamType.NORMAL
        here = self._ds_member.group.tiers.parameters is RESIDENT
        return ZeroParamType.PARTITIONED if here else ZeroParamType.REMOTE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """Return this rank's shard: a 1-D tensor in the model's dtype, possibly empty, with attribute `ds_numel`."""
        values = self._ds_member.own_values()
        values.ds_numel = values.numel()  # type: ignore[attr-defined]
        return values

    @property
    def ds_persist(self) -> bool:
        """Return whether the parameter is never sharded (stages 0 to 2, or `stage3_param_persistence_threshold`)."""
        return not self._ds_member.group.policy.gathers_before_use

    @property
    def ds_process_group(self) -> Any:
        """Return the process group of the ranks over which the parameter is sharded; None for a single rank."""
        return self._ds_member.group.axis.group

    def all_gather(self, param_list: list[Any] | None = None) -> None:
        """Gather parameters until `partition`. All ranks must call this.

        Args:
            param_list: sharded parameters; None or empty: this one. Parameters of the same group are gathered too.
        """
        for group in {param._ds_member.group: None for param in param_list or [self]}:
            if group.policy.gathers_before_use:
                group.gather_together()
            group.users += 1
            group.editors += 1

    def all_gather_coalesced(self, params: list[Any], **_: Any) -> GatherHandle:
        """Gather parameters until `partition`, like `all_gather`. All ranks must call this.

        Args:
            params: sharded parameters; empty: this one.

        Returns:
            Handle whose `wait` returns immediately, since the all-gather is complete.
        """
        self.all_gather(params)
        return GatherHandle()

    @property
    def param_idx_in_group(self) -> int:
        """Return the index of the parameter in its optimizer group.

        Raises:
            AttributeError: no optimizer updates the parameter.
        """
        owner: Any = self._ds_member.owner
        groups: list[list[Any]] = [] if owner is None else owner.bit16_groups
        for group in groups:
            for index, param in enumerate(group):
                if param is self:
                    return index
        raise AttributeError(f"'{self._ds_member.name}' is updated by no optimizer")

    def partition(self, param_list: list[Any] | None = None, has_been_updated: bool = False) -> None:
        """Reshard parameters after `all_gather`. All ranks must call this.

        Args:
            param_list: same argument as of `all_gather`.
            has_been_updated: keep in-place changes; they must be equal on all ranks.

        Raises:
            ShardedParameterError: a parameter was changed, and `has_been_updated` is False.
        """
        for group in {param._ds_member.group: None for param in param_list or [self]}:
            group.users, group.editors = max(0, group.users - 1), max(0, group.editors - 1)
            if has_been_updated:
                group.keep_own()
            if group.users == 0:
                group.reshard(edits_allowed=has_been_updated)

    def convert_to_zero_parameters(self, param_list: list[Any]) -> None:
        """Shard ordinary parameters over the ranks of this parameter, in place. All these ranks must call this.

        Args:
            param_list: parameters to shard, with the values of the first rank; sharded ones are ignored.

        Raises:
            UsageError: an engine manages this parameter, and could not update the new ones.
        """
        member = self._ds_member
        if member.reducer is not None or member.group.lifecycle is not None:
            raise UsageError(
                f"convert_to_zero_parameters of '{member.name}', which an engine manages: the new parameters would be "
                "in no optimizer and never gathered; add them to the model before deepspeed.initialize"
            )
        group: Any = member.group
        for number, param in enumerate(param_list):
            if isinstance(param, ClientSurface):
                continue
            dtype = group.dtype if param.is_floating_point() else param.dtype
            param.data = param.data.to(group.device, dtype)
            broadcast_tensors(group.axis, [param.data], f"birth of '{member.name}.converted{number}'")
            record = ParamRecord(param, f"{member.name}.converted{number}")
            layout = by_group([param.numel()], group.axis.size)
            type(group)(group.ranks, policy_for(3), layout, [record], tiers=group.tiers)

    def partition_numel(self) -> int:
        """Return `ds_numel` divided by the number of ranks, rounded up.

        `ds_tensor` may have more or fewer elements, since shards are equal parts of a parameter group, not of each
        parameter.
        """
        return -(-int(self.ds_numel) // self._ds_member.group.axis.size)

    def aligned_size(self) -> int:
        """Return the number of elements with padding: `ds_numel`, since there is no padding."""
        return self.ds_numel

    def padding_size(self) -> int:
        """Return the number of padding elements, which is 0."""
        return 0

    def ds_summary(self) -> dict[str, Any]:
        """Return id, name, status, shape and `partition_numel` as a dict, for logs."""
        return {
            "id": self.ds_id,
            "name": self._ds_member.name,
            "status": self.ds_status.name,
            "ds_shape": tuple(self.ds_shape),
            "partition_numel": self.partition_numel(),
        }

    @property
    def ds_active_sub_modules(self) -> set[Any]:
        """Return a set that this package does not use, for programs that clear it or put another in its place."""
        return self._ds_member.active_modules

    @ds_active_sub_modules.setter
    def ds_active_sub_modules(self, modules: set[Any]) -> None:
        self._ds_member.active_modules = modules
