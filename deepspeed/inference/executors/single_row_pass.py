"""Layers of a pass of one row: six launches a layer (norms, rotation, gate and residual are parts of the products)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.inference.executors.attention_ways import AttentionWay, LayerAttention
from deepspeed.inference.executors.device_structure import DeviceLayer, DeviceNorm, DeviceStructure
from deepspeed.inference.executors.pass_inputs import PassInputs
from deepspeed.ops.triton import single_row
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import SINGLE_ROW, single_row_variant
from deepspeed.ops.triton.single_row import NormedRow, RowMatrix
from deepspeed.ops.triton.variants import KernelForm

Turn = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _LayerMatrices:
    """Matrices of a layer, for kernels of single rows."""

    qkv: RowMatrix
    out: RowMatrix
    gate_up: RowMatrix
    down: RowMatrix


class SingleRowPass:
    """Layers of a decoder for one row.

    Args:
        structure: what `fits` has accepted.
        attention: way and description of the attention of each layer.
    """

    def __init__(self, structure: DeviceStructure, attention: Sequence[tuple[AttentionWay, LayerAttention]]) -> None:
        self._structure, self._attention = structure, attention
        self._matrices = [matrices for layer in structure.layers if (matrices := _matrices(layer)) is not None]

    @staticmethod
    def fits(structure: DeviceStructure, attention: Sequence[tuple[AttentionWay, LayerAttention]], rotary: int) -> bool:
        """Whether all layers have RMS norms before attention and MLP alone, rotate whole heads, and have matrices that
        kernels of single rows multiply. `rotary`: rotated places of a head, with the other half far; 0: neighbours.
        """
        whole = all(each.head == rotary and rotary % 16 == 0 for _, each in attention)
        return whole and bool(structure.layers) and all(_fits(layer) for layer in structure.layers)

    def variants(self) -> Iterable[KernelForm]:
        """Return the kernels that it needs."""
        forms = {matrix.form for each in self._matrices for matrix in vars(each).values()}
        return {single_row_variant(kernel, torch.bfloat16, form) for kernel in SINGLE_ROW for form in forms}

    def __call__(self, kernels: Kernels, x: torch.Tensor, turn: Turn, inputs: PassInputs, pools: Any) -> torch.Tensor:
        """Return the row after the final norm, [1, width].

        Args:
            kernels: the kernels.
            x: embedded token, bf16 [1, width].
            turn: cosines and sines of its position, [1, head size].
            inputs: inputs of the pass.
            pools: keys and values of the pages, by layer.
        """
        layers, stream = self._structure.layers, x
        row, sizes = NormedRow(layers[0].before(kernels, x)[0]), zip(layers, self._matrices, strict=True)
        for number, (layer, matrices) in enumerate(sizes):
            way, attention = self._attention[number]
            q = single_row.rotate(kernels, row, matrices.qkv, turn, pools[number], inputs.slots)
            attended = way.attend(attention, q, pools[number], inputs, None).flatten(1)
            row, stream = _added(kernels, attended, matrices.out, stream, layer.after)
            gated = single_row.gate(kernels, row, matrices.gate_up, layer.activation)
            if number + 1 < len(layers):
                row, stream = _added(kernels, gated, matrices.down, stream, layers[number + 1].before)
        # The head may be a product of torch, whose rows have to be normed.
        (change,) = layers[-1].down(kernels, gated, 0)
        return self._structure.norm(kernels, change, stream)[0]


def _added(
    kernels: Kernels, x: torch.Tensor, matrix: RowMatrix, stream: torch.Tensor, norm: DeviceNorm
) -> tuple[NormedRow, torch.Tensor]:
    part = norm.part
    return single_row.add(kernels, x, matrix, stream, part.weight.detach(), part.eps, norm.shift)


def _matrices(layer: DeviceLayer) -> _LayerMatrices | None:
    every = [each.of_row for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return None if any(each is None for each in every) else _LayerMatrices(*every)  # type: ignore[arg-type]


def _fits(layer: DeviceLayer) -> bool:
    other = (layer.query, layer.key, layer.after_attention, layer.after_mlp)
    norms = (layer.before.part, layer.after.part)
    plain = all(each is None for each in other) and not any(part.centred or part.bias is not None for part in norms)
    return plain and _matrices(layer) is not None
