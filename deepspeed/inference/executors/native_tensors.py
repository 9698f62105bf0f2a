"""ctypes structures for the native library; they point to the tensors' own memory."""

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
    """ctypes mirror of `Matrix` in products.h; `held` has references to the tensors, so their memory is not freed."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "scale", "offset", "bias")),
        *((name, ctypes.c_void_p) for name in ("exponents", "starts", "places", "values")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "group")),
        *((name, ctypes.c_int32) for name in ("form", "bias_kind")),
    ]
    held: tuple[Any, ...] = ()

    def fill_integers(self, packed: PackedWeight) -> str | None:
        """Set the fields for a matrix of packed integers; return None, or the reason why it is unsupported."""
        rows, groups = packed.scale.shape[:2]
        self.group = packed.shape[1] // groups
        if packed.form.axis != 2 or self.group % 32:
            return "a packed matrix has scales across its rows, or for groups that are no multiple of 32"
        bytes_there, sizes = packed.integers.nbytes, packed.scale.shape
        if 8 * bytes_there != packed.form.num_bits * packed.shape.numel() or packed.offset.shape != sizes:
            return "a packed matrix has other integers or scales than its shape says"
        if rows != packed.shape[0] or packed.shape[1] % groups or packed.scale.numel() != rows * groups:
            return "a packed matrix has other scales than its shape says"
        if packed.scale.dtype != torch.float32:
            return f"scales are {packed.scale.dtype}"
        signed = packed.form.symmetric and packed.form.num_bits == 8
        self.form = FORMS["signed 8" if signed else f"unsigned {packed.form.num_bits}"]
        self.scale = packed.scale.data_ptr()
        self.offset = None if signed else packed.offset.data_ptr()
        return None


class Norm(ctypes.Structure):
    """ctypes mirror of `Norm` in decoder.cpp: a layer norm (`centred`) or RMS norm."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("kind", "centred", "joint")),
        ("eps", ctypes.c_float),
    ]


class Heads(ctypes.Structure):
    """ctypes mirror of `Heads` in decoder.h: attention heads of a layer, with their KV cache."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("count", "cached", "size", "rotary", "window")),
        ("scale", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class GatedMlp(ctypes.Structure):
    """ctypes mirror of `GatedMlp` in decoder.cpp."""

    _fields_ = [(name, Matrix) for name in ("gate", "up", "down")]


class NativeExperts(ctypes.Structure):
    """ctypes mirror of `Experts` in decoder.cpp."""

    _fields_ = [
        *((name, Matrix) for name in ("router", "shared_gate")),
        ("each", ctypes.POINTER(GatedMlp)),
        *((name, ctypes.c_int64) for name in ("count", "chosen")),
        ("normalized", ctypes.c_int32),
    ]


class Layer(ctypes.Structure):
    """ctypes mirror of `Layer` in decoder.cpp: a decoder layer."""

    _fields_ = [
        *((name, Norm) for name in ("before", "after", "query", "key")),
        *((name, Matrix) for name in ("q", "k", "v", "out")),
        ("mlp", GatedMlp),
        ("experts", NativeExperts),
        ("heads", Heads),
        ("activation", ctypes.c_int32),
    ]


class Pass(ctypes.Structure):
    """ctypes mirror of `Pass` in decoder.h: rows, sequences and block tables of one pass."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "spans", "pages", "cosines", "sines", "adapters")),
        *((name, ctypes.c_int64) for name in ("rows", "sequences", "page_size", "adapted")),
        ("threads", ctypes.c_int32),
    ]


@functools.cache
def functions() -> ctypes.CDLL | None:
    """Return the native library with its function types declared, or None if it is unavailable."""
    native = library()
    if native is not None:
        pointer = ctypes.c_void_p
        native.ds_product.argtypes = [ctypes.POINTER(Matrix), pointer, ctypes.c_int64, pointer, ctypes.c_int]
        native.ds_layers.argtypes = [pointer, ctypes.c_int64, ctypes.POINTER(Pass), ctypes.c_int32]
        native.ds_head.argtypes = [
            ctypes.POINTER(Norm), ctypes.POINTER(Matrix), pointer, ctypes.c_int64, pointer, ctypes.c_int,
        ]  # fmt: skip
        native.ds_attend.argtypes = [ctypes.POINTER(Pass), ctypes.POINTER(Heads), pointer, pointer]
        native.ds_rows.argtypes = [ctypes.POINTER(Matrix), pointer, ctypes.c_int64, ctypes.c_int32, pointer]
        native.ds_largest.argtypes = [pointer, ctypes.c_int64, ctypes.c_int64, pointer]
        for name in ("product", "layers", "head", "attend", "rows", "largest"):
            getattr(native, f"ds_{name}").restype = None
    return native


Weight = torch.Tensor | PackedWeight | LosslessWeight


def matrix_of(weight: Weight, bias: torch.Tensor | None = None) -> Matrix | str:
    """Return the native structure of a matrix [outputs, inputs], or the reason why it is unsupported.

    Args:
        weight: fp32, bf16, bf16 in 12 bits, or integers with scales along the inputs; contiguous, in host memory.
        bias: fp32 or bf16 [outputs]; None: no bias.
    """
    packed = isinstance(weight, PackedWeight)
    tensor = weight.integers if packed else weight.codes if isinstance(weight, LosslessWeight) else weight
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return "a matrix is not in host memory in rows without gaps"
    if bias is not None and (bias.dtype not in (torch.float32, torch.bfloat16) or not bias.is_contiguous()):
        return f"a bias is {bias.dtype}"
    matrix = Matrix(outputs=weight.shape[0], inputs=weight.shape[1], group=weight.shape[1])
    matrix.held = (weight, bias)
    if bias is not None:
        matrix.bias, matrix.bias_kind = bias.data_ptr(), KINDS[bias.dtype]
    matrix.weights = tensor.data_ptr()
    if packed:
        return matrix.fill_integers(weight) or matrix
    if isinstance(weight, LosslessWeight):
        if weight.dtype != torch.bfloat16:
            return f"a matrix of bf16 in 12 bits is to compute in {weight.dtype}"
        matrix.form = FORMS["lossless"]
        for name in ("exponents", "starts", "places", "values"):
            setattr(matrix, name, getattr(weight, name).data_ptr())
        return matrix
    if weight.dtype not in FORMS:
        return f"a matrix is {weight.dtype}"
    matrix.form = FORMS[weight.dtype]
    return matrix


def rows_of(matrix: Matrix, first: int, count: int) -> Matrix:
    """Return `count` rows of a matrix, from row `first` on, as a view of the same memory.

    Raises:
        PackingError: the matrix has 12 bits per element, and `first` is not a multiple of 4.
    """
    rows = Matrix.from_buffer_copy(matrix)
    rows.held, rows.outputs = matrix.held, count
    whole = {FORMS[torch.float32]: 4.0, FORMS[torch.bfloat16]: 2.0, FORMS["unsigned 4"]: 0.5, FORMS["lossless"]: 1.5}
    if matrix.form == FORMS["lossless"]:
        if first % GROUP:
            raise PackingError(f"a matrix in 12 bits is not split before its row {first}, only at multiples of {GROUP}")
        rows.starts += first
    rows.weights += int(first * matrix.inputs * whole.get(matrix.form, 1.0))
    for name in ("scale", "offset"):
        if (address := getattr(matrix, name)) is not None:
            setattr(rows, name, address + 4 * first * (matrix.inputs // matrix.group))
    if matrix.bias is not None:
        rows.bias += first * (4 if matrix.bias_kind == KINDS[torch.float32] else 2)
    return rows


def largest(logits: torch.Tensor) -> list[int]:
    """Return the argmax of each row of `logits` [rows, vocabulary]; -1 if the largest value is not finite."""
    native = functions() if logits.device.type == "cpu" and logits.dtype == torch.float32 else None
    if native is None or not logits.is_contiguous():
        return largest_in_torch(logits)
    indices = array("q", bytes(8 * len(logits)))
    native.ds_largest(logits.data_ptr(), *logits.shape, indices.buffer_info()[0])
    return indices.tolist()


def largest_in_torch(logits: torch.Tensor) -> list[int]:
    """Return the result of `largest`, computed by torch operations."""
    indices = logits.argmax(-1, keepdim=True)
    return indices.masked_fill(~logits.gather(-1, indices).isfinite(), -1)[:, 0].tolist()
