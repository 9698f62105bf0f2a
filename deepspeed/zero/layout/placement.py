"""Placement of a parameter on the mesh: its part of the global tensor, and the relation of its copies.

Gradient sums, norm, overflow, edits, checkpoints, estimators and public accessors read a parameter's row of this table.
Layers that split a model set it with `place`; all other parameters have the default row.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from deepspeed.errors import ArgumentError

_MARK = "ds_placement"


class Relation(enum.Enum):
    """Relation of a parameter's copies on the ranks of one axis."""

    SHARDED_STATE = "zero"  # one tensor, split by ZeRO or summed over the ranks as data parallelism does
    SHARD = "cut"  # each rank has another box of the global tensor
    PARTIAL = "partial"  # copies whose gradients are parts: to be summed over the axis
    REPLICATE = "equal"  # copies with equal gradients: nothing to do
    ABSENT = "absent"  # the other ranks have no copy


@dataclass(frozen=True)
class Cut:
    """This rank's segments of one dim of the global tensor.

    Args:
        dim: the dim.
        size: length of the global tensor along the dim.
        segments: (start in the global dim, length), in local order. A start of -1 is padding, which is not part of the
            global tensor: it has no gradient, and does not count in norms, sizes or checkpoints.
    """

    dim: int
    size: int
    segments: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        for start, length in self.segments:
            if length <= 0 or start < -1 or (start >= 0 and start + length > self.size):
                raise ArgumentError(
                    f"segment ({start}, {length}) of a split does not lie in dim {self.dim} of {self.size} elements"
                )

    @property
    def local_size(self) -> int:
        """Return the length of this rank's tensor along the dim, padding included."""
        return sum(length for _, length in self.segments)

    @property
    def padding(self) -> int:
        """Return the padding in `local_size`."""
        return sum(length for start, length in self.segments if start < 0)


@dataclass(frozen=True)
class Placement:
    """Placement of one parameter on the mesh.

    Args:
        cuts: at most one per dim; dims without one are whole.
        relations: relation by mesh axis; the default is ZERO for axes of data parallelism, else EQUAL.
        stages: pipeline stages that have a copy, if known; otherwise ranks ask each other.
        ep: ranks of dp_shard x sp that divide the layer's experts; 1: each rank has all experts.
    """

    cuts: tuple[Cut, ...] = ()
    relations: Mapping[str, Relation] = field(default_factory=dict)  # plain, so that placed tensors can be pickled
    stages: frozenset[int] = frozenset()
    ep: int = 1

    def global_shape(self, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the global tensor.

        Args:
            local: shape of this rank's tensor.

        Raises:
            ArgumentError: the cuts do not match the shape.
        """
        shape = list(local)
        for cut in self.cuts:
            if not 0 <= cut.dim < len(shape) or shape[cut.dim] != cut.local_size:
                raise ArgumentError(
                    f"a split of {cut.local_size} elements along dim {cut.dim} does not fit a tensor of shape "
                    f"{tuple(local)}"
                )
            shape[cut.dim] = cut.size
        return tuple(shape)


WHOLE = Placement()


def place(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Set the placement of a parameter or buffer, before `initialize`; returns the tensor.

    Raises:
        ArgumentError: the cuts do not match the tensor's shape.
    """
    placement.global_shape(tensor.shape)
    setattr(tensor, _MARK, placement)
    return tensor


def placement_of(tensor: torch.Tensor) -> Placement:
    return getattr(tensor, _MARK, WHOLE)
