"""The `ds_*` attributes of a managed parameter: shape, status, all-gather and partition."""

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
    """Storage tier of a parameter's values between uses."""

    NORMAL = 1  # whole on every rank
    PARTITIONED = 2  # a fragment on every rank
    REMOTE = 3  # a fragment in another tier


class GatherHandle:
    """Handle of an all-gather that is already complete."""

    def wait(self, **_: Any) -> None:
        """Return immediately."""


class ClientSurface:
    """Public methods of a managed parameter. The class adds no fields, so that parameters can change their class."""

    __slots__ = ()

    _ds_member: ParamRecord

    @property
    def ds_shape(self) -> torch.Size:
        """Return the original shape."""
        return self._ds_member.shape

    @property
    def ds_numel(self) -> int:
        """Return the original number of elements."""
        return self._ds_member.shape.numel()

    @property
    def ds_id(self) -> int:
        """Return an id that is unique among all managed parameters of the process."""
        return self._ds_member.uid

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Return whether the values are gathered on this rank."""
        return self._ds_member.group.status

    @property
    def ds_param_type(self) -> ZeroParamType:
        """Return the storage tier of the values between uses."""
        if self.ds_persist:
            return ZeroParamType.NORMAL
        here = self._ds_member.group.tiers.parameters is RESIDENT
        return ZeroParamType.PARTITIONED if here else ZeroParamType.REMOTE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """Return this rank's fragment: 1-D, compute dtype, possibly empty, with `ds_numel` set."""
        values = self._ds_member.own_values()
        values.ds_numel = values.numel()  # type: ignore[attr-defined]
        return values

    @property
    def ds_persist(self) -> bool:
        """Return whether the parameter stays whole (persistence threshold)."""
        return not self._ds_member.group.policy.gathers_before_use

    @property
    def ds_process_group(self) -> Any:
        """Return the process group of the ranks that hold the fragments."""
        return self._ds_member.group.axis.group

    def all_gather(self, param_list: list[Any] | None = None) -> None:
        """Gather this parameter (or those of `param_list`) until `partition`. All ranks must call this."""
        for group in {param._ds_member.group: None for param in param_list or [self]}:
            if group.policy.gathers_before_use:
                group.gather_together()
            group.users += 1
            group.editors += 1

    def all_gather_coalesced(self, params: list[Any], **_: Any) -> GatherHandle:
        """Gather parameters until `partition`, like `all_gather`; the returned handle is already complete.

        Args:
            params: parameters, which are gathered by groups.
        """
        self.all_gather(params)
        return GatherHandle()

    @property
    def param_idx_in_group(self) -> int:
        """Return the position among the parameters of its optimizer group."""
        owner: Any = self._ds_member.owner
        groups: list[list[Any]] = [] if owner is None else owner.bit16_groups
        for group in groups:
            for index, param in enumerate(group):
                if param is self:
                    return index
        raise AttributeError(f"'{self._ds_member.name}' is updated by no optimizer")

    def partition(self, param_list: list[Any] | None = None, has_been_updated: bool = False) -> None:
        """End the gather that `all_gather` began.

        Args:
            param_list: the parameters of that call.
            has_been_updated: whether every rank has made the same changes, which are kept.
        """
        for group in {param._ds_member.group: None for param in param_list or [self]}:
            group.users, group.editors = max(0, group.users - 1), max(0, group.editors - 1)
            if has_been_updated:
                group.keep_own()
            if group.users == 0:
                group.reshard(edits_allowed=has_been_updated)

    def convert_to_zero_parameters(self, param_list: list[Any]) -> None:
        """Shard plain parameters like this one, with the values of its first rank. Collective over its ranks.

        Args:
            param_list: parameters to add to the model; sharded ones are ignored.

        Raises:
            UsageError: this parameter has an engine, which does not know the new ones.
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
        """Return the elements of an equal share of the parameter, rounded up; clients sum this number over parameters.

        A whole group is divided equally, not each parameter, so `ds_tensor`, this rank's part, may have more or fewer
        elements.
        """
        return -(-int(self.ds_numel) // self._ds_member.group.axis.size)

    def aligned_size(self) -> int:
        """Return the elements with padding; equal to `ds_numel`, since there is no padding."""
        return self.ds_numel

    def padding_size(self) -> int:
        """Return the elements of padding."""
        return 0

    def ds_summary(self) -> dict[str, Any]:
        """Return the parameter's state as a dict, for logs."""
        return {
            "id": self.ds_id,
            "name": self._ds_member.name,
            "status": self.ds_status.name,
            "ds_shape": tuple(self.ds_shape),
            "partition_numel": self.partition_numel(),
        }

    @property
    def ds_active_sub_modules(self) -> set[Any]:
        """Return a set for clients that clear it; the group counts uses itself."""
        return self._ds_member.active_modules
