"""What public torch functions may be called with when a parameter is among their arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch


class Hole(Enum):
    """Where the parameter goes among the arguments of a call."""

    PARAMETER = "parameter"


PARAMETER = Hole.PARAMETER


@dataclass(frozen=True)
class Kind:
    """Shape and dtype of the parameter that a call is made with."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return "x".join(str(size) for size in self.shape) + str(self.dtype).removeprefix("torch")


MATRIX, VECTOR = Kind((4, 4)), Kind((4,))
KINDS = (  # every function is tried with the first two; each other kind takes what no kind before it served
    MATRIX,
    VECTOR,
    Kind((1, 1)),
    Kind((2, 2, 3)),
    Kind((1, 4, 4, 4)),
    Kind((1, 1, 4, 4, 4)),
    Kind((4, 2)),
    Kind((4, 4), torch.float64),
    Kind((4, 4), torch.int64),
    Kind((1, 1), torch.int64),
    Kind((4, 4), torch.int8),
    Kind((4, 4), torch.complex64),
)

TENSORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # made from the parameter
    "same": lambda p: torch.full(p.shape, 0.5),
    "ints": lambda p: torch.zeros(p.shape, dtype=torch.int64),
    "mask": lambda p: torch.arange(p.numel()).reshape(p.shape) % 2 == 0,
    "row": lambda p: torch.arange(4.0) / 4,
    "square": lambda p: torch.eye(4) * 2,
    "index": lambda p: torch.tensor([0, 1]),
    "one": lambda p: torch.tensor(0.25),
    "image": lambda p: torch.ones(1, 4, 4, 4),
    "kernel1": lambda p: torch.ones(2, 4, p.shape[-1]) / 3,
    "start": lambda p: torch.tensor([0]),
    "grid": lambda p: torch.zeros(1, 2, 2, 2),
    "sparse": lambda p: torch.eye(4).to_sparse(),
}
PLAIN: tuple[Any, ...] = (
    1,
    0,
    2,
    (0,),
    (4,),
    (0, 1),
    (1, 1),
    0.5,
    True,
    torch.float32,
    "mean",
    "ij->ji",
    int,
    slice(2),
)
LISTS = {"tensors", "operands", "seq", "sequence", "arrays", "xs"}
HINTS: dict[str, tuple[Any, ...]] = {
    "dim": (0, 1, (0,)),
    "dims": ((0,), (0, 1), (1, 0)),
    "size": ((2, 2), (4,), (16,), (4, 4)),
    "shape": ((4, 4), (16,), (2, 2)),
    "index": ("ints", "index", 0),
    "mask": ("mask",),
    "condition": ("mask",),
    "dtype": (torch.float64, torch.int32),
    "other": ("same", 2.0, "ints"),
    "weight": ("square", "same"),
    "equation": ("...->...",),
    "n": (1, 2),
    "p": (0.0, 2.0, 2),
    "q": (0.5,),
    "kernel_size": (2, (2, 2)),
    "output_size": (2, (2, 2)),
    "num_groups": (1, 2),
    "normalized_shape": ((4,),),
    "repeats": (2,),
    "chunks": (2,),
    "split_size_or_sections": (2,),
    "indices_or_sections": (2,),
    "pad": ((1, 1),),
    "target": ("ints", "same", "index"),
    "memo": ({},),
    "protocol": (2,),
    "value": (1.0, "same"),
    "source": ("same", "row"),
    "src": ("same", "row"),
    "ord": (2, "fro"),
    "device": ("cpu",),
    "proto": (2,),
    "d": (True, "same"),
}


def int8(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantized weights of `rows` outputs and 4 inputs: values, packed, sums of columns."""
    values, columns, _, _ = torch.fbgemm_linear_quantize_weight(torch.ones(rows, 4) / 3)
    return values, torch.fbgemm_pack_quantized_matrix(values), columns


def int8_cell(rows: int) -> tuple[Any, ...]:
    """What a quantized recurrent cell takes after its inputs and hidden state, of `rows` gates."""
    values, packed, columns = int8(rows)
    bias = torch.zeros(rows)
    return values, values, bias, bias, packed, packed, columns, columns, 0.01, 0.01, 0, 0


_FP16_PACKED = ("p, torch.fbgemm_pack_gemm_matrix_fp16(square), row",)
_INT8_LINEAR = ("p, *int8(4), 0.01, 0, row",)
_FILTERS = ("p, torch.ones(2, p.shape[1], *[2] * (p.dim() - 2))",)
_TRANSPOSED_FILTERS = ("p, torch.ones(p.shape[1], 2, *[2] * (p.dim() - 2))",)
_RNN = ("p, torch.ones(1, 2, 3), [torch.eye(3), torch.eye(3)], False, 1, 0.0, False, False, False",)
_POOL_PLACES = "torch.arange(p[0, 0].numel()).reshape(p[0, 0].shape).expand(p.shape)"
# What no try would find, by the last part of the name: arguments in Python, where `p` is the parameter, and the keys
# of TENSORS are what they make.
SPECIAL: dict[str, tuple[str, ...]] = {
    "embedding": ("index, p",),
    "embedding_bag": ("p, index, start",),
    "narrow": ("p, 0, 0, 1",),
    "narrow_copy": ("p, 0, 0, 1",),
    "renorm": ("p, 2, 0, 1.0",),
    "renorm_": ("p, 2, 0, 1.0",),
    "unfold": ("p, 0, 2, 1",),
    "unfold_copy": ("p, 0, 2, 1",),
    "scatter": ("p, 0, ints, same",),
    "scatter_": ("p, 0, ints, same",),
    "select_scatter": ("p, row, 0, 0",),
    "where": ("p, mask, same",),
    "index_put": ("p, [index], one",),
    "index_put_": ("p, [index], one",),
    "batch_norm": ("p, None, None, None, None, True, 0.1, 1e-5, False",),
    "native_batch_norm": ("p, None, None, None, None, True, 0.1, 1e-5",),
    "native_group_norm": ("p, None, None, 1, 4, 16, 2, 1e-5",),
    "native_layer_norm": ("p, (4,), None, None, 1e-5",),
    "batch_norm_update_stats": ("p, None, None, 0.1",),
    "quantized_batch_norm": ("torch.quantize_per_tensor(image, 0.1, 0, torch.quint8), p, p, p, p, 1e-5, 0.1, 0",),
    "instance_norm": ("p, None, None, None, None, True, 0.1, 1e-5, False", "p"),
    "layer_norm": ("p, (4,), p",),
    "cholesky": ("square, p", "p"),
    "solve_triangular": ("square, p", "square, p, True", "square, p, upper=True"),
    "polygamma": ("1, p",),
    "bilinear": ("p, p, kernel1",),
    "cross": ("p, same",),
    "grid_sample": ("p, grid",),
    "grid_sampler": ("p, grid, 0, 0, False",),
    "grid_sampler_2d": ("p, grid, 0, 0, False",),
    "grid_sampler_3d": ("p, torch.zeros(1, 2, 2, 2, 3), 0, 0, False",),
    "affine_grid": ("p, [2, 1, 2, 2], False",),
    "affine_grid_generator": ("p, [2, 1, 2, 2], False",),
    "poisson_nll_loss": ("p, same, True, False, 1e-8, 'mean'", "p, same, True, False, 1e-8, 1"),
    "ctc_loss": ("p, torch.tensor([[1], [2]]), torch.tensor([2, 2]), torch.tensor([1, 1])",),
    "map_": ("p, same, max",),
    "map2_": ("p, same, same, max",),
    "apply_": ("p, abs",),
    "resize": ("p, *p.shape",),
    "resize_": ("p, (2,)",),
    "resize_as_": ("p, one",),
    "module_load": ("p, same",),
    "set_": ("p, same",),
    "sub": ("p, same",),
    "__format__": ("p, ''", "p, '.2f'"),
    "__dlpack__": ("p,",),
    "__setitem__": ("p, 0, 1.0",),
    "__array_wrap__": ("p, np.ones(3, dtype=np.float32)",),
    "__setstate__": ("p, (torch.ones(4, 4).untyped_storage(), 0, (4, 4), (4, 1))",),
    "stft": ("p, 4, None, None, None, True, 'constant', False, None, True",),
    "istft": ("torch.ones(3, 4, dtype=torch.complex64), 4, None, None, p",),
    "conv1d": ("p, kernel1",),
    "conv2d": _FILTERS,
    "conv3d": _FILTERS,
    "conv_tbc": ("p, torch.ones(1, 3, 2), torch.ones(2)",),
    "conv_transpose1d": _TRANSPOSED_FILTERS,
    "conv_transpose2d": _TRANSPOSED_FILTERS,
    "conv_transpose3d": _TRANSPOSED_FILTERS,
    "convolution": ("p, torch.ones(2, 4, 2, 2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1",),
    "max_unpool2d": (f"p, {_POOL_PLACES}, 2",),
    "max_unpool3d": (f"p, {_POOL_PLACES}, 2",),
    "fractional_max_pool2d": ("p, 2, (2, 2)",),
    "fractional_max_pool2d_with_indices": ("p, 2, (2, 2)",),
    "fractional_max_pool3d": ("p, 2, (2, 2, 2)",),
    "fractional_max_pool3d_with_indices": ("p, 2, (2, 2, 2)",),
    "interpolate": ("p, (2, 2)",),
    "gru": _RNN,
    "rnn_tanh": _RNN,
    "rnn_relu": _RNN,
    "lstm": ("p, [torch.ones(1, 2, 3)] * 2, [torch.ones(12, 3)] * 2, False, 1, 0.0, False, False, False",),
    "gru_cell": ("p, same, torch.ones(12, 4), torch.ones(12, 4)",),
    "lstm_cell": ("p, [same, same], torch.ones(16, 4), torch.ones(16, 4)",),
    "quantized_gru_cell": ("p, same, *int8_cell(12)",),
    "quantized_lstm_cell": ("p, [same, same], *int8_cell(16)",),
    "quantized_rnn_relu_cell": ("p, same, *int8_cell(4)",),
    "quantized_rnn_tanh_cell": ("p, same, *int8_cell(4)",),
    "multi_head_attention_forward": (
        "p, p, p, 3, 1, torch.ones(9, 3), torch.zeros(9), None, None, False, 0.0, torch.eye(3), torch.zeros(3)",
    ),
    "addbmm": ("torch.ones(3, 3), p.mT, p",),
    "addbmm_": ("p, torch.ones(2, 4, 3), torch.ones(2, 3, 4)",),
    "baddbmm": ("p, torch.ones(2, 2, 2), same",),
    "baddbmm_": ("p, torch.ones(2, 2, 2), same",),
    "bmm": ("p, torch.ones(2, 3, 3)",),
    "dsplit": ("p, [1]",),
    "nonzero_static": ("p, size=3",),
    "bincount": ("torch.tensor([0, 1, 2, 3]), p",),
    "one_hot": ("p, 8",),
    "unravel_index": ("p, (4, 4)",),
    "float_power_": ("p, 2.0",),
    "lu_solve": ("p, *torch.linalg.lu_factor(square)", "*torch.linalg.lu_factor(square), p"),
    "lu_unpack": ("p, torch.tensor([1, 2, 3, 4], dtype=torch.int32)",),
    "ldl_solve": ("*torch.linalg.ldl_factor(square), p",),
    "smm": ("sparse, p",),
    "hspmm": ("sparse, p",),
    "sspaddmm": ("sparse, sparse, p",),
    "sparse_mask": ("p, sparse",),
    "sym_ite": ("True, p, p",),
    "quantize_per_tensor": ("p, 0.1, 0, torch.qint8",),
    "quantize_per_tensor_dynamic": ("p, torch.qint8, False",),
    "quantize_per_channel": ("p, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8",),
    "fake_quantize_per_tensor_affine": ("p, 0.1, 0, 0, 255",),
    "fake_quantize_per_channel_affine": ("p, torch.ones(4), torch.zeros(4, dtype=torch.int32), 0, 0, 255",),
    "fused_moving_avg_obs_fake_quant": (
        "p, start + 1, start + 1, start * 0.0, start + 1.0, start + 0.1, start.int(), 0.01, 0, 255, 0",
    ),
    "choose_qparams_optimized": ("p, 4, 200, 0.16, 8",),
    "quantized_max_pool1d": ("torch.quantize_per_tensor(p, 0.1, 0, torch.quint8), [2]",),
    "quantized_max_pool2d": ("torch.quantize_per_tensor(p, 0.1, 0, torch.quint8), [2, 2]",),
    "quantized_max_pool3d": ("torch.quantize_per_tensor(p, 0.1, 0, torch.quint8), [2, 2, 2]",),
    "fbgemm_linear_fp16_weight": _FP16_PACKED,
    "fbgemm_linear_fp16_weight_fp32_activation": _FP16_PACKED,
    "fbgemm_linear_int8_weight": _INT8_LINEAR,
    "fbgemm_linear_int8_weight_fp32_activation": _INT8_LINEAR,
}
NAMES: dict[str, Any] = {"torch": torch, "np": np, "int8": int8, "int8_cell": int8_cell}
CRASHES_ON_NONSENSE = {"torch.embedding_bag"}  # torch itself, on a dense tensor; only known arguments are tried
# One dense call after another differs in the last bits (seen over 4,000 calls), perhaps by uninitialised pivots.
BARS = {"torch.linalg.lstsq": 1e-5}
# Functions whose result is an address, an opaque object, or what was in memory before: nothing to compare but the form.
UNDEFINED = frozenset(
    "empty_like data_ptr const_data_ptr fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix".split()
)
