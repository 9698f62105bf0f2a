"""Device form of a decoder's structure: its norms, and its matrices (`device_matrices.py`), as calls of kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed.errors import PackingError
from deepspeed.inference.executors.device_matrices import (
    DenseMatrix,
    Joining,
    Matrices,
    PackedMatrix,
    SlicedRows,
    packed_matrix,
    unsupported_parts,
)
from deepspeed.inference.executors.structure import (
    GatedPart,
    HeadPart,
    LayerPart,
    MatrixPart,
    NormPart,
    Structure,
)
from deepspeed.inference.quantization.float8 import Float8Linear
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.ops.triton import rows
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import gate_variant, norm_variant
from deepspeed.ops.triton.variants import DTYPES, KernelForm
from deepspeed.tensor_parallel.layers import RowParallel
from deepspeed.zero.parameters.parameter import is_managed

TRIAL = 3  # rows of a trial of a norm


@dataclass(frozen=True)
class DeviceNorm:
    """Norm of rows, with the residual stream added before it.

    Args:
        part: the norm.
        shift: number added to the weight.
    """

    part: NormPart
    shift: float

    def __call__(
        self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of x + residual, and the sum, as `rows.norm`."""
        part = self.part
        return rows.norm(
            kernels, x, part.weight, part.bias, residual, eps=part.eps, centred=part.centred, shift=self.shift
        )

    @property
    def variant(self) -> KernelForm:
        """The kernel that it needs."""
        return norm_variant(self.part.weight.dtype, self.part.weight.numel(), self.part.centred)


@dataclass(frozen=True)
class DeviceLayer:
    """A decoder layer; fields as in `structure.LayerPart`."""

    before: DeviceNorm
    after: DeviceNorm
    qkv: Matrices
    out: Matrices
    query: DeviceNorm | None
    key: DeviceNorm | None
    gate_up: Matrices
    down: Matrices
    activation: str
    after_attention: DeviceNorm | None
    after_mlp: DeviceNorm | None

    def norms(self) -> Iterator[DeviceNorm]:
        """Yield the norms that it has."""
        every = (self.before, self.after, self.query, self.key, self.after_attention, self.after_mlp)
        yield from (norm for norm in every if norm is not None)


class DeviceStructure(Structure):
    """Parts of a model for passes on a GPU.

    Attributes:
        layers: the decoder layers.
        norm: final norm.
        head: matrix of the LM head.
        dtype: dtype of the residual stream.
        entries: number of tokens of the embedding.
    """

    def __init__(self, base: Any, lm_head: Any, blocks: list[Any]) -> None:
        super().__init__(base, lm_head, blocks)
        self.layers: list[DeviceLayer] = []
        self.dtype = torch.float32
        self.entries = 0
        users: Counter[int] = Counter()
        for module in (base, lm_head):
            users.update(id(p) for _, p in module.named_parameters(remove_duplicate=False))
        self._joining = Joining(users)

    @property
    def rounds(self) -> bool:
        """Whether products of many rows round their inputs to e4m3."""
        matrices = [each for layer in self.layers for each in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        parts = [part for each in (*matrices, self.head) for part in each.parts]
        return any(isinstance(part, PackedMatrix) and part.scaled for part in parts)

    @property
    def joined(self) -> int:
        """How many parameters were moved into joined ones."""
        return self._joining.moved

    def take_embedding(self, module: Any) -> None:
        weight = next(iter(module.parameters()), None)
        self.dtype = module.packed.dtype if hasattr(module, "packed") else getattr(weight, "dtype", torch.int8)
        if self.dtype not in DTYPES or any(map(is_managed, module.parameters())):
            raise PackingError(f"its embedding is held by an engine or is {self.dtype}")
        if hasattr(module, "slot"):
            raise PackingError("its embedding is split over ranks")
        self.entries = getattr(module, "num_embeddings", 0)

    def take_head(self, head: HeadPart) -> None:
        self.norm, self.head = self._norm(head.norm), self._matrices(head.head)

    def take_layer(self, number: int, layer: LayerPart) -> None:
        if not isinstance(layer.mlp, GatedPart):
            raise PackingError("it has mixtures of experts")
        if layer.mlp.activation >= len(rows.ACTIVATIONS):
            raise PackingError("its activation has no kernel")
        optional = {name: getattr(layer, name) for name in ("query", "key", "after_attention", "after_mlp")}
        norms = {name: None if part is None else self._norm(part) for name, part in optional.items()}
        self.layers.append(
            DeviceLayer(
                self._norm(layer.before), self._norm(layer.after), self._matrices(layer.q, layer.k, layer.v),
                self._matrices(layer.out), norms["query"], norms["key"],
                self._matrices(layer.mlp.gate, layer.mlp.up), self._matrices(layer.mlp.down),
                rows.ACTIVATIONS[layer.mlp.activation], norms["after_attention"], norms["after_mlp"],
            )
        )  # fmt: skip

    def variants(self) -> set[KernelForm]:
        """Return the kernels of rows and of packed products that the parts need."""
        needed: set[KernelForm] = {self.norm.variant, *self.head.variants}
        for layer in self.layers:
            needed |= {norm.variant for norm in layer.norms()}
            for matrices in (layer.qkv, layer.out, layer.gate_up, layer.down):
                needed |= set(matrices.variants)
            needed.add(gate_variant(self.dtype, rows.ACTIVATIONS.index(layer.activation)))
        return needed

    def _norm(self, part: NormPart) -> DeviceNorm:
        tensors = [part.weight] if part.bias is None else [part.weight, part.bias]
        if any(tensor.dtype != self.dtype or is_managed(tensor) for tensor in tensors):
            raise PackingError(f"{part.name} is held by an engine or has weights of {part.weight.dtype}")
        return DeviceNorm(part, shift_of(part))

    def _matrices(self, *parts: MatrixPart) -> Matrices:
        """Return the calls of matrices that read the same rows; one call if they are one in memory."""
        if any(part.adapted for part in parts):
            raise PackingError("it has LoRA layers")
        if parts[0].count is not None:  # stored as one
            whole = self._matrix(MatrixPart(parts[0].name, parts[0].module))
            if isinstance(whole, SlicedRows):
                raise PackingError(f"{parts[0].name} joins matrices that are split over ranks")
            return Matrices((replace(whole, sizes=tuple(part.outputs for part in parts)),))
        matrices = [self._matrix(part) for part in parts]
        joined = self._joining.join(matrices) if len(parts) > 1 else None
        return Matrices(tuple(matrices) if joined is None else (joined,))

    def _matrix(self, part: MatrixPart) -> DenseMatrix | PackedMatrix | SlicedRows:
        weight, bias = part.weight, part.bias
        if bias is not None and (bias.dtype != self.dtype or is_managed(bias)):
            raise PackingError(f"the bias of {part.name} is held by an engine or is {bias.dtype}")
        if isinstance(weight, PackedWeight | Float8Linear):
            if (reason := unsupported_parts(weight)) is not None or weight.dtype != self.dtype:
                raise PackingError(f"{part.name}: {reason or f'it was packed from a matrix of {weight.dtype}'}")
            return packed_matrix(weight, bias)
        if not isinstance(weight, torch.Tensor):
            raise PackingError(f"{part.name} has 12 bits an element")
        if is_managed(weight) or weight.dtype != self.dtype or not weight.is_contiguous():
            raise PackingError(f"{part.name} is held by an engine, is {weight.dtype}, or has gaps between its rows")
        matrix = DenseMatrix(weight, bias, (weight.shape[0],))
        if isinstance(part.module, RowParallel):
            slot = part.module.slot
            return SlicedRows(replace(matrix, bias=None), bias, slot.axis, slot.name)
        return matrix


@torch.no_grad()
def shift_of(part: NormPart) -> float:
    """Return the number that a norm adds to its weight, from a trial of its module: 0, or 1 as in Gemma.

    Raises:
        PackingError: the module computes another norm.
    """
    weight = part.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TRIAL, weight.numel(), generator=generator).to(weight.device, weight.dtype)
    output = part.module(x).float()
    values = x.float()
    values = values - values.mean(-1, keepdim=True) if part.centred else values
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + part.eps)
    for shift in (0.0, 1.0):
        wanted = values * (weight.float() + shift)
        wanted = wanted if part.bias is None else wanted + part.bias.float()
        limit = (1e-4 if weight.dtype == torch.float32 else 0.02) * (1 + wanted.abs())
        if bool(((output - wanted).abs() <= limit).all()):
            return shift
    raise PackingError(f"{part.name} computes another norm")
