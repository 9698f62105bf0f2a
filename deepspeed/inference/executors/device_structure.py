"""Device form of a decoder's structure: its matrices and norms as calls of torch's products and of the GPU kernels.

Matrices that read the same rows (queries, keys and values; gate and up) become one matrix in memory where their
parameters are plain and belong to nobody else: the parameters stay the same objects, and their data become views of the
joined matrix. Elsewhere there is one product for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.comm.collectives.autograd import gathered, sum_in_place
from deepspeed.comm.collectives.collectives import sum_in_rank_order
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import PackingError
from deepspeed.inference.executors.structure import (
    GatedPart,
    HeadPart,
    LayerPart,
    MatrixPart,
    NormPart,
    Structure,
)
from deepspeed.inference.quantization.packed_weight import PackedWeight
from deepspeed.ops.triton import rows
from deepspeed.ops.triton.attention import Kernels
from deepspeed.ops.triton.row_variants import gate_variant, norm_variant, product_variants
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
class DenseMatrix:
    """A matrix [outputs, inputs] with an optional bias [outputs], for torch's product.

    Attributes:
        sizes: outputs of the matrices that it joins.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    sizes: tuple[int, ...]

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the outputs of each joined matrix, [rows, outputs], for x [rows, inputs].

        `block`: rows of a product, a divisor of the number of rows; 0: all rows in one.
        """
        if not block or len(x) == block:
            out = F.linear(x, self.weight, self.bias)
        else:
            out = x.new_empty(len(x), len(self.weight))
            for part, target in zip(x.split(block), out.split(block), strict=True):
                if self.bias is None:
                    torch.mm(part, self.weight.t(), out=target)
                else:
                    torch.addmm(self.bias, part, self.weight.t(), out=target)
        return [out] if len(self.sizes) == 1 else list(out.split(self.sizes, 1))

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that it needs."""
        return []


@dataclass(frozen=True)
class SlicedRows:
    """A row-parallel matrix: some of the inputs on each rank. All ranks of the axis call it together.

    Args:
        matrix: this rank's slice [outputs, own inputs], without bias.
        bias: [outputs], equal on all ranks, or None.
        axis: the ranks.
        name: name of the layer in error messages.
    """

    matrix: DenseMatrix
    bias: torch.Tensor | None
    axis: Axis
    name: str

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the sum of the ranks' products, [rows, outputs], for own inputs x [rows, own inputs].

        With a `block`, a row's bits do not depend on the number of rows: more than two ranks add in rank order, since a
        backend's all-reduce adds in an order that depends on the place in the message.
        """
        (out,) = self.matrix(kernels, x, block)
        label = f"sum of {self.name}"
        if block and self.axis.size > 2:
            every = gathered(out.view(-1), self.axis, 0, label=label).view(self.axis.size, -1)
            sum_in_rank_order(every.unbind(), out.view(-1), 1.0, add=False)
        else:
            sum_in_place(out, self.axis, label)
        return [out if self.bias is None else out + self.bias]

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that it needs."""
        return []


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of packed integers, for the package's product."""

    packed: PackedWeight
    bias: torch.Tensor | None

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """As `DenseMatrix`; rows never depend on each other here."""
        offsets = self.packed.offset if self.packed.form.num_bits == 4 else None
        return [rows.packed_product(kernels, x, self.packed.integers, self.packed.scale, offsets, self.bias)]

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that it needs."""
        return [*product_variants(self.packed.dtype, self.packed.form.num_bits)]


@dataclass(frozen=True)
class Matrices:
    """Matrices that read the same rows, one after another."""

    parts: tuple[DenseMatrix | IntegerMatrix | SlicedRows, ...]

    def __call__(self, kernels: Kernels, x: torch.Tensor, block: int) -> list[torch.Tensor]:
        """Return the outputs of each matrix."""
        return [out for part in self.parts for out in part(kernels, x, block)]

    @property
    def variants(self) -> list[KernelForm]:
        """The kernels that they need."""
        return [variant for part in self.parts for variant in part.variants]


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
        joined: how many matrices were moved into joined ones.
    """

    def __init__(self, base: Any, lm_head: Any, blocks: list[Any]) -> None:
        super().__init__(base, lm_head, blocks)
        self.layers: list[DeviceLayer] = []
        self.dtype = torch.float32
        self.entries = self.joined = 0
        self._users: Counter[int] = Counter()
        for module in (base, lm_head):
            self._users.update(id(p) for _, p in module.named_parameters(remove_duplicate=False))

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
        for part in parts:
            if part.adapted:
                raise PackingError("it has LoRA layers")
        if parts[0].count is not None:  # stored as one
            whole = self._matrix(MatrixPart(parts[0].name, parts[0].module))
            if not isinstance(whole, DenseMatrix):
                raise PackingError(f"{parts[0].name} joins packed matrices")
            return Matrices((DenseMatrix(whole.weight, whole.bias, tuple(part.outputs for part in parts)),))
        matrices = [self._matrix(part) for part in parts]
        if len(parts) > 1 and all(isinstance(matrix, DenseMatrix) for matrix in matrices):
            joined = self._join([part.module for part in parts])
            if joined is not None:
                return Matrices((joined,))
        return Matrices(tuple(matrices))

    def _matrix(self, part: MatrixPart) -> DenseMatrix | IntegerMatrix | SlicedRows:
        weight, bias = part.weight, part.bias
        if bias is not None and (bias.dtype != self.dtype or is_managed(bias)):
            raise PackingError(f"the bias of {part.name} is held by an engine or is {bias.dtype}")
        if isinstance(weight, PackedWeight):
            if (reason := unsupported_integers(weight)) is not None or weight.dtype != self.dtype:
                raise PackingError(f"{part.name}: {reason or f'its integers are of a matrix of {weight.dtype}'}")
            return IntegerMatrix(weight, bias)
        if not isinstance(weight, torch.Tensor):
            raise PackingError(f"{part.name} has 12 bits an element")
        if is_managed(weight) or weight.dtype != self.dtype or not weight.is_contiguous():
            raise PackingError(f"{part.name} is held by an engine, is {weight.dtype}, or has gaps between its rows")
        if isinstance(part.module, RowParallel):
            slot = part.module.slot
            return SlicedRows(DenseMatrix(weight, None, (weight.shape[0],)), bias, slot.axis, slot.name)
        return DenseMatrix(weight, bias, (weight.shape[0],))

    @torch.no_grad()
    def _join(self, modules: Sequence[nn.Linear]) -> DenseMatrix | None:
        """Return the matrices of layers as one, and make it of them if that is possible; else None."""
        biases = [module.bias for module in modules]
        if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
            return None
        groups = [[module.weight for module in modules], *([biases] if biases[0] is not None else [])]
        adjacent = [one_in_memory(group) for group in groups]
        if any(whole is None for whole in adjacent):
            if not all(self._own(tensor) for group in groups for tensor in group):
                return None
            adjacent = [self._moved(group) for group in groups]
        bias = adjacent[1] if len(adjacent) > 1 else None
        return DenseMatrix(adjacent[0], bias, tuple(len(module.weight) for module in modules))  # type: ignore[arg-type]

    def _own(self, tensor: Any) -> bool:
        """Whether a parameter's memory is its own, and nothing else is known to hold its address."""
        alone = tensor.untyped_storage().nbytes() == tensor.nbytes and self._users[id(tensor)] == 1
        plain = type(tensor) is nn.Parameter and not tensor.is_inference() and tensor.grad is None
        plain = plain and (tensor.device.type != "cpu" or not tensor.is_shared())
        return alone and plain

    def _moved(self, parameters: Sequence[Any]) -> torch.Tensor:
        whole = torch.cat([parameter.data for parameter in parameters])
        for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = part
            self.joined += 1
        return whole


def one_in_memory(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return contiguous tensors with equal trailing sizes as one view, if they follow each other in one storage."""
    first, storage = tensors[0].detach(), tensors[0].untyped_storage().data_ptr()
    place = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == storage and tensor.data_ptr() == place
        if not same or not tensor.is_contiguous() or tensor.shape[1:] != first.shape[1:]:
            return None
        place += tensor.nbytes
    size = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset())


def unsupported_integers(packed: PackedWeight) -> str | None:
    """Return the reason why packed integers have no product on GPUs, or None."""
    form, count = packed.form, packed.scale.numel()
    if is_managed(packed.integers):
        return "an engine holds its packed matrices"
    if form.axis != 2:
        return "its scales are across its rows"
    if form.num_bits == 8 and form.symmetric and count == packed.shape[0]:
        return None
    if form.num_bits == 4 and count * 32 == packed.shape.numel():
        return None
    return "its integers are neither symmetric int8 with one scale a row nor 4 bits in groups of 32"


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
