"""Placement of a parameter on the device mesh: its slice of the global tensor, and its copies on other ranks.

The global tensor is the tensor of the unsplit model. Layers that split a model (tensor, pipeline, expert parallelism)
set the placement with `place`; all other parameters have the default. Gradient reduction, norms, checkpoints, memory
estimates and `safe_get_*` depend on it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from deepspeed.errors import ArgumentError

_MARK = "ds_placement"


class Relation(enum.Enum):
    """Relation between the tensors that the ranks along one mesh axis have of a parameter."""

    SHARDED_STATE = "zero"  # data parallelism: one tensor, sharded by ZeRO, with gradients summed over the ranks
    SHARD = "cut"  # each rank has another slice of the global tensor
    PARTIAL = "partial"  # copies with different gradients, which are summed over the ranks
    REPLICATE = "equal"  # copies with equal gradients
    ABSENT = "absent"  # only this rank has the parameter


@dataclass(frozen=True)
class Cut:
    """Segments that this rank has of one dimension of the global tensor.

    Args:
        dim: index of the dimension.
        size: size of the global tensor along the dimension.
        segments: pairs (start in the global dimension, length), in the order of the local tensor. A start of -1 is
            padding, which has no gradient and does not count in norms, sizes or checkpoints.

    Raises:
        ArgumentError: a segment is empty or exceeds the dimension.
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
        """Return the size of this rank's tensor along the dimension, including padding."""
        return sum(length for _, length in self.segments)

    @property
    def padding(self) -> int:
        """Return the number of padding positions in `local_size`."""
        return sum(length for start, length in self.segments if start < 0)


@dataclass(frozen=True)
class Placement:
    """Placement of one parameter on the device mesh.

    Args:
        cuts: segments of each dimension that is split.
        relations: relation by name of the mesh axis. Default: SHARDED_STATE along data-parallel axes; SHARD along `tp`
            with `cuts`, else REPLICATE; ABSENT along `pp`.
        stages: known pipeline stages that have a copy of a tied weight; `find_tied` adds the stages that it finds.
        ep: expert-parallel size: number of ranks over which the layer's experts are divided; 1: no division.
    """

    cuts: tuple[Cut, ...] = ()
    relations: Mapping[str, Relation] = field(default_factory=dict)  # plain, so that placed tensors can be pickled
    stages: frozenset[int] = frozenset()
    ep: int = 1

    def global_shape(self, local: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the global tensor.

        Args:
            local: shape of this rank's tensor, including padding.

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
    """Set the placement of a parameter or buffer; call this before `deepspeed.initialize`.

    Args:
        tensor: this rank's tensor; the placement becomes an attribute of it.
        placement: placement on the mesh.

    Returns:
        `tensor`.

    Raises:
        ArgumentError: the cuts do not match the tensor's shape.
    """
    placement.global_shape(tensor.shape)
    setattr(tensor, _MARK, placement)
    return tensor


def placement_of(tensor: torch.Tensor) -> Placement:
    return getattr(tensor, _MARK, WHOLE)
