"""Matrices of a device form: torch's products, and the package's kernels for few rows and for packed matrices.

Matrices that read the same rows (queries, keys and values; gate and up) become one matrix in memory where their
parameters are plain and belong to nobody else: the parameters stay the same objects, and their data become views of the
joined ones. Elsewhere there is one product for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.comm.collectives.autograd import gathered, sum_in_place
from deepspeed.comm.collectives.collectives import sum_in_rank_order
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.inference.quantization.float8 import Float8Linear, rounds_inputs
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.ops.triton import products
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import (
    DENSE,
    FLOAT8,
    GEMV_ROWS,
    INT4,
    INT8,
    gemv_variants,
    product_variants,
    rounding_variant,
)
from deepspeed.ops.triton.single_row import RowMatrix
from deepspeed.ops.triton.variants import KernelForm
from deepspeed.zero.parameters.parameter import is_managed

MULTIPLE = 16  # sizes of kernels for few rows, and of torch's scaled product
# Products of one or two rows with larger matrices are torch's: what is lost at their start and end is little there.
LARGEST_GEMV = 128 << 20  # bytes


@dataclass(frozen=True)
class DenseMatrix:
    """A matrix [outputs, inputs] with an optional bias [outputs], for torch's product.

    Attributes:
        sizes: outputs of the matrices that it joins.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]

    @property
    def gemv(self) -> bool:
        """Whether a kernel of the package multiplies one or two rows."""
        fits = self.weight.itemsize == 2 and self.weight.shape[1] % MULTIPLE == 0 == self.weight.data_ptr() % MULTIPLE
        return fits and self.weight.nbytes <= LARGEST_GEMV

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the outputs of each joined matrix, [rows, outputs], for x [rows, inputs].

        `block`: rows of a product, a divisor of the number of rows; 0: all rows in one.
        """
        if not block and len(x) <= GEMV_ROWS and self.gemv:
            out = products.dense_product(kernels, x, self.weight, self.bias)
        elif not block or len(x) == block:
            out = F.linear(x, self.weight, self.bias)
        else:
            out = x.new_empty(len(x), len(self.weight))
            for part, target in zip(x.split(block), out.split(block), strict=True):
                if self.bias is None:
                    torch.mm(part, self.weight.t(), out=target)
                else:
                    torch.addmm(self.bias, part, self.weight.t(), out=target)
        return [out] if len(self.sizes) == 1 else list(out.split(self.sizes, 1))

    @property
    def of_row(self) -> RowMatrix | None:
        """The matrix for kernels of single rows; None: they do not multiply it."""
        fits = self.gemv and self.weight.dtype == torch.bfloat16
        return RowMatrix(DENSE, (self.weight.detach(),), self.bias) if fits else None

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that it needs."""
        return [*gemv_variants(self.weight.dtype, DENSE)] if self.gemv else []


@dataclass(frozen=True)
class SlicedRows:
    """A row-parallel matrix: some of the inputs on each rank. All ranks of the axis call it together.

    Args:
        matrix: this rank's slice [outputs, own inputs], without bias.
        bias: [outputs], equal on all ranks, or None.
        axis: the ranks.
        name: name of the layer in error messages.
    """

    matrix: DenseMatrix
    bias: torch.Tensor | None
    axis: Axis
    name: str

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the sum of the ranks' products, [rows, outputs], for own inputs x [rows, own inputs].

        With a `block`, a row's bits do not depend on the number of rows: more than two ranks add in rank order, since a
        backend's all-reduce adds in an order that depends on the place in the message.
        """
        (out,) = self.matrix(kernels, x, block)
        label = f"sum of {self.name}"
        if block and self.axis.size > 2:
            every = gathered(out.view(-1), self.axis, 0, label=label).view(self.axis.size, -1)
            sum_in_rank_order(every.unbind(), out.view(-1), 1.0, add=False)
        else:
            sum_in_place(out, self.axis, label)
        return [out if self.bias is None else out + self.bias]

    @property
    def of_row(self) -> RowMatrix | None:
        """None: the ranks add their sums before anything follows."""
        return None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its outputs."""
        return self.matrix.sizes

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that it needs."""
        return self.matrix.variants


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in int8, int4 or fp8, for the package's products; in fp8 also for torch's scaled product.

    Args:
        form: "int8", "int4" or "fp8".
        parameters: values, scales and (int4) offsets, as `packed_product` takes them, but values of fp8 as uint8.
        bias: [outputs], or None.
        sizes: outputs of the matrices that it joins.
        dtype: dtype of the inputs.
        scaled: whether torch's scaled product multiplies more than `products.FEW_ROWS` rows, whose inputs it rounds.
    """

    form: str
    parameters: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None
    sizes: tuple[int, ...]
    dtype: torch.dtype
    scaled: bool = False
    parts: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        first, *others = (each.detach() for each in self.parameters)
        object.__setattr__(self, "parts", (first if self.form == INT4 else first.view(torch.int8), *others))

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """As `DenseMatrix`. With a `block`, rows of any number are computed in the same tiles."""
        if self.scaled and not block and len(x) > products.FEW_ROWS and rounds_inputs():
            out = products.scaled_product(kernels, x, self.parts[0], self.parts[1], self.bias)
        else:
            out = products.packed_product(kernels, x, self.form, self.parts, self.bias, bool(block))
        return [out] if len(self.sizes) == 1 else list(out.split(self.sizes, 1))

    @property
    def of_row(self) -> RowMatrix | None:
        """As `DenseMatrix.of_row`."""
        matrix = RowMatrix(self.form, self.parts, self.bias)
        return matrix if self.dtype == torch.bfloat16 and matrix.inputs % MULTIPLE == 0 else None

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that it needs."""
        return [*product_variants(self.dtype, self.form), *([rounding_variant(self.dtype)] if self.scaled else [])]


def packed_matrix(weight: PackedWeight | Float8Linear, bias: torch.Tensor | None) -> PackedMatrix:
    """Return a packed weight as a matrix."""
    sizes = (weight.shape[0],)
    if isinstance(weight, Float8Linear):
        scaled = weight.dtype == torch.bfloat16 and weight.takes_scaled_product
        return PackedMatrix(FLOAT8, (weight.values, weight.scale), bias, sizes, weight.dtype, scaled)
    if weight.form.num_bits == 8:
        return PackedMatrix(INT8, (weight.integers, weight.scale), bias, sizes, weight.dtype)
    return PackedMatrix(INT4, (weight.integers, weight.scale, weight.offset), bias, sizes, weight.dtype)


def unsupported_parts(weight: PackedWeight | Float8Linear) -> str | None:
    """Return the reason why a packed weight has no product on GPUs, or None."""
    if isinstance(weight, Float8Linear):
        return "an engine holds its matrices in fp8" if is_managed(weight.values) else None
    form, count = weight.form, weight.scale.numel()
    if is_managed(weight.integers):
        return "an engine holds its packed matrices"
    if form.axis != 2:
        return "its scales are across its rows"
    if form.num_bits == 8 and form.symmetric and count == weight.shape[0]:
        return None
    if form.num_bits == 4 and count * 32 == weight.shape.numel():
        return None
    return "its integers are neither symmetric int8 with one scale a row nor 4 bits in groups of 32"


@dataclass(frozen=True)
class Matrices:
    """Matrices that read the same rows, one after another."""

    parts: tuple[DenseMatrix | PackedMatrix | SlicedRows, ...]

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the outputs of each matrix."""
        return [out for part in self.parts for out in part(kernels, x, block)]

    @property
    def of_row(self) -> RowMatrix | None:
        """The one matrix that they are, for kernels of single rows; None: there are several, or they do not fit."""
        return self.parts[0].of_row if len(self.parts) == 1 else None

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that they need."""
        return [variant for part in self.parts for variant in part.variants]


# -- one matrix in memory ----------------------------------------------------------------------------------------------


class Joining:
    """Joins matrices in memory.

    Args:
        users: how often each parameter of the model occurs in its modules, by id.

    Attributes:
        moved: number of parameters that were moved into joined ones.
    """

    def __init__(self, users: Counter[int]) -> None:
        self._users, self.moved = users, 0

    @torch.no_grad()
    def join(self, matrices: Sequence[Any]) -> DenseMatrix | PackedMatrix | None:
        """Return matrices [outputs, inputs] as one, and make it of them if that is possible; else None."""
        first = matrices[0]
        if any(type(each) is not type(first) for each in matrices) or isinstance(first, SlicedRows):
            return None
        if isinstance(first, PackedMatrix) and len({(each.form, each.dtype, each.scaled) for each in matrices}) > 1:
            return None
        biases = [each.bias for each in matrices]
        if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
            return None
        packed = isinstance(first, PackedMatrix)
        groups = list(zip(*(each.parameters if packed else (each.weight,) for each in matrices), strict=True))
        groups += [tuple(biases)] if biases[0] is not None else []
        if any(len({tensor.shape[1:] for tensor in group}) > 1 for group in groups):
            return None
        adjacent = [one_in_memory(group) for group in groups]
        if any(whole is None for whole in adjacent):
            if not all(self._own(tensor) for group in groups for tensor in group):
                return None
            adjacent = [self._joined(group) for group in groups]
        bias = adjacent.pop() if biases[0] is not None else None
        sizes, whole = tuple(len(each.weight if not packed else each.parts[0]) for each in matrices), tuple(adjacent)
        if isinstance(first, PackedMatrix):
            return PackedMatrix(first.form, whole, bias, sizes, first.dtype, first.scaled)  # type: ignore[arg-type]
        return DenseMatrix(whole[0], bias, sizes)  # type: ignore[arg-type]

    def _own(self, tensor: Any) -> bool:
        """Whether a parameter's memory is its own, and nothing else is known to hold its address."""
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes and self._users[id(tensor)] == 1
        plain = type(tensor) is nn.Parameter and not tensor.is_inference() and tensor.grad is None
        plain = plain and (tensor.device.type != "cpu" or not tensor.is_shared())
        return alone and plain

    def _joined(self, parameters: Sequence[Any]) -> torch.Tensor:
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
            self.moved += 1
        return whole


def one_in_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return contiguous tensors with equal trailing sizes as one view, if they follow each other in one storage."""
    first, storage = tensors[0].detach(), tensors[0].untyped_storage().data_ptr()
    place = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == place
        if not same or not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        place += tensor.nbytes
    size = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset())
