"""Host's side of the kernels of rows: one call each, with checked shapes."""

from __future__ import annotations

import torch

from deepspeed.errors import ArgumentError
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import gate_variant, norm_variant, rotation_variant

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def norm(
    kernels: Kernels,
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    centred: bool = False,
    shift: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of rows + residual, and the sum itself, both of the shape and dtype of `rows`.

    Args:
        kernels: the kernels.
        rows: [rows, width]; or, without a residual, [rows, heads, width], whose heads are normed one by one.
        weight: [width].
        bias: [width], or None.
        residual: [rows, width], or None: then `rows` itself is returned as the sum.
        eps: added to the mean square.
        centred: whether the mean is taken off first (layer norm), or not (RMS norm).
        shift: added to the weight, 1 in Gemma.

    Raises:
        ArgumentError: shapes do not fit each other, or rows are not contiguous.
    """
    others = [each for each in (weight, bias) if each is not None]
    fits = rows.dim() in (2, 3) and rows.stride(-1) == 1 and all(each.shape == rows.shape[-1:] for each in others)
    if residual is not None:
        fits = fits and rows.dim() == 2 and residual.shape == rows.shape and residual.stride(1) == 1
    if not fits:
        raise ArgumentError(f"norm of rows {tuple(rows.shape)}: weight, bias or residual have another width")
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    stream = rows if residual is None else torch.empty_like(out)
    added = rows if residual is None else residual
    tensors = (rows, added, weight, weight if bias is None else bias, out, stream)
    heads = rows.shape[1] if rows.dim() == 3 else 1
    of_head = (rows.stride(1), out.stride(1)) if rows.dim() == 3 else (0, 0)
    strides = (rows.stride(0), of_head[0], added.stride(0), out.stride(0), of_head[1], stream.stride(0))
    numbers = (*strides, rows.shape[-1], eps, shift, int(residual is not None), int(bias is not None))
    variant = norm_variant(rows.dtype, rows.shape[-1], centred)
    kernels.launch(variant, (len(rows), heads, 1), (*tensors, *numbers))
    return out, stream


def rotate_into_pages(
    kernels: Kernels,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    rotation: tuple[torch.Tensor, torch.Tensor],
    pools: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values to their slots, and return the queries [rows, heads, head size].

    Args:
        kernels: the kernels.
        heads: queries [rows, heads, size], keys and values [rows, key-value heads, size].
        rotation: cosines and sines, [rows, rotary size], as Transformers gives them; the places after it stay.
        pools: keys and values of the layer, [slots, key-value heads, size].
        slots: slot of each row, int64 [rows]; negative: the row is padding. Nothing is written to the pages for it, and
            its returned queries are uninitialized memory.
        interleaved: whether places are turned in neighbouring pairs; else each with that half the rotary size away.

    Raises:
        ArgumentError: shapes do not fit each other.
    """
    queries, keys, values = heads
    sizes = keys.shape[:2] == values.shape[:2] and queries.shape[::2] == keys.shape[::2]
    places = rotation[0].shape == rotation[1].shape and len(rotation[0]) == len(queries) == len(slots)
    if not sizes or not places or rotation[0].shape[1] > queries.shape[2] or slots.dtype != torch.int64:
        shapes = [tuple(each.shape) for each in (*heads, *rotation, slots)]
        raise ArgumentError(f"rotation into pages: queries, keys, values, cosines, sines, slots of {shapes}")
    cosines, sines = (each.to(queries.dtype) for each in rotation)
    if cosines.stride() != sines.stride() or cosines.stride(1) != 1 or cosines.stride(0) % 16:
        cosines, sines = cosines.contiguous(), sines.contiguous()
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    tensors = (queries, keys, values, cosines, sines, slots, out, *pools)
    rows = [stride for each in heads for stride in each.stride()[:2]]
    targets = [stride for each in pools for stride in each.stride()[:2]]
    counts = (*queries.shape[:2], keys.shape[1], cosines.shape[1])
    numbers = (*rows, cosines.stride(0), *out.stride()[:2], *targets, *counts)
    sizes = queries.shape[2], values.shape[2]
    variant = rotation_variant(queries.dtype, *sizes, interleaved, cosines.shape[1], len(queries))
    of_program = variant.constants["HEADS"]
    blocks = -(-queries.shape[1] // of_program) + -(-keys.shape[1] // of_program)
    grid = (-(-len(queries) // variant.constants["ROWS"]), blocks, 1)
    kernels.launch(variant, grid, (*tensors, *numbers))
    return out


def gated(kernels: Kernels, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) · up, [rows, width]; gate and up may be halves of one tensor.

    Raises:
        ArgumentError: shapes differ, or the activation is not one of `ACTIVATIONS`.
    """
    if gate.shape != up.shape or gate.dim() != 2 or gate.stride(1) != 1 or up.stride(1) != 1:
        raise ArgumentError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} have to be rows of one width")
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    variant = gate_variant(gate.dtype, ACTIVATIONS.index(activation))
    out = gate.new_empty(gate.shape)
    grid = (len(gate), -(-gate.shape[1] // variant.constants["BLOCK"]), 1)
    kernels.launch(variant, grid, (gate, up, out, gate.stride(0), up.stride(0), out.stride(0), gate.shape[1]))
    return out
