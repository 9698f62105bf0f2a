"""Packed form of a matrix: integers, with a scale and an offset per group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.zero.parameters.parameter import is_managed

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)  # fractions of a group's range: clipping may reduce the other errors
_FAST_GROUPS = (32, 64, 128, 256)
# Maximum rows for which torch's packed product is faster than unpacking and a plain product (measured).
_FAST_ROWS = {8: 8, 4: 16}
_ALIGNED = 64  # bytes at whose multiples inputs of torch's packed products begin


@dataclass(frozen=True)
class PackingFormat:
    """Format of a packed matrix.

    Attributes:
        num_bits: 8 or 4.
        group_size: number of elements along `group_dim` that share a scale; 0: all.
        group_dim: 1: along the inputs (columns), 0: along the outputs (rows).
        symmetric: the range of a group is symmetric around zero; False: from its minimum to its maximum.

    Raises:
        NotAvailableError: num_bits is neither 8 nor 4.
        ArgumentError: group_dim is not 0, 1, -1 or -2.
    """

    num_bits: int = 8
    group_size: int = 0
    group_dim: int = 1
    symmetric: bool = False

    def __post_init__(self) -> None:
        if self.num_bits not in (4, 8):
            raise NotAvailableError(f"num_bits {self.num_bits}: Only INT4 and INT8 quantization is supported.")
        if self.group_dim not in (0, 1, -1, -2):
            raise ArgumentError(f"group_dim {self.group_dim}: a matrix has the dims 0 and 1")

    def groups(self, shape: torch.Size) -> torch.Size:
        """Return the shape [rows, groups, columns per group], or [groups, rows per group, columns] for groups of rows.

        Raises:
            ArgumentError: group_size does not divide the size of group_dim.
        """
        size = shape[self.group_dim]
        group = self.group_size or size
        if size % group:
            raise ArgumentError(
                f"a weight of shape {tuple(shape)} has {size} elements in dim {self.group_dim}, "
                f"which is no multiple of group_size {group}"
            )
        rows, columns = shape
        return torch.Size((rows, columns // group, group) if self.axis == 2 else (rows // group, group, columns))

    @property
    def axis(self) -> int:
        """Dim of the grouped shape (see `groups`) along which elements share a scale."""
        return 2 if self.group_dim in (1, -1) else 1


class PackedWeight(nn.Module):
    """Matrix [rows, columns] of integers with scales and offsets, as a module that tied layers can share.

    Integers, scales and offsets are parameters without gradients, so code that shards, moves or saves parameters
    handles them too.

    Args:
        weight: the matrix to quantize.
        form: the format.
        dtype: dtype of `dense` and `rows`; None: that of `weight`.

    Raises:
        ArgumentError: the shape does not fit the format: an odd number of columns in 4 bits, or incomplete groups.
    """

    def __init__(self, weight: torch.Tensor, form: PackingFormat, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.form, self.shape, self.dtype = form, weight.shape, dtype or weight.dtype
        if form.num_bits == 4 and weight.shape[1] % 2:
            raise ArgumentError(f"a weight of shape {tuple(weight.shape)} has odd rows: 4 bits pack two columns each")
        integers, scale, offset = self._quantize(weight.detach().float(), form)
        if form.num_bits == 8 and form.symmetric:  # signed, for torch's product; the offset is zero
            integers, offset = integers.view(torch.int8) ^ -128, torch.zeros_like(offset)
        if form.num_bits == 4:
            integers = integers[:, 0::2] | integers[:, 1::2] << 4
        self.integers = nn.Parameter(integers.contiguous(), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.offset = nn.Parameter(offset, requires_grad=False)
        self._fast: Any = None
        self._laid: Any = None  # versions of the parts from which `_fast` was built

    @classmethod
    def of(
        cls,
        form: PackingFormat,
        shape: torch.Size,
        integers: torch.Tensor,
        scale: torch.Tensor,
        offset: torch.Tensor,
        dtype: torch.dtype,
    ) -> PackedWeight:
        """Create a matrix from packed parts.

        Args:
            form: format of the integers.
            shape: [rows, columns]; native products read this many elements, so it must be right.
            integers: int8 for symmetric 8 bits; else uint8. 4 bits: two columns per byte, the first in the low bits.
            scale: fp32 in the shape `form.groups(shape)`, with size 1 in the dim `form.axis`.
            offset: the same; an element is integer · scale + offset.
            dtype: dtype of `dense` and `rows`.

        Raises:
            ArgumentError: the number of integers does not fit the shape.
        """
        if integers.dtype.itemsize != 1 or 8 * integers.numel() != form.num_bits * shape.numel():
            raise ArgumentError(f"{integers.numel()} bytes hold no matrix {tuple(shape)} of {form.num_bits} bits")
        weight = cls.__new__(cls)
        nn.Module.__init__(weight)
        weight.form, weight.shape, weight.dtype, weight._fast, weight._laid = form, shape, dtype, None, None
        for name, part in (("integers", integers), ("scale", scale), ("offset", offset)):
            weight.register_parameter(name, nn.Parameter(part.contiguous(), requires_grad=False))
        return weight

    def _apply(self, fn: Any, recurse: bool = True) -> PackedWeight:
        """Move the parts between devices. `.to(bfloat16)` only changes the attribute `dtype`, not the scales."""
        wished = fn(torch.zeros((), dtype=self.dtype, device=self.scale.device))
        scale, offset = self.scale.detach(), self.offset.detach()
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:
            self.scale.data, self.offset.data = scale.to(wished.device), offset.to(wished.device)
        self.dtype, self._fast = wished.dtype, None
        return self

    @property
    def nbytes(self) -> int:
        """Number of bytes of integers, scales and offsets."""
        return sum(part.nbytes for part in (self.integers, self.scale, self.offset))

    def _unpacked(self, integers: torch.Tensor) -> torch.Tensor:
        if self.form.num_bits == 8:
            return integers
        return torch.stack([integers & 15, integers >> 4], -1).flatten(-2)

    def dense(self) -> torch.Tensor:
        """Return the unpacked matrix: [rows, columns] of `dtype`."""
        groups = self.form.groups(self.shape)
        exact = self.form.num_bits == 4 or self.form.symmetric or self.dtype.itemsize > 2
        kind = self.dtype if exact else torch.float32  # offset + 255 · scale: the two terms are larger than the sum
        values = self._unpacked(self.integers).view(groups).to(kind)
        return torch.addcmul(self.offset.to(kind), values, self.scale.to(kind)).view(self.shape).to(self.dtype)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the unpacked rows `indices` of the matrix: [*indices.shape, columns] of `dtype`."""
        if self.form.axis == 1:
            return F.embedding(indices, self.dense())
        flat = indices.reshape(-1)
        values = self._unpacked(self.integers[flat]).view(len(flat), *self.form.groups(self.shape)[1:])
        rows = values.float() * self.scale[flat] + self.offset[flat]
        return rows.view(*indices.shape, self.shape[1]).to(self.dtype)

    def product(self, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply `F.linear` with this matrix to `inputs` [..., columns]: [..., rows], in the dtype of `inputs`."""
        count = inputs.numel() // self.shape[1]
        fast = (
            self._layout() if inputs.dtype == torch.bfloat16 and 0 < count <= _FAST_ROWS[self.form.num_bits] else None
        )
        if fast is None:
            return F.linear(inputs, self.dense().to(inputs.dtype), bias)
        flat = inputs.reshape(count, self.shape[1]).contiguous()
        if flat.data_ptr() % _ALIGNED:  # torch's product in 8 bits ends the process with a segmentation fault
            flat = flat.clone()
        if self.form.num_bits == 8:
            outputs = torch._weight_int8pack_mm(flat, *fast)
        else:
            outputs = torch._weight_int4pack_mm_for_cpu(flat, fast[0], self.shape[1] // self.scale.shape[1], fast[1])
        outputs = outputs.view(*inputs.shape[:-1], self.shape[0])
        return outputs if bias is None else outputs + bias

    def _layout(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the matrix in the layout of torch's packed product; None if unsupported, or if parts are sharded."""
        if is_managed(self.integers):  # free memory after use, instead of caching the layout
            return None
        parts = (self.integers, self.scale, self.offset)  # inference tensors have no version counter
        sources = [(part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts]
        if self._fast is None or self._laid != sources:  # weights may be loaded after the first product
            self._laid = sources
            self._fast = self._relaid() if self.integers.device.type == "cpu" and self.form.axis == 2 else ()
        return self._fast or None

    def _relaid(self) -> tuple[torch.Tensor, ...]:
        rows, groups, size = self.form.groups(self.shape)
        if self.form.num_bits == 8 and self.form.symmetric and groups == 1:
            return self.integers, self.scale.view(rows).to(torch.bfloat16)
        if self.form.num_bits == 4 and size in _FAST_GROUPS and rows % 16 == 0:
            tiles = torch._convert_weight_to_int4pack_for_cpu(self._unpacked(self.integers).to(torch.int32), 1)
            zero = self.offset + 8 * self.scale
            pairs = torch.cat([self.scale, zero], 2).transpose(0, 1)
            return tiles, pairs.to(torch.bfloat16).contiguous()
        return ()

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        copy = PackedWeight.__new__(PackedWeight)
        memo[id(self)] = copy
        nn.Module.__init__(copy)
        copy.form, copy.shape, copy.dtype, copy._fast, copy._laid = self.form, self.shape, self.dtype, None, None
        for name, part in self._parameters.items():
            copy.register_parameter(name, None if part is None else nn.Parameter(part.detach().clone(), False))
        return copy

    def settle(self, take: Callable[[int], torch.Tensor]) -> int:
        """Move the parts to other host memory, such as huge pages, which are read faster.

        Sharded parts, and parts in a file, in shared memory or in a larger tensor, are not moved.

        Args:
            take: function that allocates a uint8 tensor of a given number of elements.

        Returns:
            Number of bytes moved.
        """
        moved = 0
        for part in (self.scale, self.offset, self.integers):
            storage = part.untyped_storage()
            own = part.device.type == "cpu" and storage.resizable() and not storage.is_shared()
            whole = 0 < storage.nbytes() == part.nbytes and part.is_contiguous()
            if own and whole and not is_managed(part):
                with torch.inference_mode(False):  # inference tensors have no version counter
                    part.data = take(part.nbytes).view(part.dtype).view(part.shape).copy_(part.data)
                moved += part.nbytes
        return moved

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, {self.form}"

    @staticmethod
    def _quantize(weight: torch.Tensor, form: PackingFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return uint8 [rows, columns], scale and offset, both fp32 per group: integer · scale + offset."""
        grouped = weight.view(form.groups(weight.shape))
        top = 2**form.num_bits - 1
        if form.symmetric:
            middle = (top + 1) // 2
            reach = grouped.abs().amax(form.axis, keepdim=True).clamp(min=1e-12)
            low, step = -reach * middle / (middle - 1), reach / (middle - 1)
        else:
            low = grouped.amin(form.axis, keepdim=True)
            step = ((grouped.amax(form.axis, keepdim=True) - low) / top).clamp(min=1e-12)
        best, least = (low, step), None
        for shrink in _SHRINKS if form.num_bits == 4 else _SHRINKS[:1]:
            tried = (
                (low + (1 - shrink) / 2 * step * top, step * shrink)
                if not form.symmetric
                else (low * shrink, step * shrink)
            )
            error = (
                (PackedWeight._rounded(grouped, *tried, top) * tried[1] + tried[0] - grouped)
                .square()
                .sum(form.axis, keepdim=True)
            )
            if least is None:
                least = error
                continue
            better = error < least
            least = torch.minimum(error, least)
            best = (torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1]))
        integers = PackedWeight._rounded(grouped, *best, top).to(torch.uint8).view(weight.shape)
        return integers, best[1].contiguous(), best[0].contiguous()

    @staticmethod
    def _rounded(values: torch.Tensor, low: torch.Tensor, step: torch.Tensor, top: int) -> torch.Tensor:
        return ((values - low) / step).round().clamp(0, top)
