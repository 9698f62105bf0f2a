"""Linear and embedding layers with a packed matrix, as replacements of the original layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.inference.quantization.lossless_bf16 import LosslessWeight, Room
from deepspeed.inference.quantization.packed_weight import PackedWeight


class PackedLinear(nn.Module):
    """Linear layer with a packed matrix [outputs, inputs] and an optional bias [outputs]."""

    def __init__(self, packed: PackedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias
        self.out_features, self.in_features = packed.shape

    @property
    def weight(self) -> torch.Tensor:
        """The matrix [outputs, inputs]; each access unpacks it again."""
        return self.packed.dense()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map [..., inputs] to [..., outputs]."""
        return self.packed.product(inputs, self.bias)


class PackedEmbedding(nn.Module):
    """Embedding with a packed table [entries, width].

    Args:
        packed: the table.
        padding_idx: stored as an attribute only; it would affect gradients, and packed tables have none.
        scale: factor of the output; None: 1.
    """

    def __init__(self, packed: PackedWeight, padding_idx: int | None, scale: float | None) -> None:
        super().__init__()
        self.packed, self.padding_idx, self.embed_scale = packed, padding_idx, scale
        self.num_embeddings, self.embedding_dim = packed.shape

    @property
    def weight(self) -> torch.Tensor:
        """The table [entries, width]; each access unpacks it again."""
        return self.packed.dense()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map integer indices [...] to rows [..., width]."""
        rows = self.packed.rows(input)
        return rows if self.embed_scale is None else rows * self.embed_scale


class Whole(nn.Module):
    """Mixin for modules with matrices packed in 12 bits; the `state_dict` has the unpacked matrices."""

    packed: Any

    def matrices(self) -> Iterator[tuple[str, LosslessWeight, torch.Size]]:
        """Yield (name, packed matrix, shape) of the tensors that a `state_dict` has instead of packed parts."""
        yield "weight", self.packed, self.packed.shape

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, packed, shape in self.matrices():
            matrix = packed.dense_shared()
            destination[f"{prefix}{name}"] = matrix if matrix.shape == shape else matrix.view(shape)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(  # type: ignore[override]
        self, state: Any, prefix: str, metadata: Any, strict: bool, missing: list[str], strange: list[str], errors: Any
    ) -> None:
        super()._load_from_state_dict(state, prefix, metadata, strict, missing, strange, errors)
        for key, packed, shape in self.matrices():
            name = f"{prefix}{key}"
            value = state.get(name)
            if value is None:
                missing.append(name)
            elif value.shape != shape:
                errors.append(f"size mismatch for {name}: {tuple(value.shape)} there, {tuple(shape)} here")
            else:
                strange[:] = [other for other in strange if other != name]
                value = value.detach().cpu().view(packed.shape)
                halves = value.to(torch.bfloat16)
                if packed.dtype == torch.bfloat16 or torch.equal(halves.to(value.dtype), value):
                    packed.pack(halves, Room())
                else:  # a whole matrix of that dtype would keep them
                    errors.append(
                        f"{name} is packed in bf16, which does not hold the values of {value.dtype} given for it"
                    )


class LosslessLinear(Whole, PackedLinear):
    """Linear layer with a bf16 matrix [outputs, inputs] packed in 12 bits, without loss."""


class LosslessEmbedding(Whole, PackedEmbedding):
    """Embedding with a bf16 table [entries, width] packed in 12 bits, without loss."""


def is_transposed(module: nn.Module) -> bool:
    """Whether a layer is GPT-2's `Conv1D`: a linear layer with a matrix [inputs, outputs]."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "weight", None), nn.Parameter)


def can_pack(module: Any) -> bool:
    """Whether a layer can be packed: a `Conv1D`, or a floating-point Linear or Embedding with torch's own `forward`.

    An embedding with another `forward` can be packed if it has a numeric `embed_scale`.
    """
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
    """Return the matrix of a layer: [outputs, inputs], or [entries, width] of an embedding."""
    weight: Any = module.weight
    return weight.t() if is_transposed(module) else weight


def packed_layer(module: Any, packed: PackedWeight | LosslessWeight) -> nn.Module:
    """Create the replacement of a Linear, Embedding or `Conv1D` that uses the packed form of its matrix."""
    whole: Any = isinstance(packed, LosslessWeight)
    if isinstance(module, nn.Embedding):
        scale = getattr(module, "embed_scale", None)
        kind: Any = LosslessEmbedding if whole else PackedEmbedding
        return kind(packed, module.padding_idx, scale if isinstance(scale, int | float) else None)
    linear: Any = LosslessLinear if whole else PackedLinear
    return linear(packed, module.bias)
