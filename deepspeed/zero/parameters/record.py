"""The record of one parameter in a group, and its references to the group, its gradients and its storage tiers.

The record uses these objects only through the roles below, so that imports, including those of types, form no cycle.
Code that needs more of a group than its role calls `shard_group.group_of`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.storage.device_tier import RESIDENT
from deepspeed.storage.tier import StoredTensor, Tier
from deepspeed.zero.layout.layout import ShardLayout
from deepspeed.zero.layout.placement import Placement, placement_of
from deepspeed.zero.layout.stages import Policy


class ZeroParamStatus(enum.Enum):
    """Where a parameter's values currently are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@dataclass(frozen=True)
class Tiers:
    """In which storage tiers the state of a group rests.

    Args:
        optimizer: master, gradient accumulators, moments (`offload_optimizer`).
        parameters: the shards of parameters that are gathered before use (`offload_param`).
    """

    optimizer: Tier = RESIDENT
    parameters: Tier = RESIDENT


class Gatherer(Protocol):
    """The hooks that gather and free the groups of an engine; see `module_hooks.ModuleHooks`."""

    depth: int

    def used_outside(self, group: Any) -> None: ...

    def add_external(self, module: nn.Module, group: Any) -> None: ...

    def remove_external(self, module: nn.Module, group: Any) -> None: ...


class Gradients(Protocol):
    """The reducer of a parameter's gradients; see `reducer.Reducer`."""

    replaced: Any  # see `replaced.Replaced`

    def arrived(self, member: Any) -> None: ...

    def grad_of(self, member: Any) -> torch.Tensor | None: ...

    def set_grad(self, member: Any, value: torch.Tensor | None) -> None: ...


class Exposed(Protocol):
    """The memory of a group that users may hold; see `buffer_views.BufferViews`."""

    def mark_data_exposed(self, member: Any) -> None: ...


class ParameterGroup(Protocol):
    """The group of a parameter; see `shard_group.ShardGroup`."""

    members: list[Any]
    axis: Axis
    policy: Policy
    layout: ShardLayout
    tiers: Tiers
    name: str
    dtype: torch.dtype
    device: torch.device
    offsets: Sequence[int]
    views: list[torch.Tensor]
    full: torch.Tensor
    values: StoredTensor
    low: int
    high: int
    lifecycle: Gatherer | None

    @property
    def buffer_views(self) -> Exposed: ...

    @property
    def status(self) -> ZeroParamStatus: ...

    @property
    def updated(self) -> StoredTensor: ...

    def wait(self) -> None: ...

    def read(self, member: Any) -> torch.Tensor: ...

    def write(self, member: Any, values: torch.Tensor) -> None: ...

    def assemble(self, member: Any, of: torch.Tensor, kind: int, label: str) -> torch.Tensor: ...

    def advance(self) -> None: ...

    def thaw(self, dtype: torch.dtype) -> None: ...

    def import_edits(self, member: Any) -> None: ...


class Pruner(Protocol):
    """The masks over an optimizer's shards; see `compression/pruning/masks`."""

    def on_gradients(self) -> None:
        """Called when the window's gradients are complete, and not yet part of a norm."""

    def on_update(self, groups: Iterable[Any]) -> None:
        """Called when the masters of these groups were updated, and are not all-gathered yet."""

    def fragment_state(self, fragment: Any) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint stores beside the optimizer's state of a fragment."""
        ...

    def take_fragment_state(self, fragment: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Take the masks' part out of a loaded state; returns the optimizer's."""
        ...

    def arriving(self, fragment: Any) -> dict[str, torch.Tensor]:
        """The tensors of that part, which a load fills."""
        ...


_uids = itertools.count()
references: Any = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]  # tensors over a storage

references_to: Any = torch.Tensor._use_count  # pyright: ignore  # of C++ and of Python, which counts as one

memories: set[int] = set()  # of all groups, by identity of the storage: what lies there belongs to a parameter


def tensors_over(tensor: torch.Tensor) -> int:
    """Count the tensors over the memory of `tensor`, itself included."""
    return references(tensor.untyped_storage()._cdata) - 1  # the object that it is asked by counts too


@dataclass(eq=False)
class ParamRecord:
    """One parameter of a group.

    Args:
        param: the parameter; its identity never changes.
        name: qualified name in the module, for reports.
        index: position in the group.
        place: position in the model.
    """

    param: Parameter
    name: str
    index: int = 0
    place: int = 0
    shape: torch.Size = field(init=False)
    numel: int = field(init=False)
    uid: int = field(default_factory=lambda: next(_uids))
    group: ParameterGroup = field(init=False, repr=False)
    placeholder: torch.Tensor = field(init=False, repr=False)
    reducer: Gradients | None = field(default=None, repr=False)
    owner: object | None = field(default=None, repr=False)  # the optimizer that updates it
    active_modules: set[Any] = field(default_factory=set, repr=False)
    version: int = 0  # the parameter's version counter when it was last known to agree with its shard
    address: int = 0  # of its place in the full buffer, when it was last looked at
    saved: bool = False  # autograd has saved the parameter itself, so it lies in the full buffer though it is freed
    accumulates: bool = False  # when it was freed last, its only holder in autograd was the node that accumulates
    exposed: bool = False  # `param.data` was handed out, and writes through it are not counted
    snapshot: torch.Tensor | None = field(default=None, repr=False)  # 1-D values then, where a write would be lost

    def __post_init__(self) -> None:
        self.shape = self.param.shape
        self.numel = self.shape.numel()

    @property
    def offset(self) -> int:
        """First element in the group."""
        return self.group.offsets[self.index]

    @property
    def placement(self) -> Placement:
        return placement_of(self.param)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of a contiguous tensor of its shape."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def padded(self) -> bool:
        """Whether some of its elements are no part of the global tensor."""
        return any(cut.padding for cut in self.placement.cuts)

    def without_padding(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of values of its shape, with zeros for padding."""
        values = values.clone()
        for cut in self.placement.cuts:
            offset = 0
            for start, length in cut.segments:
                if start < 0:
                    values.narrow(cut.dim, offset, length).zero_()
                offset += length
        return values

    @property
    def current_version(self) -> int:
        """The version counter of the parameter, also while it is freed."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.param._version

    def lay_where_it_rests(self) -> None:
        """Point the freed parameter at its placeholder, or at the full buffer where autograd has saved it."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self.param, self.under(self.param))  # type: ignore[attr-defined]

    def flat(self) -> torch.Tensor:
        """The place in the full buffer, 1-D; valid while that has its memory."""
        return self.group.full[self.offset : self.offset + self.numel]

    def rest(self) -> None:
        """Make the placeholder of a freed parameter: true shape, no memory, every element NaN (or large)."""
        dtype = self.group.dtype
        integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        value = torch.iinfo(dtype).max if integral else torch.nan
        self.placeholder = torch.full((), value, dtype=dtype, device=self.group.device).expand(self.shape)

    def under(self, tensor: torch.Tensor) -> torch.Tensor:
        """The data of the freed parameter, or of a stand-in of it."""
        return self.group.views[self.index] if self.saved and tensor is self.param else self.placeholder

    def own_span(self) -> slice:
        """The place of this rank's part of the values in the group's shard; possibly empty."""
        group, cuts = self.group, self.group.layout.cuts_of(self.index)
        rank = group.axis.rank
        low = max(self.offset + cuts[rank] - group.layout.cuts[rank], 0)
        return slice(low, low + cuts[rank + 1] - cuts[rank])

    def own_values(self) -> torch.Tensor:
        """This rank's part of the values, 1-D: a view of the shard where that rests in memory, else a copy."""
        values = self.group.values
        with values.borrowed() as lent:
            own = lent[self.own_span()]
            return own if values.memory is not None else own.clone()

    def copy_foreign_values(self) -> None:
        """Copy values that were put under the parameter, and may be another parameter's memory."""
        if self.param.data_ptr() != self.group.views[self.index].data_ptr():
            self.param.data = self.param.detach().clone()

    def warn_if_copied(self) -> None:
        """Warn that values put under the parameter are copied, when somebody holds the tensor that they come from."""
        with torch._C.DisableTorchFunctionSubclass():
            away = self.param.data_ptr() != self.group.views[self.index].data_ptr()
            if away and tensors_over(self.param) > 1 and self.param.untyped_storage()._cdata not in memories:
                warn_once(
                    f"parameter '{self.name}' was given the memory of another tensor by `.data =`: its values are "
                    f"copied, and the two do not share memory; what a step changes does not show there, nor what is "
                    f"written there here",
                    key=("copied", self.uid),
                )

    def restore_view(self) -> None:
        """Copy values that were put under the gathered parameter by `param.data = …` back into the full buffer."""
        view, param = self.group.views[self.index], self.param
        self.address = view.data_ptr()
        if param.data_ptr() == self.address and param.dtype == view.dtype:
            return
        self.check_fit()
        view.copy_(param.detach())
        param.data = view
        self.version = -1

    def check_fit(self) -> None:
        """Raise for values of another shape or dtype, as after `module.half()`."""
        view, param = self.group.views[self.index], self.param
        if param.shape != view.shape or param.dtype != view.dtype:
            raise UsageError(
                f"parameter '{self.name}' was {tuple(view.shape)} {view.dtype} at initialize and is now "
                f"{tuple(param.shape)} {param.dtype}: cast or resize the model before initialize, or name the dtype "
                f"in the JSON (bf16, fp16)"
            )

    def dense(self) -> torch.Tensor:
        """A private dense copy. Where shards are not served one-sidedly, all ranks of the axis call together."""
        return self.group.read(self)
