"""Column- and row-parallel linear layers (Megatron-LM, arXiv:1909.08053).

A column-parallel layer computes a slice of the outputs from the whole input. A row-parallel layer reads a slice of the
inputs and all-reduces its outputs before adding its bias. Between the two, channels are split over the ranks. Existing
layers are sliced in place: module and parameters stay the same objects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.collectives.autograd import enter, gather_from, reduce_from
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import ArgumentError
from deepspeed.foundation.malloc import LARGE, mapped
from deepspeed.foundation.partition import partition_uniform
from deepspeed.zero.layout.placement import Cut, Placement, Relation, place, placement_of


class SliceLocation:
    """Ranks of one sliced layer (`axis`), and its name in error messages; deep copies of a layer share the object.

    Attributes:
        label: the name in labels of collectives: `name`, unless `share_labels` was called.
    """

    def __init__(self, axis: Axis, name: str = "") -> None:
        self.axis, self.name, self.label = axis, name, name

    def __deepcopy__(self, memo: dict[int, Any]) -> SliceLocation:
        return self


def axis_of_slices(model: nn.Module) -> Axis | None:
    """Return the ranks that share the matrices of a model; None if every rank has them whole."""
    slots = (getattr(module, "slot", None) for module in model.modules())
    return next((slot.axis for slot in slots if isinstance(slot, SliceLocation) and slot.axis.size > 1), None)


def share_labels(block: nn.Module, shared: bool = True) -> None:
    """Give equal layers of repeated blocks equal labels, "*" for the block's number, so that they can share a graph.

    Args:
        block: one of the blocks.
        shared: False: layers have labels of their own again.
    """
    for module in block.modules():
        slot = getattr(module, "slot", None)
        if isinstance(slot, SliceLocation):
            slot.label = starred("." + slot.name)[1:] if shared else slot.name


def starred(name: str) -> str:
    """Replace each number after a dot in a parameter or module name by `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def take(tensor: torch.Tensor, dim: int, segments: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return a copy of the segments (start, length) of a dim, concatenated."""
    return torch.cat([tensor.narrow(dim, start, length) for start, length in segments], dim)


def slice_of(whole: torch.Tensor, cuts: tuple[Cut, ...]) -> torch.Tensor:
    """Return a rank's slice of a whole tensor: a view where each dimension is cut in one piece, else a copy.

    Padding (a segment that starts at -1) is zero.
    """
    for cut in cuts:
        pieces = [
            whole.narrow(cut.dim, start, length)
            if start >= 0
            else whole.new_zeros(*whole.shape[: cut.dim], length, *whole.shape[cut.dim + 1 :])
            for start, length in cut.segments
        ]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, cut.dim)
    return whole


def cut_tensor(tensor: torch.Tensor, dim: int, segments: Sequence[tuple[int, int]], ep: int = 1) -> None:
    """Reduce a parameter or buffer to (start, length) segments of one dim, in place, and record its placement.

    `ep` is the number of expert-parallel ranks, if the segments are experts; 1: the segments are slices of tp.
    """
    size, whole = tensor.shape[dim], tensor.data
    shape = [*whole.shape[:dim], sum(length for _, length in segments), *whole.shape[dim + 1 :]]
    with torch.no_grad():
        if whole.device.type != "cpu" or math.prod(shape) * whole.itemsize < LARGE:
            tensor.data = take(whole, dim, segments)
        else:  # mapped memory: the heap would keep it when an engine moves slices elsewhere
            parts = [whole.narrow(dim, start, length) for start, length in segments]
            tensor.data = torch.cat(parts, dim, out=mapped(shape, whole.dtype))
    cut, before = Cut(dim, size, tuple(segments)), placement_of(tensor)
    if ep > 1:  # the tensor may be a slice of tp already
        place(tensor, replace(before, cuts=(*before.cuts, cut), ep=ep))
    else:
        place(tensor, Placement((cut,), {"tp": Relation.SHARD}))


def mark_partial(tensor: torch.Tensor) -> None:
    """Mark a parameter as replicated with partial gradients, which must be summed over the ranks."""
    place(tensor, Placement((), {"tp": Relation.PARTIAL}))


def even_segments(size: int, axis: Axis, name: str) -> tuple[tuple[int, int], ...]:
    """Return this rank's even share of `size` elements as ((start, length),); ArgumentError if fewer than ranks."""
    if size < axis.size:
        raise ArgumentError(f"{name}: {size} channels cannot be shared out to {axis.size} ranks")
    low, high = partition_uniform(size, axis.size)[axis.rank : axis.rank + 2]
    return ((low, high - low),)


def even_sizes(size: int, ranks: int) -> list[int]:
    """Return the number of elements of each rank if `size` elements are divided as evenly as possible."""
    bounds = partition_uniform(size, ranks)
    return [high - low for low, high in zip(bounds, bounds[1:], strict=False)]


class _Sliced(nn.Module):
    """Base class of sliced linear layers; `weight` is (out, in), or (in, out) as in GPT-2's `Conv1D`."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    slot: SliceLocation
    transposed = False

    def _matrix(self) -> torch.Tensor:
        return self.weight.t() if self.transposed else self.weight


class ColumnParallel(_Sliced):
    """Linear layer with a slice of the outputs.

    Attributes:
        enters: whether backward all-reduces the input gradient; False if an earlier layer of the same region does so.
        rows: indices of this rank's outputs in replicated weights; None: `weight` has only these outputs.
        sizes: numbers of outputs by rank, to all-gather the outputs; None: outputs stay split.
    """

    enters = True
    rows: torch.Tensor | None = None
    sizes: Sequence[int] | None = None

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map (…, in) to (…, outputs of this rank), or if `sizes` is set, by an all-gather, to (…, all outputs)."""
        if self.enters:
            input = enter(input, self.slot.axis, f"gradient of what {self.slot.label} reads")
        weight, bias = self._matrix(), self.bias
        if self.rows is not None:
            weight = weight.index_select(0, self.rows)
            bias = None if bias is None else bias.index_select(0, self.rows)
        out = F.linear(input, weight, bias)
        if self.sizes is None:
            return out
        return gather_from(out, self.slot.axis, -1, self.sizes, f"outputs of {self.slot.label}")


class RowParallel(_Sliced):
    """Linear layer with a slice of the inputs; the outputs are all-reduced."""

    def forward(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Map (…, inputs of this rank) to (…, out), equal on all ranks. All ranks must call this."""
        out = reduce_from(F.linear(input, self._matrix()), self.slot.axis, f"sum of {self.slot.label}")
        return out if self.bias is None else out + self.bias


class ColumnParallelLinear(ColumnParallel, nn.Linear):
    """Column-parallel linear layer.

    Args:
        in_features: inputs of the whole layer.
        out_features: outputs of the whole layer, divided as evenly as possible.
        bias: whether the layer has a bias.
        axis: the ranks of the layer.
        gather_output: whether every rank returns all outputs (all-gather), or only its slice.
        name: name of the layer in error messages.
        device, dtype: device and dtype of the parameters; None: torch's defaults.

    Initial values are drawn for the whole layer, so ranks with equal seeds have slices of the same matrix.

    Raises:
        ArgumentError: there are fewer outputs than ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis,
        gather_output: bool = False,
        name: str = "linear",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        become_column(self, SliceLocation(axis, name), even_segments(out_features, axis, name))
        self.sizes = even_sizes(out_features, axis.size) if gather_output else None


class RowParallelLinear(RowParallel, nn.Linear):
    """Row-parallel linear layer; `in_features` are divided over the ranks of `axis`, see `ColumnParallelLinear`.

    Raises:
        ArgumentError: there are fewer inputs than ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        axis: Axis,
        name: str = "linear",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)
        become_row(self, SliceLocation(axis, name), even_segments(in_features, axis, name))


_classes: dict[tuple[type, type], type] = {}


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight of a linear layer is (in, out), as in `Conv1D` of Transformers."""
    return hasattr(module, "nf") and not hasattr(module, "out_features")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer that can be sliced: like `nn.Linear` or `Conv1D`, not quantised."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or hasattr(weight, "quant_state"):
        return False
    if type(module).__name__ == "Conv1D" and is_transposed(module):
        return True
    # Subclasses in Transformers with the same product.
    return isinstance(module, nn.Linear) and (
        type(module).forward in _FORWARDS or type(module).__module__.startswith("transformers.")
    )


_FORWARDS = (nn.Linear.forward, ColumnParallel.forward, RowParallel.forward)


def _turn(module: nn.Module, slot: SliceLocation, slice_class: type) -> Any:
    """Change the class of a layer to a subclass that is also a `slice_class`, and return the layer."""
    layer: Any = module
    kind: type = type(module)
    if not isinstance(module, slice_class):
        layer.transposed = is_transposed(module)
        if kind is nn.Linear:
            layer.__class__ = ColumnParallelLinear if slice_class is ColumnParallel else RowParallelLinear
        else:
            if (kind, slice_class) not in _classes:
                name = slice_class.__name__ + kind.__name__
                _classes[kind, slice_class] = type(name, (slice_class, kind), {"__module__": __name__})
            layer.__class__ = _classes[kind, slice_class]
    layer.slot = slot
    return layer


def become_column(
    module: nn.Module,
    slot: SliceLocation,
    segments: Sequence[tuple[int, int]],
    copied: bool = False,
    weight_is_cut: bool = False,
) -> None:
    """Reduce a linear layer to some of its outputs, in place.

    Args:
        module: the dense layer.
        slot: the ranks, and the layer's name.
        segments: (start, length) of the outputs of this rank, in order.
        copied: other ranks use some of these outputs too: weights are replicated, with partial gradients.
        weight_is_cut: the weight is tied to that of another layer, which has been sliced in the same way already.
    """
    layer = _turn(module, slot, ColumnParallel)
    dim, here = 1 if layer.transposed else 0, sum(length for _, length in segments)
    if copied:
        if list(segments) != [(0, layer.weight.shape[dim])]:
            rows = torch.cat([torch.arange(start, start + length) for start, length in segments])
            layer.rows = rows.to(layer.weight.device)
        for tensor in layer._parameters.values():
            if tensor is not None:
                mark_partial(tensor)
    else:
        if not weight_is_cut:
            cut_tensor(layer.weight, dim, segments)
        if layer.bias is not None:
            cut_tensor(layer.bias, 0, segments)
    setattr(layer, "nf" if layer.transposed else "out_features", here)


def become_row(module: nn.Module, slot: SliceLocation, segments: Sequence[tuple[int, int]]) -> None:
    """Reduce a linear layer to some of its inputs, in place; `segments` are this rank's inputs, see `become_column`."""
    layer = _turn(module, slot, RowParallel)
    cut_tensor(layer.weight, 0 if layer.transposed else 1, segments)
    setattr(layer, "nx" if layer.transposed else "in_features", sum(length for _, length in segments))
