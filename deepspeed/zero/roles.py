"""What a parameter's record asks of the objects around it: its group, its gradients, its optimizer, its gatherer; and
what the optimizer asks of what masks it.

Those objects know the record; the record knows them by these roles alone, so that imports, types included, form no
circle. Whoever needs more of a group than its role asks `shard_group.group_of`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from deepspeed.comm.axis import Axis
from deepspeed.storage.tier import Stored
from deepspeed.zero.layout import Layout
from deepspeed.zero.policy import Policy
from deepspeed.zero.tiers import Tiers


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values are right now."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Gatherer(Protocol):
    """Gathers and frees the groups of an engine; see `lifecycle.Lifecycle`."""

    depth: int

    def used_outside(self, group: Any) -> None:
        """A group was read while a unit that does not own it was running."""

    def add_external(self, module: nn.Module, group: Any) -> None:
        """A module also uses a group that is not below it."""

    def remove_external(self, module: nn.Module, group: Any) -> None:
        """Undo `add_external`."""


class Gradients(Protocol):
    """Where a parameter's gradients are; see `reducer.Reducer`."""

    replaced: Any  # see `replaced.Replaced`

    def arrived(self, member: Any) -> None:
        """Autograd has finished its gradient."""

    def grad_of(self, member: Any) -> torch.Tensor | None:
        """The mean gradient of the window so far."""
        ...

    def set_grad(self, member: Any, value: torch.Tensor | None) -> None:
        """Replace it."""


class Exposed(Protocol):
    """The memory of a group that users may hold; see `aliases.Aliases`."""

    def expose(self, member: Any) -> None:
        """`param.data` was handed out."""


class Group(Protocol):
    """The parameters that travel with it; see `shard_group.ShardGroup`."""

    members: list[Any]
    axis: Axis
    policy: Policy
    layout: Layout
    tiers: Tiers
    name: str
    dtype: torch.dtype
    device: torch.device
    offsets: Sequence[int]
    views: list[torch.Tensor]
    full: torch.Tensor
    values: Stored
    low: int
    high: int
    lifecycle: Gatherer | None

    @property
    def aliases(self) -> Exposed:
        """Its memory, and who holds views of it."""
        ...

    @property
    def status(self) -> ZeroParamStatus:
        """Where the values are."""
        ...

    @property
    def updated(self) -> Stored:
        """What the optimizer updates."""
        ...

    def land(self) -> None:
        """Wait on the current stream for values that are still on their way."""

    def read(self, member: Any) -> torch.Tensor:
        """A private dense copy of a member."""
        ...

    def write(self, member: Any, values: torch.Tensor) -> None:
        """Replace a member's values on this rank."""

    def assemble(self, member: Any, of: torch.Tensor, kind: int, label: str) -> torch.Tensor:
        """All fragments of a member, as every rank holds them."""
        ...

    def advance(self) -> None:
        """The slice has new values."""

    def thaw(self, dtype: torch.dtype) -> None:
        """Give a frozen group its master copy."""

    def import_edits(self, member: Any) -> None:
        """Take a member's edited values into the master copy."""


class Pruner(Protocol):
    """What masks the slices of an optimizer."""

    def on_gradients(self) -> None:
        """The window's gradients are complete, and not yet part of a norm."""

    def on_update(self, groups: Iterable[Any]) -> None:
        """The masters of these groups were updated, and are not published yet."""

    def fragment_state(self, fragment: Any) -> dict[str, torch.Tensor]:
        """What a checkpoint stores beside the optimizer's state of a fragment."""
        ...

    def take_fragment_state(self, fragment: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Take its own part out of a loaded state; gives the optimizer's."""
        ...

    def arriving(self, fragment: Any) -> dict[str, torch.Tensor]:
        """The tensors of that part, which the load fills."""
        ...
