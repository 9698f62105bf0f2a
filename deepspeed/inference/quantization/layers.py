"""Layers over a packed matrix, in the place of those that held it whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.inference.quantization.packed import PackedWeight


class PackedLinear(nn.Module):
    """A linear layer whose matrix is packed.

    Args:
        packed: [outputs, inputs].
        bias: [outputs], or None.
    """

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias
        self.out_features, self.in_features = packed.shape

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, unpacked anew at each look."""
        return self.packed.dense()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        return self.packed.product(inputs, self.bias)


class PackedEmbedding(nn.Module):
    """An embedding whose table is packed.

    Args:
        packed: [entries, width].
        padding_idx: as `nn.Embedding`'s; has no effect without gradients.
        scale: what some models multiply the rows with.
    """

    def __init__(self, packed: PackedWeight, padding_idx: int | None, scale: float | None) -> None:
        super().__init__()
        self.packed, self.padding_idx, self.embed_scale = packed, padding_idx, scale
        self.num_embeddings, self.embedding_dim = packed.shape

    @property
    def weight(self) -> torch.Tensor:
        """The table, unpacked anew at each look."""
        return self.packed.dense()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] of integers to [..., width]."""
        found = self.packed.rows(input)
        return found if self.embed_scale is None else found * self.embed_scale


def is_transposed(module: nn.Module) -> bool:
    """Whether it is GPT-2's `Conv1D`: a linear layer whose matrix is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), nn.Parameter)


def can_pack(module: Any) -> bool:
    """Whether it is a layer whose matrix can be packed, with a forward that nobody has changed."""
    if is_transposed(module):
        return True
    plain: Any = (
        nn.Linear if isinstance(module, nn.Linear) else nn.Embedding if isinstance(module, nn.Embedding) else None
    )
    if plain is None or not module.weight.is_floating_point():
        return False
    scaled = plain is nn.Embedding and isinstance(getattr(module, "embed_scale", None), int | float)
    return type(module).forward is plain.forward or scaled


def matrix_of(module: Any) -> torch.Tensor:
    """Its matrix as [outputs, inputs], or [entries, width]."""
    weight: Any = module.weight
    return weight.t() if is_transposed(module) else weight


def packed_layer(module: Any, packed: PackedWeight) -> nn.Module:
    """What stands in the place of a layer."""
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "embed_scale", None)
        return PackedEmbedding(packed, module.padding_idx, scale if isinstance(scale, int | float) else None)
    return PackedLinear(packed, module.bias)
