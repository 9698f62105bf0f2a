"""Host's side of the kernels of single rows: products of one row with what comes before and after them in a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.products import aligned
from deepspeed.ops.triton.row_variants import INT4, KernelVariant, single_row_variant
from deepspeed.ops.triton.rows import ACTIVATIONS


@dataclass(frozen=True)
class RowMatrix:
    """A matrix for products of one row.

    Args:
        form: "dense", "int8", "int4" or "fp8".
        parts: the matrix itself in bf16, or its parts as `products.packed_product` takes them.
        bias: bf16 [outputs], or None.
    """

    form: str
    parts: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None

    @property
    def outputs(self) -> int:
        """Its outputs."""
        return len(self.parts[0])

    @property
    def inputs(self) -> int:
        """Its inputs."""
        return self.parts[0].shape[1] * (2 if self.form == INT4 else 1)

    def tensors(self, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return weights, scales, offsets and bias; what it lacks is not read, and is another tensor."""
        parts = tuple(map(aligned, self.parts))
        return (*(*parts, parts[0], parts[0])[:3], row if self.bias is None else aligned(self.bias))

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Inputs, step of scales, and whether there is a bias."""
        return self.inputs, int(len(self.parts) > 1 and self.parts[1].numel() > 1), int(self.bias is not None)


@dataclass(frozen=True)
class NormedRow:
    """A row for a product: normed, or times the norm's weight only, with the squares from which its factor follows.

    Args:
        values: bf16 [1, width].
        squares: fp32 [parts], whose sum is the sum of the squares of the row; None: the row is normed.
        eps: added to the mean square.
    """

    values: torch.Tensor
    squares: torch.Tensor | None = None
    eps: float = 0.0

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and squares; without squares another tensor, which is not read."""
        values = aligned(self.values)
        return values, values.view(torch.float32) if self.squares is None else self.squares

    @property
    def numbers(self) -> tuple[int, float]:
        """Number of squares, and eps."""
        return 0 if self.squares is None else len(self.squares), self.eps


def _checked(kernel: str, row: torch.Tensor, matrix: RowMatrix, fits: bool = True) -> KernelVariant:
    """Return the variant; ArgumentError if the row or something else does not fit the matrix."""
    if row.shape != (1, matrix.inputs) or row.dtype != torch.bfloat16 or matrix.inputs % 16 or not fits:
        raise ArgumentError(
            f"{kernel}: a row {tuple(row.shape)} of {row.dtype}, or what belongs to it, does not fit a matrix of "
            f"{matrix.outputs} outputs and {matrix.inputs} inputs"
        )
    return single_row_variant(kernel, row.dtype, matrix.form)


def add(
    kernels: Kernels, row: torch.Tensor, matrix: RowMatrix, residual: torch.Tensor, norm: torch.Tensor, eps: float,
    shift: float = 0.0,
) -> tuple[NormedRow, torch.Tensor]:  # fmt: skip
    """Return the RMS norm of a product of a row plus a residual, and that sum.

    Args:
        kernels: the kernels.
        row: bf16 [1, inputs].
        matrix: the matrix.
        residual: bf16 [1, outputs].
        norm: weight of the norm, bf16 [outputs].
        eps: added to the mean square.
        shift: added to the weight, 1 in Gemma.

    Raises:
        ArgumentError: shapes or dtypes do not fit each other.
    """
    outputs = matrix.outputs
    variant = _checked("gemv_add", row, matrix, residual.shape == (1, outputs) and norm.shape == (outputs,))
    row, blocks = aligned(row), -(-outputs // variant.constants["BLOCK_OUT"])
    out, stream = row.new_empty(1, outputs), row.new_empty(1, outputs)
    squares = row.new_empty(blocks, dtype=torch.float32)
    tensors = (row, *matrix.tensors(row), aligned(residual), aligned(norm), out, stream, squares)
    kernels.launch(variant, (blocks, 1, 1), (*tensors, outputs, *matrix.numbers, shift))
    return NormedRow(out, squares, eps), stream


def gate(kernels: Kernels, row: NormedRow, matrix: RowMatrix, activation: str) -> torch.Tensor:
    """Return activation(gate) · up, [1, outputs / 2], of a matrix whose first half is the gate and whose second is up.

    Raises:
        ArgumentError: shapes or dtypes do not fit each other, or the activation is not one of `rows.ACTIVATIONS`.
    """
    outputs = matrix.outputs // 2
    variant = _checked("gemv_gate", row.values, matrix, matrix.outputs % 2 == 0 and activation in ACTIVATIONS)
    out = row.values.new_empty(1, outputs)
    values, squares = row.tensors
    tensors = (values, squares, *matrix.tensors(values), out)
    numbers = (outputs, *matrix.numbers, *row.numbers, ACTIVATIONS.index(activation))
    kernels.launch(variant, (-(-2 * outputs // variant.constants["BLOCK_OUT"]), 1, 1), (*tensors, *numbers))
    return out


def rotate(
    kernels: Kernels,
    row: NormedRow,
    matrix: RowMatrix,
    rotation: tuple[torch.Tensor, torch.Tensor],
    pools: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> torch.Tensor:
    """Return rotated queries [1, heads, head size] of a row; rotated keys and values go to the slot of the row.

    Args:
        kernels: the kernels.
        row: the row.
        matrix: matrices of queries, keys and values, one after another.
        rotation: cosines and sines, bf16 [1, head size]: each place turns with that half of the head further.
        pools: keys and values of the layer, [slots, key-value heads, head size].
        slots: int64 [1]; negative: the row is padding, as in `rows.rotate_into_pages`.

    Raises:
        ArgumentError: shapes or dtypes do not fit each other.
    """
    cached, size = pools[0].shape[1:]
    heads = matrix.outputs // size - 2 * cached
    variant = single_row_variant("gemv_rotate", torch.bfloat16, matrix.form)
    block = variant.constants["BLOCK_OUT"]
    fits = all(each.shape == (1, size) and each.dtype == row.values.dtype for each in rotation)
    fits = fits and (heads + 2 * cached) * size == matrix.outputs and heads > 0 == size % block
    fits = fits and pools[0].shape == pools[1].shape and pools[0].dtype == pools[1].dtype == row.values.dtype
    _checked("gemv_rotate", row.values, matrix, fits and slots.shape == (1,) and slots.dtype == torch.int64)
    out = row.values.new_empty(1, heads, size)
    values, squares = row.tensors
    turns = (aligned(each.contiguous()) for each in rotation)
    tensors = (values, squares, *matrix.tensors(values), *turns, slots, out, *pools)
    strides = [stride for pool in pools for stride in pool.stride()[:2]]
    numbers = (*matrix.numbers, *row.numbers, heads, cached, size, *strides)
    kernels.launch(variant, (size // block, heads + 2 * cached, 1), (*tensors, *numbers))
    return out
