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
    """The tier of a parameter's values between uses."""

    NORMAL = 1  # whole on every rank
    PARTITIONED = 2  # a fragment on every rank
    REMOTE = 3  # a fragment in another tier


class GatherHandle:
    """Stands for an all-gather that is over."""

    def wait(self, **_: Any) -> None:
        """Return at once."""


class ClientSurface:
    """The public attributes of a managed parameter; no field is added, so that parameters may change their class."""

    __slots__ = ()

    _ds_member: ParamRecord

    @property
    def ds_shape(self) -> torch.Size:
        """The true shape."""
        return self._ds_member.shape

    @property
    def ds_numel(self) -> int:
        """The true number of elements."""
        return self._ds_member.shape.numel()

    @property
    def ds_id(self) -> int:
        """A number that identifies the parameter among all managed ones of the process."""
        return self._ds_member.uid

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values are here."""
        return self._ds_member.group.status

    @property
    def ds_param_type(self) -> ZeroParamType:
        """Where the values live between uses."""
        if self.ds_persist:
            return ZeroParamType.NORMAL
        here = self._ds_member.group.tiers.parameters is RESIDENT
        return ZeroParamType.PARTITIONED if here else ZeroParamType.REMOTE

    @property
    def ds_tensor(self) -> torch.Tensor:
        """This rank's fragment: 1-D, compute dtype, possibly empty, with `ds_numel` set."""
        values = self._ds_member.own_values()
        values.ds_numel = values.numel()  # type: ignore[attr-defined]
        return values

    @property
    def ds_persist(self) -> bool:
        """Whether the parameter stays whole (persistence threshold)."""
        return not self._ds_member.group.policy.gathers_before_use

    @property
    def ds_process_group(self) -> Any:
        """The process group of the ranks that hold the fragments."""
        return self._ds_member.group.axis.group

    def all_gather(self, param_list: list[Any] | None = None) -> None:
        """Gather this parameter (or those of `param_list`) until `partition`; all ranks must call together."""
        for group in {param._ds_member.group: None for param in param_list or [self]}:
            if group.policy.gathers_before_use:
                group.gather_together()
            group.users += 1
            group.editors += 1

    def all_gather_coalesced(self, params: list[Any], **_: Any) -> GatherHandle:
        """Gather parameters until `partition`, as `all_gather` does; the returned handle is already complete.

        Args:
            params: they are gathered by groups.
        """
        self.all_gather(params)
        return GatherHandle()

    @property
    def param_idx_in_group(self) -> int:
        """Position among the parameters of its group of the optimizer."""
        owner: Any = self._ds_member.owner
        groups: list[list[Any]] = [] if owner is None else owner.bit16_groups
        for group in groups:
            for index, param in enumerate(group):
                if param is self:
                    return index
        raise AttributeError(f"'{self._ds_member.name}' is updated by no optimizer")

    def partition(self, param_list: list[Any] | None = None, has_been_updated: bool = False) -> None:
        """End what `all_gather` began.

        Args:
            param_list: the parameters that it named.
            has_been_updated: every rank has changed them alike, and the change stays.
        """
        for group in {param._ds_member.group: None for param in param_list or [self]}:
            group.users, group.editors = max(0, group.users - 1), max(0, group.editors - 1)
            if has_been_updated:
                group.keep_own()
            if group.users == 0:
                group.reshard(edits_allowed=has_been_updated)

    def convert_to_zero_parameters(self, param_list: list[Any]) -> None:
        """Shard plain parameters as this one is, with the values of its first rank; all its ranks call together.

        Args:
            param_list: parameters that are to become part of the model; those that are sharded already are left.

        Raises:
            UsageError: this parameter has an engine, which would not know the new ones.
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
        """Elements of an equal share of the parameter, rounded up: what clients sum for "parameters per device".

        A group of parameters is cut where its equal shards fall, so `ds_tensor`, this rank's own part, may have more or
        fewer.
        """
        return -(-int(self.ds_numel) // self._ds_member.group.axis.size)

    def aligned_size(self) -> int:
        """Elements with padding: shards are cut where they fall, so there is none."""
        return self.ds_numel

    def padding_size(self) -> int:
        """Elements of padding."""
        return 0

    def ds_summary(self) -> dict[str, Any]:
        """What there is to know about the parameter's state, for logs."""
        return {
            "id": self.ds_id,
            "name": self._ds_member.name,
            "status": self.ds_status.name,
            "ds_shape": tuple(self.ds_shape),
            "partition_numel": self.partition_numel(),
        }

    @property
    def ds_active_sub_modules(self) -> set[Any]:
        """Kept for clients that clear it; use counts live in the group."""
        return self._ds_member.active_modules
