"""Record of one parameter in a group, with references to the group, the reducer and the optimizer.

Protocols describe these objects, since imports of their classes would be circular. Code that needs more attributes of a
group than its protocol has calls `shard_group.group_of`.
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

    AVAILABLE = 1  # gathered, or never sharded
    NOT_AVAILABLE = 2  # sharded
    INFLIGHT = 3  # all-gather in progress


@dataclass(frozen=True)
class Tiers:
    """Storage tiers of a parameter group.

    Args:
        optimizer: tier of master weights, gradient accumulators and optimizer state (`offload_optimizer`).
        parameters: tier of parameter shards at stage 3 (`offload_param`).
    """

    optimizer: Tier = RESIDENT
    parameters: Tier = RESIDENT


class Gatherer(Protocol):
    """Attributes of the hooks that gather and reshard groups; see `module_hooks.ModuleHooks`."""

    depth: int

    def used_outside(self, group: Any) -> None: ...

    def add_external(self, module: nn.Module, group: Any) -> None: ...

    def remove_external(self, module: nn.Module, group: Any) -> None: ...


class Gradients(Protocol):
    """Attributes of the reducer of a parameter's gradients; see `reducer.Reducer`."""

    replaced: Any  # see `replaced_parameters.Replaced`

    def arrived(self, member: Any) -> None: ...

    def grad_of(self, member: Any) -> torch.Tensor | None: ...

    def set_grad(self, member: Any, value: torch.Tensor | None) -> None: ...


class Exposed(Protocol):
    """Attributes of the views of a group's full buffer; see `buffer_views.BufferViews`."""

    def mark_data_exposed(self, member: Any) -> None: ...


class ParameterGroup(Protocol):
    """Attributes of the group of a parameter; see `shard_group.ShardGroup`."""

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
    """Pruning masks on the shards of an optimizer; see `compression/pruning/masks`."""

    def on_gradients(self) -> None:
        """Mask the reduced gradients, before the norm is computed."""

    def on_update(self, groups: Iterable[Any]) -> None:
        """Mask the updated master weights of these groups, before they are all-gathered."""

    def fragment_state(self, fragment: Any) -> dict[str, torch.Tensor]:
        """Return the mask tensors of a fragment by name, which a checkpoint stores with its optimizer state."""
        ...

    def take_fragment_state(self, fragment: Any, state: dict[str, Any]) -> dict[str, Any]:
        """Take the mask tensors out of a loaded state of a fragment, and return the other entries."""
        ...

    def arriving(self, fragment: Any) -> dict[str, torch.Tensor]:
        """Return the mask tensors of a fragment by name, into which a checkpoint is loaded."""
        ...


_uids = itertools.count()
references: Any = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]  # tensors of a storage

references_to: Any = torch.Tensor._use_count  # pyright: ignore  # of C++ and of Python, which counts as one

memories: set[int] = set()  # storages of the full buffers of all groups, by identity


def tensors_over(tensor: torch.Tensor) -> int:
    """Return the number of tensors on the storage of `tensor`, including `tensor`."""
    return references(tensor.untyped_storage()._cdata) - 1  # without the temporary storage object


@dataclass(eq=False)
class ParamRecord:
    """Record of one parameter of a group.

    Args:
        param: parameter object, which is never replaced.
        name: qualified name in the model, for messages.
        index: index in the group.
        place: index in the model.
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
    owner: object | None = field(default=None, repr=False)  # optimizer that updates it
    active_modules: set[Any] = field(default_factory=set, repr=False)
    version: int = 0  # version counter of the parameter when its values were last equal to the shard
    address: int = 0  # address of its view of the full buffer, when last checked
    saved: bool = False  # a view of the full buffer even while it is sharded, since autograd has saved the parameter
    accumulates: bool = False  # when last resharded, only the node that accumulates its gradient referred to it
    exposed: bool = False  # `param.data` was read, and writes through it change no version counter
    snapshot: torch.Tensor | None = field(default=None, repr=False)  # copy of the 1-D values, to detect writes
    _copy: tuple[int, weakref.ref[torch.Tensor] | None] = field(default=(-1, None), init=False, repr=False)

    def __post_init__(self) -> None:
        self.shape = self.param.shape
        self.numel = self.shape.numel()

    @property
    def offset(self) -> int:
        """Return the index in the group of the parameter's first element."""
        return self.group.offsets[self.index]

    @property
    def placement(self) -> Placement:
        return placement_of(self.param)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Return the strides of a contiguous tensor of the parameter's shape."""
        return torch.empty(self.shape, device="meta").stride()

    @cached_property
    def padded(self) -> bool:
        """Return whether this rank's slice of the global tensor has padding; see `Cut.segments`."""
        return any(cut.padding for cut in self.placement.cuts)

    def without_padding(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of `values`, a tensor of the parameter's shape, in which padding is zero."""
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
        """Return the version counter of the parameter, whether it is sharded or not."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.param._version

    def lay_where_it_rests(self) -> None:
        """Set the data of the sharded parameter to the placeholder, or to its view of the full buffer; see `under`."""
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self.param, self.under(self.param))  # type: ignore[attr-defined]

    def flat(self) -> torch.Tensor:
        """Return the parameter's slice of the full buffer, 1-D; valid while the group is gathered."""
        return self.group.full[self.offset : self.offset + self.numel]

    def rest(self) -> None:
        """Create the placeholder of the sharded parameter: one NaN (integers: the maximum), expanded to the shape."""
        dtype = self.group.dtype
        integral = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        value = torch.iinfo(dtype).max if integral else torch.nan
        self.placeholder = torch.full((), value, dtype=dtype, device=self.group.device).expand(self.shape)

    def under(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the data of a sharded parameter (if `saved`: its view of the buffer) or stand-in: the placeholder."""
        return self.group.views[self.index] if self.saved and tensor is self.param else self.placeholder

    def own_span(self) -> slice:
        """Return the slice of this rank's shard that has elements of the parameter; may be empty."""
        group, cuts = self.group, self.group.layout.cuts_of(self.index)
        rank = group.axis.rank
        low = max(self.offset + cuts[rank] - group.low, 0)
        return slice(low, low + cuts[rank + 1] - cuts[rank])

    def own_values(self) -> torch.Tensor:
        """Return this rank's elements of the parameter, 1-D: a view if the shard is in memory, else a copy."""
        values = self.group.values
        with values.borrowed() as lent:
            own = lent[self.own_span()]
            return own if values.memory is not None else own.clone()

    def copy_foreign_values(self) -> None:
        """Copy values that `param.data = …` has assigned, since they may share the memory of another parameter."""
        if self.param.data_ptr() != self.group.views[self.index].data_ptr():
            self.param.data = self.param.detach().clone()

    def warn_if_copied(self) -> None:
        """Warn if `param.data = …` has assigned a tensor that other code still refers to: the values are copied."""
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
        """Copy values that `param.data = …` has assigned into the full buffer, and make its view the data again.

        Raises:
            UsageError: the assigned values have another shape or dtype.
        """
        view, param = self.group.views[self.index], self.param
        self.address = view.data_ptr()
        if param.data_ptr() == self.address and param.dtype == view.dtype:
            return
        self.check_fit()
        view.copy_(param.detach())
        param.data = view
        self.version = -1

    def check_fit(self) -> None:
        """Raise UsageError if the parameter's shape or dtype was changed, for example by `module.half()`."""
        view, param = self.group.views[self.index], self.param
        if param.shape != view.shape or param.dtype != view.dtype:
            raise UsageError(
                f"parameter '{self.name}' was {tuple(view.shape)} {view.dtype} at initialize and is now "
                f"{tuple(param.shape)} {param.dtype}: cast or resize the model before initialize, or name the dtype "
                f"in the JSON (bf16, fp16)"
            )

    def dense(self) -> torch.Tensor:
        """Return an unsharded copy. All ranks with shards must call this, unless `group.reads_alone`."""
        return self.group.read(self)

    def shared_copy(self) -> torch.Tensor:
        """Return an unsharded copy, the same for all calls until the group changes or the copy is deleted.

        All names of a parameter in a state dict get the same copy. Collective as `dense`.
        """
        changes, held = self._copy
        copied = None if changes != self.group.changes or held is None else held()
        if copied is None:
            copied = self.dense()
            self._copy = (self.group.changes, weakref.ref(copied))
        return copied
