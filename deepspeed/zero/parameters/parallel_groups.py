"""The ranks of a parameter group: those that shard it, those that replicate it, those that are counted.

A signature is what a parameter's row (`zero/layout/placement`) says of the model dims of the mesh; parameters of one
group share it. Relations turn signatures into ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.torch_api import object_exchange
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import DATA, DIMS, REPLICATED, SHARD, Mesh
from deepspeed.errors import ArgumentError, MeshError
from deepspeed.zero.layout.placement import Relation, placement_of
from deepspeed.zero.parameters.parameter import is_managed

# Where a parameter without a row of its own stands: every rank along `tp` has an equal copy, other stages have none.
_DEFAULTS = {"tp": Relation.REPLICATE, "pp": Relation.ABSENT}
# By these names Megatron's layers say that a parameter is a slice, and pipelines of upstream's that a copy is not the
# one to be counted.
_SLICED = ("model_parallel", "tensor_model_parallel")
_COUNTED_ELSEWHERE = "ds_pipe_replicated"
_COPIED = (Relation.REPLICATE, Relation.PARTIAL)

Signature = tuple[tuple[Relation, Relation], str]  # relations to (tp, pp), the tied weight's name or ""


DATA_PARALLEL: Signature = ((Relation.REPLICATE, Relation.ABSENT), "")


def signature_of(tensor: torch.Tensor, name: str) -> Signature:
    """What parameters of one group have in common beside their dtype; a tied weight has a group of its own."""
    placement = placement_of(tensor)
    sliced = bool(placement.cuts) or any(getattr(tensor, mark, False) for mark in _SLICED)
    tp = placement.relations.get("tp", Relation.SHARD if sliced else _DEFAULTS["tp"])
    pp = placement.relations.get("pp", _DEFAULTS["pp"])
    if getattr(tensor, _COUNTED_ELSEWHERE, False):
        pp = Relation.REPLICATE
    return (tp, pp), name if pp is Relation.PARTIAL else ""


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """The ranks of an engine's mesh by what they share.

    Args:
        mesh: all of it.
        everyone: all ranks.
        dp_sp_group: ranks with the same slice of the model, whose gradients are summed.
        data: those of them that see other samples.
        shard: those of them that hold one copy of the split state together.
        model_replica_group: ranks that hold one copy of the whole model's state together.
    """

    mesh: Mesh
    everyone: Axis
    dp_sp_group: Axis
    data: Axis
    shard: Axis
    model_replica_group: Axis


def axes_of(mesh: Mesh) -> ParallelGroups:
    """The axes that an engine asks for again and again."""
    one_copy = mesh.axis("pp", *SHARD, "tp")
    return ParallelGroups(mesh, mesh.axis(*DIMS), mesh.axis(*REPLICATED), mesh.axis(*DATA), mesh.axis(*SHARD), one_copy)


@dataclass(frozen=True, eq=False)
class GroupRanks:
    """The ranks around one group of parameters.

    Args:
        shard: those that split its state.
        everyone: all that have these parameters, with equal values.
        copies: those with the same slice, whose gradients are parts of one sum; None where a slice exists once.
        counted: whether this rank's slice is the one, of equal ones on several model ranks, that stands in norms.
        first: whether it is the one, of all equal ones, that stands in checkpoints.
        channels: of messages along `shard` and `copies`, where they had to be opened beforehand; None: when needed.
        peers: for any rank, the ranks that stand to it as `everyone` stands to this one.
        slices: ranks that have the other slices of the same tensors; None where a tensor is whole.
        across_stages: other stages of a pipeline have copies: those are elsewhere in their schedule.
    """

    shard: Axis
    everyone: Axis
    copies: Axis | None = None
    counted: bool = True
    first: bool = True
    channels: tuple[int, int] | None = None
    peers: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    slices: Axis | None = None
    across_stages: bool = False

    @property
    def summing(self) -> list[Axis]:
        """The axes that a round of gradients travels along."""
        return [self.shard] if self.copies is None else [self.shard, self.copies]

    def position(self, rank: int) -> int:
        """Where this rank's counterpart of a global rank stands among `everyone`.

        Raises:
            ArgumentError: it has none.
        """
        row = self.everyone.ranks if rank in self.everyone.ranks else self.peers.get(rank, ())
        if len(row) != self.everyone.size:
            raise ArgumentError(f"modifier_rank {rank!r} is not among the ranks {list(self.everyone.ranks)}")
        return row.index(rank)

    def open_channels(self) -> tuple[int, int]:
        """Numbers for one group's messages along `shard` and `copies`."""
        return self.channels or (self.shard.channel(), self.copies.channel() if self.copies is not None else 0)


def alone(axis: Axis) -> GroupRanks:
    """Where the ranks of one axis hold everything together."""
    return GroupRanks(axis, axis)


class RankResolver:
    """From signatures to ranks, on one mesh. All ranks make it together.

    Args:
        mesh: of the engine.
        splits: each rank holds a slice of the optimizer's state only.
        tied: stages that hold each tied weight, by name; the same on all ranks.
        signatures: of the tied weights that this rank has, by name.
    """

    def __init__(
        self,
        mesh: Mesh,
        splits: bool,
        tied: Mapping[str, frozenset[int]] = MappingProxyType({}),
        signatures: Mapping[str, Signature] = MappingProxyType({}),
    ) -> None:
        self._mesh, self._splits, self._tied = mesh, splits, tied
        self.stages = mesh.size("pp")
        self._known: dict[Signature, GroupRanks] = {}
        mesh.axis("tp")
        for more in (("dp_replicate",), REPLICATED):  # every rank asks for every axis, whichever it stands on
            mesh.axis(*more, "tp")
            for stages in sorted({tuple(sorted(ranks)) for ranks in tied.values()}):
                mesh.axis(*more, "pp", stages=frozenset(stages))
                mesh.axis(*more, "pp", "tp", stages=frozenset(stages))
        for name in sorted(signatures):  # stages meet their tied weights in different orders
            ranks = self._find(signatures[name])
            self._known[signatures[name]] = replace(ranks, channels=ranks.open_channels())

    def holders(self, signature: Signature) -> GroupRanks:
        """The ranks around parameters of a signature."""
        if signature not in self._known:
            self._known[signature] = self._find(signature)
        return self._known[signature]

    def _find(self, signature: Signature) -> GroupRanks:
        mesh, ((tp, pp), name) = self._mesh, signature
        coordinates, stages = mesh.coordinates, self._tied.get(name)
        dims = [dim for dim, relation in (("pp", pp), ("tp", tp)) if relation is Relation.PARTIAL]
        everyone = mesh.axis(*REPLICATED, *dims, stages=stages)
        copies = mesh.axis("dp_replicate", *dims, stages=stages)
        main = (pp is not Relation.REPLICATE) and (tp is not Relation.REPLICATE or coordinates["tp"] == 0)
        once = (
            main
            and (stages is None or coordinates["pp"] == min(stages))
            and (tp is not Relation.PARTIAL or coordinates["tp"] == 0)
        )
        peers = {rank: row for row in mesh.rows(*REPLICATED, *dims, stages=stages) for rank in row}
        first = once and coordinates["dp_replicate"] == 0
        slices = mesh.axis("tp") if tp is Relation.SHARD else None
        if not self._splits:  # whole everywhere: one sum over all that have them, of which each rank counts a share
            return GroupRanks(everyone, everyone, None, main, first, None, peers, slices, "pp" in dims)
        shard, others = mesh.axis(*SHARD), copies if copies.size > 1 else None
        return GroupRanks(shard, everyone, others, once, first, None, peers, slices, "pp" in dims)


# -- copies of one model over several slices and stages --------------------------------------------------------------


def signatures_of(mesh: Mesh, names: Mapping[Parameter, str]) -> dict[Parameter, Signature]:
    """The signature of every parameter; one for all where every rank holds the whole model."""
    if mesh.is_data_parallel:
        return dict.fromkeys(names, DATA_PARALLEL)
    return {param: signature_of(param, name) for param, name in names.items()}


def find_tied(
    mesh: Mesh, names: Mapping[Parameter, str], signatures: Mapping[Parameter, Signature]
) -> dict[str, frozenset[int]]:
    """The stages that hold each tied weight, by its name. All ranks call together.

    Raises:
        MeshError: ranks that should have equal copies of a parameter have not.
    """
    if mesh.is_data_parallel:
        return {}
    local_names = [
        (name, tuple(param.shape), str(param.dtype), signatures[param][1] != "")
        for param, name in names.items()
        if signatures[param][0][0] in _COPIED or signatures[param][1]
    ]
    everyone = object_exchange.current.gather_present(mesh.axis(*DIMS), (mesh.coordinates["pp"], local_names))
    declared = {name: placement_of(param).stages for param, name in names.items()}  # of stages that are not there too
    tied: dict[str, tuple[int, Any, set[int]]] = {}
    first: dict[int, int] = {}  # by stage
    for rank, (stage, rows) in everyone.items():
        other = first.setdefault(stage, rank)
        _compare((rank, rows), (other, everyone[other][1]))
        for row in (row for row in rows if row[3]):
            other, wanted, stages = tied.setdefault(row[0], (rank, row, set(declared.get(row[0], ()))))
            _compare((rank, [row]), (other, [wanted]))
            stages.add(stage)
    return {name: frozenset(stages) for name, (_, _, stages) in tied.items()}


def _compare(first: tuple[int, Sequence[Any]], other: tuple[int, Sequence[Any]]) -> None:
    for a, b in itertools.zip_longest(first[1], other[1]):
        if a != b:
            (name, shape, dtype, _), rank = (a, first[0]) if a else (b, other[0])
            raise MeshError(
                f"ranks {first[0]} and {other[0]} should hold equal copies of the same parameters: '{name}' {shape} "
                f"{dtype} of rank {rank} has no counterpart. Give every slice of a matrix its row with "
                f"deepspeed.zero.layout.placement.place"
            )


def equalise(
    mesh: Mesh,
    names: Mapping[Parameter, str],
    signatures: Mapping[Parameter, Signature],
    tied: Mapping[str, frozenset[int]],
) -> None:
    """Copies on several model ranks take the values of the first of them. All ranks call together."""
    label = "broadcast of a copied parameter"
    copied = [p for p in names if signatures[p][0][0] in _COPIED and not is_managed(p)]
    if mesh.size("tp") > 1:
        broadcast_tensors(mesh.axis("tp"), copied, label)
    own = {names[param]: param for param in names if signatures[param][1]}
    for name in sorted(tied):
        axis = mesh.axis("pp", stages=tied[name])
        if name in own and not is_managed(own[name]):
            broadcast_tensors(axis, [own[name]], label)
