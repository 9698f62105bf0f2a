"""Matrices in the form that native products read, in place."""

from __future__ import annotations

import ctypes
import functools
from array import array
from typing import Any

import torch

from deepspeed.errors import PackingError
from deepspeed.inference.quantization.lossless_bf16 import GROUP, LosslessWeight
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.native import KINDS, library

FORMS = {torch.float32: 0, torch.bfloat16: 1, "signed 8": 2, "unsigned 8": 3, "unsigned 4": 4, "lossless": 5}


class Matrix(ctypes.Structure):
    """Mirrors `Matrix` of products.h; `held` keeps the tensors that it points to."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "scale", "offset", "bias")),
        *((name, ctypes.c_void_p) for name in ("exponents", "starts", "places", "values")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "group")),
        *((name, ctypes.c_int32) for name in ("form", "bias_kind")),
    ]
    held: tuple[Any, ...] = ()


class Norm(ctypes.Structure):
    """Mirrors `Norm` of decoder.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("kind", "centred")),
        ("eps", ctypes.c_float),
    ]


class Heads(ctypes.Structure):
    """Mirrors `Heads` of decoder.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("count", "cached", "size", "rotary", "window")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class Layer(ctypes.Structure):
    """Mirrors `Layer` of decoder.cpp."""

    _fields_ = [
        *((name, Norm) for name in ("before", "after", "query", "key")),
        *((name, Matrix) for name in ("q", "k", "v", "out", "gate", "up", "down")),
        ("heads", Heads),
        ("activation", ctypes.c_int32),
    ]


class Pass(ctypes.Structure):
    """Mirrors `Pass` of decoder.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "spans", "pages", "cosines", "sines")),
        *((name, ctypes.c_int64) for name in ("rows", "sequences", "page_size")),
        ("threads", ctypes.c_int32),
    ]


@functools.cache
def functions() -> ctypes.CDLL | None:
    """The native library with the types of the functions used here, or None."""
    found = library()
    if found is not None:
        pointer = ctypes.c_void_p
        found.ds_product.argtypes = [ctypes.POINTER(Matrix), pointer, ctypes.c_int64, pointer, ctypes.c_int]
        found.ds_layers.argtypes = [pointer, ctypes.c_int64, ctypes.POINTER(Pass), ctypes.c_int32]
        found.ds_head.argtypes = [
            ctypes.POINTER(Norm), ctypes.POINTER(Matrix), pointer, ctypes.c_int64, pointer, ctypes.c_int,
        ]  # fmt: skip
        found.ds_attend.argtypes = [ctypes.POINTER(Pass), ctypes.POINTER(Heads), pointer, pointer]
        found.ds_rows.argtypes = [ctypes.POINTER(Matrix), pointer, ctypes.c_int64, ctypes.c_int32, pointer]
        found.ds_largest.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, pointer]
        for name in ("product", "layers", "head", "attend", "rows", "largest"):
            getattr(found, f"ds_{name}").restype = None
    return found


Weight = torch.Tensor | PackedWeight | LosslessWeight


def matrix_of(weight: Weight, bias: torch.Tensor | None = None) -> Matrix | str:
    """What native products read of a matrix [outputs, inputs], or in a few words why they cannot.

    Args:
        weight: fp32 or bf16, whole or in 12 bits, or integers with scales along the inputs.
        bias: [outputs], fp32 or bf16.
    """
    packed = isinstance(weight, PackedWeight)
    tensor = weight.integers if packed else weight.codes if isinstance(weight, LosslessWeight) else weight
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return "a matrix is not in host memory in rows without gaps"
    if bias is not None and (bias.dtype not in (torch.float32, torch.bfloat16) or not bias.is_contiguous()):
        return f"a bias is {bias.dtype}"
    made = Matrix(outputs=weight.shape[0], inputs=weight.shape[1], group=weight.shape[1])
    made.held = (weight, bias)
    if bias is not None:
        made.bias, made.bias_kind = bias.data_ptr(), KINDS[bias.dtype]
    made.weights = tensor.data_ptr()
    if packed:
        return _integers(made, weight)
    if isinstance(weight, LosslessWeight):
        return _lossless(made, weight)
    if weight.dtype not in FORMS:
        return f"a matrix is {weight.dtype}"
    made.form = FORMS[weight.dtype]
    return made


def _lossless(made: Matrix, packed: LosslessWeight) -> Matrix | str:
    if packed.dtype != torch.bfloat16:
        return f"a matrix of bf16 in 12 bits is to compute in {packed.dtype}"
    made.form = FORMS["lossless"]
    for name in ("exponents", "starts", "places", "values"):
        setattr(made, name, getattr(packed, name).data_ptr())
    return made


def _integers(made: Matrix, packed: PackedWeight) -> Matrix | str:
    rows, groups = packed.scale.shape[:2]
    made.group = packed.shape[1] // groups
    if packed.form.axis != 2 or made.group % 32:
        return "a packed matrix has scales across its rows, or for groups that are no multiple of 32"
    bytes_there, sizes = packed.integers.nbytes, packed.scale.shape
    if 8 * bytes_there != packed.form.num_bits * packed.shape.numel() or packed.offset.shape != sizes:
        return "a packed matrix has other integers or scales than its shape says"
    if rows != packed.shape[0] or packed.shape[1] % groups or packed.scale.numel() != rows * groups:
        return "a packed matrix has other scales than its shape says"
    if packed.scale.dtype != torch.float32:
        return f"scales are {packed.scale.dtype}"
    signed = packed.form.symmetric and packed.form.num_bits == 8
    made.form = FORMS["signed 8" if signed else f"unsigned {packed.form.num_bits}"]
    made.scale = packed.scale.data_ptr()
    made.offset = None if signed else packed.offset.data_ptr()
    return made


def rows_of(matrix: Matrix, first: int, count: int) -> Matrix:
    """`count` rows of a matrix from `first` on, as a matrix of their own over the same memory.

    Raises:
        PackingError: rows of a matrix in 12 bits lie in fours, and `first` is inside of them.
    """
    made = Matrix.from_buffer_copy(matrix)
    made.held, made.outputs = matrix.held, count
    whole = {FORMS[torch.float32]: 4.0, FORMS[torch.bfloat16]: 2.0, FORMS["unsigned 4"]: 0.5, FORMS["lossless"]: 1.5}
    if matrix.form == FORMS["lossless"]:
        if first % GROUP:
            raise PackingError(f"a matrix in 12 bits is not cut before its row {first}, only at multiples of {GROUP}")
        made.starts += first
    made.weights += int(first * matrix.inputs * whole.get(matrix.form, 1.0))
    for name in ("scale", "offset"):
        if (at := getattr(matrix, name)) is not None:
            setattr(made, name, at + 4 * first * (matrix.inputs // matrix.group))
    if matrix.bias is not None:
        made.bias += first * (4 if matrix.bias_kind == KINDS[torch.float32] else 2)
    return made


def largest(logits: torch.Tensor) -> list[int]:
    """Where the first largest value of each row [rows, columns] lies; -1 where that is not a finite number, so that no
    token can be chosen."""
    native = functions() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if native is None or not logits.is_contiguous():
        return largest_twin(logits)
    found = array("q", bytes(8 * len(logits)))
    native.ds_largest(logits.data_ptr(), *logits.shape, found.buffer_info()[0])
    return found.tolist()


def largest_twin(logits: torch.Tensor) -> list[int]:
    """The same in torch."""
    at = logits.argmax(-1, keepdim=True)
    return at.masked_fill(~logits.gather(-1, at).isfinite(), -1)[:, 0].tolist()


def product(matrix: Matrix, inputs: torch.Tensor, threads: int) -> torch.Tensor:
    """`inputs` [rows, inputs] of fp32 times the transposed matrix: [rows, outputs] of fp32.

    A row's bits do not depend on the other rows. Rows are rounded to bf16 for a bf16 matrix, and to 15 bits with the
    largest of the row at their end for integers.
    """
    out = inputs.new_empty(len(inputs), matrix.outputs)
    functions().ds_product(matrix, inputs.data_ptr(), len(inputs), out.data_ptr(), threads)  # type: ignore[union-attr]
    return out


def product_twin(weight: Weight, inputs: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The same in torch, in double."""
    if isinstance(weight, PackedWeight):
        groups = weight.form.groups(weight.shape)
        signed = weight._unpacked(weight.integers).view(groups).double()
        dense = (signed * weight.scale + weight.offset).view(weight.shape)
    else:
        dense = (weight.dense() if isinstance(weight, LosslessWeight) else weight).double()
        inputs = inputs.to(weight.dtype)
    made = inputs.double() @ dense.T
    return (made if bias is None else made + bias.double()).float()
