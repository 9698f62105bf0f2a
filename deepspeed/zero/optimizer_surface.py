"""The names under which clients look into an optimizer of ZeRO: its parameters by group, and this rank's masters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Parameter

from deepspeed.comm.api import told_by_all
from deepspeed.comm.axis import Axis
from deepspeed.errors import UsageError
from deepspeed.optim.nested import groups_of
from deepspeed.zero.optimizer_state import OptimizerState, adopt

if TYPE_CHECKING:
    from deepspeed.zero.fragment import Fragment
    from deepspeed.zero.shard_group import ShardGroup


class StateMover(Protocol):
    """Moves an engine's training state off the device and back."""

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None:
        """Move what `include` names, all of it for None."""
        ...

    def reload_states(self, non_blocking: bool) -> None:
        """Bring it back."""
        ...


class OptimizerSurface:
    """What an optimizer over slices can be asked."""

    optimizer: torch.optim.Optimizer  # over the leaves
    fragments: dict[int, list[Fragment]]
    groups: Sequence[ShardGroup]
    bit16_groups: list[list[Parameter]]  # the model's parameters that each group of the optimizer updates
    states: StateMover | None = None  # of the engine

    @property
    def state(self) -> OptimizerState:
        """The inner optimizer's state; see [Note: state by parameter]."""
        return adopt(self)

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value
        adopt(self)

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """See `bit16_groups`."""
        return self.bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's slice of each flat group that is updated: 1-D, in the dtype of the master.

        What rests in memory is given as it lies there, what rests on a disk as a copy. A write is found by nobody:
        `safe_set_full_fp32_param` sets masters.
        """
        return [_whole(group) for group in self.groups if group.under_leaves is not None]

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move training state from the device to host memory, as `engine.offload_states` does.

        Args:
            include: kinds of state; None: all of them.
            device: "cpu".
            pin_memory: into page-locked memory.
            non_blocking: accepted; see the engine's.
        """
        self._mover().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved, as `engine.reload_states` does.

        Args:
            non_blocking: do not wait until the copies are over.
        """
        self._mover().reload_states(non_blocking)

    def _mover(self) -> StateMover:
        if self.states is None:
            raise UsageError("this optimizer is not attached to an engine")
        return self.states

    def _rank_state(self, **state: Any) -> RankState:
        made = RankState(state)
        made.of = weakref.ref(self)
        return made


class RankState(dict[str, Any]):
    """A rank's optimizer state, in which clients also look for its masters.

    `state["fp32_flat_groups"]` and `state["single_partition_of_fp32_groups"]` give the masters of this moment. They are
    among no keys and neither saved nor copied with it: the engine's checkpoint has them.

    Attributes:
        of: the optimizer that has the masters; a state that somebody keeps does not keep it.
    """

    of: Callable[[], OptimizerSurface | None] = staticmethod(lambda: None)

    def __missing__(self, key: str) -> list[torch.Tensor]:
        optimizer = self.of()
        if optimizer is not None and key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            return optimizer.single_partition_of_fp32_groups
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _whole(group: ShardGroup) -> torch.Tensor:
    stored = group.updated
    if stored.memory is not None:
        return stored.memory.detach()
    with stored.borrowed() as lent:
        return lent.detach().clone()


def share_counters(optimizer: torch.optim.Optimizer, axis: Axis) -> None:
    """Counters that a step leaves in a group come from the first rank that updates parameters of it. All ranks call.

    Some optimizers count only where a group has parameters, and a rank may own none of it.

    Args:
        optimizer: the inner one.
        axis: the ranks that share out its parameters.
    """
    own = [
        {key: value for key, value in group.items() if key != "params"} if group["params"] else None
        for group in groups_of(optimizer)
    ]
    by_rank = told_by_all(axis, own)
    for number, group in enumerate(groups_of(optimizer)):
        values = next((groups[number] for groups in by_rank if groups[number] is not None), {})
        group.update({key: value for key, value in values.items() if not isinstance(value, torch.Tensor)})
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                group[key] = value.to(group[key].device) if isinstance(group.get(key), torch.Tensor) else value


def numbers_of(group: dict[str, Any]) -> Iterator[float]:
    """The numbers in a group of an optimizer; NaN, which is no number, as one that nobody sets."""
    for key, value in group.items():
        for each in value if isinstance(value, (tuple, list)) and key != "params" else (value,):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.numel() == 1:
                each = each.item()
            if isinstance(each, (int, float)):
                yield -(2.0**-40) if each != each else float(each)
