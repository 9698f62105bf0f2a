"""Record of one parameter in a group, with references to the group, its gradients and its storage tiers.

The record uses these objects only through the protocols below, so that imports, including those of types, form no
cycle. Code that needs more of a group than its protocol calls `shard_group.group_of`.
"""

from __future__ import annotations

import enum
import itertools
import weakref
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
    """State of a parameter's values on this rank."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@dataclass(frozen=True)
class Tiers:
    """Storage tiers of a group's state.

    Args:
        optimizer: tier of master, gradient accumulators and moments (`offload_optimizer`).
        parameters: tier of the shards of parameters that are gathered before use (`offload_param`).
    """

    optimizer: Tier = RESIDENT
    parameters: Tier = RESIDENT


class Gatherer(Protocol):
    """Hooks that gather and free the groups of an engine; see `module_hooks.ModuleHooks`."""

    depth: int

    def used_outside(self, group: Any) -> None: ...

    def add_external(self, module: nn.Module, group: Any) -> None: ...

    def remove_external(self, module: nn.Module, group: Any) -> None: ...


class Gradients(Protocol):
    """Reducer of a parameter's gradients; see `reducer.Reducer`."""

    replaced: Any  # see `replaced.Replaced`

    def arrived(self, member: Any) -> None: ...

    def grad_of(self, member: Any) -> torch.Tensor | None: ...

    def set_grad(self, member: Any, value: torch.Tensor | None) -> None: ...


class Exposed(Protocol):
    """Memory of a group that users may hold; see `buffer_views.BufferViews`."""

    def mark_data_exposed(self, member: Any) -> None: ...


class ParameterGroup(Protocol):
    """Group of a parameter; see `shard_group.ShardGroup`."""

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
    changes: int

    @property
    def reads_alone(self) -> bool: ...

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
    """Masks over an optimizer's shards; see `compression/pruning/masks`."""

    def on_gradients(self) -> None:
        """Process the window's complete gradients before the norm is computed."""

    def on_update(self, groups: Iterable[Any]) -> None:
        """Process the updated masters of these groups before they are all-gathered."""

    def fragment_state(self, fragment: Any) -> dict[str, torch.Tensor]:
        """Return the tensors that a checkpoint stores besides the optimizer's state of a fragment."""
        ...

    def take_fragment_state(self, fragment: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Remove the masks' tensors from a loaded state; returns the optimizer's entries."""
        ...

    def arriving(self, fragment: Any) -> dict[str, torch.Tensor]:
        """Return the masks' tensors of a fragment, which a load fills."""
        ...


_uids = itertools.count()
references: Any = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]  # tensors over a storage

references_to: Any = torch.Tensor._use_count  # pyright: ignore  # of C++ and of Python, which counts as one

memories: set[int] = set()  # of all groups, by identity of the storage: what lies there belongs to a parameter


def tensors_over(tensor: torch.Tensor) -> int:
    """Return the number of tensors over the memory of `tensor`, itself included."""
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
    _copy: tuple[int, weakref.ref[torch.Tensor] | None] = field(default=(-1, None), init=False, repr=False)

    def __post_init__(self) -> None:
        self.shape = self.param.shape
        self.numel = self.shape.numel()

    @property
    def offset(self) -> int:
        """Return the first element in the group."""
        return self.group.offsets[self.index]

    @property
    def placement(self) -> Placement:
        return placement_of(self.param)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return the strides of a contiguous tensor of its shape."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def padded(self) -> bool:
        """Return whether some elements are padding, outside of the global tensor."""
        return any(cut.padding for cut in self.placement.cuts)

    def without_padding(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values of the parameter's shape, with zeros for padding."""
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
        """Return the version counter of the parameter, freed or not."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.param._version

    def lay_where_it_rests(self) -> None:
        """Set the freed parameter's data to its placeholder, or to the full buffer if autograd has saved it."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self.param, self.under(self.param))  # type: ignore[attr-defined]

    def flat(self) -> torch.Tensor:
        """Return the parameter's slice of the full buffer, 1-D; valid while the buffer has memory."""
        return self.group.full[self.offset : self.offset + self.numel]

    def rest(self) -> None:
        """Create the placeholder of a freed parameter: original shape, no memory, every element NaN (or large)."""
        dtype = self.group.dtype
        integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        value = torch.iinfo(dtype).max if integral else torch.nan
        self.placeholder = torch.full((), value, dtype=dtype, device=self.group.device).expand(self.shape)

    def under(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of the freed parameter, or of its stand-in."""
        return self.group.views[self.index] if self.saved and tensor is self.param else self.placeholder

    def own_span(self) -> slice:
        """Return the slice of this rank's part of the values in the group's shard; may be empty."""
        group, cuts = self.group, self.group.layout.cuts_of(self.index)
        rank = group.axis.rank
        low = max(self.offset + cuts[rank] - group.layout.cuts[rank], 0)
        return slice(low, low + cuts[rank + 1] - cuts[rank])

    def own_values(self) -> torch.Tensor:
        """Return this rank's part of the values, 1-D: a view of the shard if that is in memory, else a copy."""
        values = self.group.values
        with values.borrowed() as lent:
            own = lent[self.own_span()]
            return own if values.memory is not None else own.clone()

    def copy_foreign_values(self) -> None:
        """Copy values that were assigned to the parameter and may share another parameter's memory."""
        if self.param.data_ptr() != self.group.views[self.index].data_ptr():
            self.param.data = self.param.detach().clone()

    def warn_if_copied(self) -> None:
        """Warn that values assigned to the parameter are copied, if other code holds their source tensor."""
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
        """Copy values that were assigned to the gathered parameter by `param.data = …` back into the full buffer."""
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
        """Return a private dense copy. Collective over the axis if shards are not served one-sidedly."""
        return self.group.read(self)

    def shared_copy(self) -> torch.Tensor:
        """A dense copy that all who hold it share until a change: names of one parameter in a state dict."""
        changes, held = self._copy
        copied = None if changes != self.group.changes or held is None else held()
        if copied is None:
            copied = self.dense()
            self._copy = (self.group.changes, weakref.ref(copied))
        return copied
