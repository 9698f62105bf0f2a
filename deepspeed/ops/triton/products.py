"""Host's side of the kernels of matrix products: one call each, with checked shapes.

There are three kernels for a packed matrix: one for few rows, which is as fast as the matrix is read, one for tiles of
16 rows, and one for many rows. A row's bits depend on itself and on the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import (
    DENSE,
    FORMS,
    INT4,
    KernelVariant,
    gemv_variant,
    product_variant,
    rounding_variant,
    wide_variant,
)

FEW_ROWS = 4  # of a packed matrix, for which the kernel for few rows decodes twice at most
SHAPES = {INT4: "uint8 [outputs, inputs / 2]"}


def packed_product(
    kernels: Kernels,
    inputs: torch.Tensor,
    form: str,
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Return `inputs` [rows, inputs] times a packed matrix, [rows, outputs] in the dtype of `inputs`.

    Args:
        kernels: the kernels.
        inputs: [rows, inputs].
        form: "int8", "int4" or "fp8".
        parts: int8: integers int8 [outputs, inputs] and scales; int4: integers uint8 [outputs, inputs / 2], two columns
            a byte, scales and offsets; fp8: the bits of e4m3 as int8 [outputs, inputs], and scales. Scales and offsets
            are fp32, one for each output, in 4 bits for each 32 inputs; one for the whole matrix is right in 8 bits.
        bias: [outputs], or None.
        invariant: whether a row's bits are not to depend on the number of rows: then few rows are computed in tiles.

    Raises:
        ArgumentError: sizes do not fit each other, or the form is unknown.
    """
    if form not in FORMS:
        raise ArgumentError(f"form {form!r} of a matrix is none of {', '.join(FORMS)}")
    values, scales = parts[0], parts[1]
    outputs, width = values.shape[0], values.shape[1] * (2 if form == INT4 else 1)
    if form == INT4:
        fits = scales.numel() == parts[2].numel() == outputs * width // 32 and width % 32 == 0
    else:
        fits = scales.numel() in (1, outputs) and values.dtype == torch.int8
    if inputs.dim() != 2 or inputs.shape[1] != width or not fits or not values.is_contiguous():
        wanted = SHAPES.get(form, "int8 [outputs, inputs]")
        raise ArgumentError(f"inputs {tuple(inputs.shape)} and values {tuple(values.shape)}, not {wanted}")
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    few = gemv_variant(inputs.dtype, form, len(inputs)) if len(inputs) <= FEW_ROWS and not invariant else None
    if few is not None and width % 16 == 0:
        return _few_rows(kernels, few, inputs, parts, bias)
    wide = None if invariant else wide_variant(inputs.dtype, form, len(inputs), outputs, width)
    variant = product_variant(inputs.dtype, form, len(inputs), width) if wide is None else wide
    inputs, *parts = map(aligned, (inputs, *parts))
    out = inputs.new_empty(len(inputs), outputs)
    numbers = (inputs.stride(0), out.stride(0), len(inputs), outputs, width, int(scales.numel() > 1))
    sizes = variant.constants
    grid = (-(-len(inputs) // (sizes["BLOCK_ROWS"] * sizes.get("TILES", 1))), -(-outputs // sizes["BLOCK_OUT"]), 1)
    tensors = (inputs, parts[0].view(torch.int8), parts[1], parts[-1])  # offsets: read in 4 bits only
    added = inputs if bias is None else aligned(bias)
    kernels.launch(variant, grid, (*tensors, added, out, *numbers, int(bias is not None)))
    return out


def dense_product(
    kernels: Kernels, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `inputs` [rows, inputs] times `weight` [outputs, inputs] transposed, plus bias [outputs].

    All have one 16-bit dtype. The matrix is read once for each two rows: this is for one or two.

    Raises:
        ArgumentError: sizes or dtypes do not fit, or the number of inputs is no multiple of 16.
    """
    variant = gemv_variant(inputs.dtype, DENSE, len(inputs)) if inputs.dtype == weight.dtype else None
    fits = inputs.dim() == 2 == weight.dim() and inputs.shape[1] == weight.shape[1]
    if variant is None or not fits or weight.shape[1] % 16 or not weight.is_contiguous():
        raise ArgumentError(
            f"inputs {tuple(inputs.shape)} of {inputs.dtype} and a matrix {tuple(weight.shape)} of {weight.dtype} have "
            "no product of few rows"
        )
    return _few_rows(kernels, variant, inputs, (weight,), bias)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at an address for which kernels are compiled: itself, or a copy."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _few_rows(
    kernels: Kernels,
    variant: KernelVariant,
    inputs: torch.Tensor,
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the product of few rows; `parts`: as in `packed_product`, or the matrix itself."""
    if inputs.stride(1) != 1 or inputs.stride(0) % 16:
        inputs = inputs.contiguous()
    row = inputs.stride(0) if len(inputs) > 1 else inputs.shape[1]  # one row may have any stride
    inputs, *parts = map(aligned, (inputs, *parts))
    outputs, out = len(parts[0]), inputs.new_empty(len(inputs), len(parts[0]))
    tensors = (inputs, *(*parts, parts[0], parts[0])[:3])  # what a form lacks is not read
    step = int(len(parts) > 1 and parts[1].numel() > 1)
    numbers = (row, out.stride(0), len(inputs), outputs, inputs.shape[1], step, int(bias is not None))
    sizes = variant.constants
    grid = (-(-len(inputs) // sizes["ROWS"]), -(-outputs // sizes["BLOCK_OUT"]), 1)
    kernels.launch(variant, grid, (*tensors, inputs if bias is None else aligned(bias), out, *numbers))
    return out


def rounded_rows(kernels: Kernels, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows [n, width] in e4m3, rounded to the nearest, and their scales, fp32 [n, 1]: largest magnitudes / 448.

    Raises:
        ArgumentError: rows are not two-dimensional and contiguous in their last dimension.
    """
    if rows.dim() != 2 or rows.stride(1) != 1:
        raise ArgumentError(f"rows to round are {tuple(rows.shape)} with strides {rows.stride()}")
    values = rows.new_empty(rows.shape, dtype=torch.int8)
    scales = rows.new_empty(len(rows), 1, dtype=torch.float32)
    numbers = (rows.stride(0), rows.shape[1])
    kernels.launch(rounding_variant(rows.dtype), (len(rows), 1, 1), (rows, values, scales, *numbers))
    return values.view(torch.float8_e4m3fn), scales


def scaled_product(
    kernels: Kernels, inputs: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return `inputs`, rounded to e4m3, times a matrix in e4m3 by torch's scaled product, in bf16.

    Args:
        kernels: the kernels.
        inputs: bf16 [rows, inputs].
        values: the bits of e4m3 as int8 [outputs, inputs]; both sizes are multiples of 16.
        scales: fp32, one for each output.
        bias: bf16 [outputs], or None.
    """
    rounded, scale = rounded_rows(kernels, inputs)
    matrix = values.view(torch.float8_e4m3fn).t()
    out = torch._scaled_mm(rounded, matrix, scale_a=scale, scale_b=scales.view(1, -1), out_dtype=torch.bfloat16)
    return out if bias is None else out.add_(bias)
