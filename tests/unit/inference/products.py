"""Products of matrices in the form that native code reads, natively and in torch."""

from __future__ import annotations

import torch

from deepspeed.inference.executors.native_tensors import Matrix, Weight, functions
from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight
from deepspeed.inference.quantization.packed_weight import PackedWeight


def product(matrix: Matrix, inputs: torch.Tensor, threads: int) -> torch.Tensor:
    """`inputs` [rows, inputs] of fp32 times the transposed matrix: [rows, outputs] of fp32.

    A row's bits do not depend on the other rows. Rows are rounded to bf16 for a bf16 matrix, and to 15 bits with the
    largest of the row at their end for integers.
    """
    outputs = inputs.new_empty(len(inputs), matrix.outputs)
    functions().ds_product(matrix, inputs.data_ptr(), len(inputs), outputs.data_ptr(), threads)  # type: ignore[union-attr]
    return outputs


def product_in_torch(weight: Weight, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same in torch, in double."""
    if isinstance(weight, PackedWeight):
        groups = weight.form.groups(weight.shape)
        signed = weight._unpacked(weight.integers).view(groups).double()
        dense = (signed * weight.scale + weight.offset).view(weight.shape)
    else:
        dense = (weight.dense() if isinstance(weight, LosslessWeight) else weight).double()
        inputs = inputs.to(weight.dtype)
    outputs = inputs.double() @ dense.T
    return (outputs if bias is None else outputs + bias.double()).float()
