"""Process groups of a run: device mesh, and for each parameter group the ranks that shard and replicate it.

A signature is the part of a parameter's placement (`zero/layout/placement`) that concerns tensor, pipeline and expert
parallelism. It determines the ranks, and is equal for all parameters of a group.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch.nn import Parameter

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.torch_api import object_exchange
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import (
    DATA,
    DIMS,
    MODEL,
    REPLICATED,
    SHARD,
    Asked,
    Mesh,
    mesh_for,
    ranks_started,
    resolve,
)
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, MeshError
from deepspeed.zero.layout.placement import Relation, placement_of
from deepspeed.zero.parameters.parameter import is_managed

# Defaults of a parameter's placement: each rank along `tp` has an equal copy, and other stages have none.
_DEFAULTS = {"tp": Relation.REPLICATE, "pp": Relation.ABSENT}
# Attributes by which Megatron's layers mark a parameter as a slice, and upstream DeepSpeed's pipelines mark a copy that
# does not count in norms.
_SLICED = ("model_parallel", "tensor_model_parallel")
_COUNTED_ELSEWHERE = "ds_pipe_replicated"
_COPIED = (Relation.REPLICATE, Relation.PARTIAL)

Signature = tuple[tuple[Relation, Relation], str, int]  # relations along (tp, pp), name of a tied weight or "", ep


DATA_PARALLEL: Signature = ((Relation.REPLICATE, Relation.ABSENT), "", 1)


def signature_of(tensor: torch.Tensor, name: str) -> Signature:
    """Return the signature of a parameter or buffer.

    Args:
        tensor: parameter or buffer.
        name: its name, part of the signature if several pipeline stages share the weight, which then has its own group.
    """
    placement = placement_of(tensor)
    sliced = bool(placement.cuts) and placement.ep == 1 or any(getattr(tensor, mark, False) for mark in _SLICED)
    tp = placement.relations.get("tp", Relation.SHARD if sliced else _DEFAULTS["tp"])
    pp = placement.relations.get("pp", _DEFAULTS["pp"])
    if getattr(tensor, _COUNTED_ELSEWHERE, False):
        pp = Relation.REPLICATE
    return (tp, pp), name if pp is Relation.PARTIAL else "", placement.ep


def name_on_all_ranks(tensor: torch.Tensor, name: str) -> str:
    """Return a parameter's name with `*` in place of an expert's index, so that it is equal on all ranks."""
    if placement_of(tensor).relations.get("ep") is not Relation.ABSENT:
        return name
    return re.sub(r"(?<=deepspeed_experts\.)\d+", "*", name)


def find_mesh(
    config: DeepSpeedConfig | None, mpu: Any, mesh_param: Any, device: torch.device, also: Iterable[Asked] = ()
) -> Mesh:
    """Create the device mesh of an engine from configuration, `mesh_param` and `mpu`. All ranks must call this.

    Args:
        config: configuration, see `DeepSpeedConfig.for_init`; None: no sizes from it.
        mpu: model-parallel unit of Megatron; None: no unit.
        mesh_param: sizes by axis name, or (data-parallel ranks, sequence-parallel ranks); None: no sizes.
        device: device for collectives.
        also: further sizes: (axis name, size, origin for messages).

    Raises:
        ArgumentError: `mesh_param` has another form.
        MeshError: the sizes are inconsistent, or do not match the number of ranks.
    """
    sizes = [*(config.mesh_sizes() if config is not None else ())]
    if isinstance(mesh_param, (tuple, list)) and len(mesh_param) == 2:
        mesh_param = dict(zip(("dp", "sp"), mesh_param, strict=True))
    if mesh_param is not None:
        if not isinstance(mesh_param, Mapping) or not all(type(size) is int for size in mesh_param.values()):
            raise ArgumentError(
                f"mesh_param is {mesh_param!r}; it takes sizes by axis name, as {{'dp_shard': 4}}, or (data-parallel "
                f"ranks, ranks of a sequence)"
            )
        sizes += [(str(dim), size, "mesh_param") for dim, size in mesh_param.items() if size != 1 or dim not in MODEL]
    sizes += also
    if mpu is not None:
        return Mesh.of_unit(mpu, sizes, device)
    return mesh_for(resolve(ranks_started(), sizes), None, device)


@dataclass(frozen=True, eq=False)
class ParallelGroups:
    """Process groups of an engine that this rank belongs to.

    Args:
        mesh: device mesh.
        everyone: all ranks.
        dp_sp_group: data- and sequence-parallel ranks with the same model slice, over which gradients are summed.
        data: ranks of `dp_sp_group` with different samples.
        shard: ranks of `dp_sp_group` over which ZeRO shards the state (with hybrid sharding, a part of them).
        model_replica_group: ranks that together have one copy of the state of the whole model.
    """

    mesh: Mesh
    everyone: Axis
    dp_sp_group: Axis
    data: Axis
    shard: Axis
    model_replica_group: Axis

    @property
    def whole_model_agrees(self) -> bool:
        """Return whether `dp_sp_group` has all ranks of a model copy: no tensor or pipeline parallelism."""
        return set(self.model_replica_group.ranks) <= set(self.dp_sp_group.ranks)


def axes_of(mesh: Mesh) -> ParallelGroups:
    one_copy = mesh.axis("pp", *SHARD, "tp")
    return ParallelGroups(mesh, mesh.axis(*DIMS), mesh.axis(*REPLICATED), mesh.axis(*DATA), mesh.axis(*SHARD), one_copy)


@dataclass(frozen=True, eq=False)
class GroupRanks:
    """Process groups of one parameter group.

    Args:
        shard: ranks over which the group's state is sharded.
        everyone: all ranks that have these parameters, with equal values.
        copies: ranks with the same shard, over which gradients are summed after `shard`; None: no second sum.
        counted: whether this rank's shard counts in norms; of equal shards, one does.
        first: whether this rank's shard is saved in checkpoints; of equal shards, one is.
        channels: message channels for `shard` and `copies`; None: opened by `open_channels`.
        peers: ranks of `everyone` on each global rank, by that rank.
        slices: ranks with the other slices of the same tensors (tp, ep); None: the tensors are not sliced.
        across_stages: whether other pipeline stages have the parameters too (tied weights).
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
        """Return the process groups over which gradients are reduced, one after the other."""
        return [self.shard] if self.copies is None else [self.shard, self.copies]

    def position(self, rank: int) -> int:
        """Return the index in `everyone` of a global rank, or of the rank with the same role in this rank's slice.

        Raises:
            ArgumentError: there is no such rank.
        """
        row = self.everyone.ranks if rank in self.everyone.ranks else self.peers.get(rank, ())
        if len(row) != self.everyone.size:
            raise ArgumentError(f"modifier_rank {rank!r} is not among the ranks {list(self.everyone.ranks)}")
        return row.index(rank)

    def open_channels(self) -> tuple[int, int]:
        """Return the numbers of the message channels for `shard` and `copies`; opens them if necessary."""
        return self.channels or (self.shard.channel(), self.copies.channel() if self.copies is not None else 0)


def alone(axis: Axis) -> GroupRanks:
    """Return the process groups of parameters that are sharded over all ranks that have them."""
    return GroupRanks(axis, axis)


class RankResolver:
    """Mapping from signatures to process groups, which the constructor creates. All ranks must construct it.

    Args:
        mesh: device mesh.
        splits: whether the state is sharded (stages 1 to 3).
        tied: pipeline stages of each tied weight, by name; see `find_tied`.
        signatures: signatures of tied weights, by name.
        ep_sizes: expert-parallel sizes of the model's layers.
    """

    def __init__(
        self,
        mesh: Mesh,
        splits: bool,
        tied: Mapping[str, frozenset[int]] = MappingProxyType({}),
        signatures: Mapping[str, Signature] = MappingProxyType({}),
        ep_sizes: Sequence[int] = (),
    ) -> None:
        self._mesh, self._splits, self._tied = mesh, splits, tied
        self.stages = mesh.size("pp")
        self.several = bool(ep_sizes)  # experts are sharded over other process groups than the other parameters
        self._known: dict[Signature, GroupRanks] = {}
        mesh.axis("tp")
        for more in (("dp_replicate",), REPLICATED):  # each rank takes part in the creation of all process groups
            mesh.axis(*more, "tp")
            for stages in sorted({tuple(sorted(ranks)) for ranks in tied.values()}):
                mesh.axis(*more, "pp", stages=frozenset(stages))
                mesh.axis(*more, "pp", "tp", stages=frozenset(stages))
        for ep in sorted(ep_sizes):
            for dims in (("ep",), ("ep", "tp"), ("edp",), ("dp_replicate", "edp"), ("dp_replicate", "edp", "tp")):
                mesh.axis(*dims, ep=ep)
        for name in sorted(signatures):  # sorted, since the stages have their tied weights in different orders
            ranks = self._find(signatures[name])
            self._known[signatures[name]] = replace(ranks, channels=ranks.open_channels())

    def resolve(self, signature: Signature) -> GroupRanks:
        if signature not in self._known:
            self._known[signature] = self._find(signature)
        return self._known[signature]

    def _find(self, signature: Signature) -> GroupRanks:
        mesh, ((tp, pp), name, ep) = self._mesh, signature
        coordinates, stages = mesh.coordinates, self._tied.get(name)
        dims = [dim for dim, relation in (("pp", pp), ("tp", tp)) if relation is Relation.PARTIAL]
        whole, split = (REPLICATED, SHARD) if ep == 1 else (("dp_replicate", "edp"), ("edp",))
        size = None if ep == 1 else ep
        everyone = mesh.axis(*whole, *dims, stages=stages, ep=size)
        copies = mesh.axis("dp_replicate", *dims, stages=stages)
        main = (pp is not Relation.REPLICATE) and (tp is not Relation.REPLICATE or coordinates["tp"] == 0)
        once = (
            main
            and (stages is None or coordinates["pp"] == min(stages))
            and (tp is not Relation.PARTIAL or coordinates["tp"] == 0)
        )
        peers = {rank: row for row in mesh.rows(*whole, *dims, stages=stages, ep=size) for rank in row}
        first = once and coordinates["dp_replicate"] == 0
        parts = [*(["ep"] if ep > 1 else []), *(["tp"] if tp is Relation.SHARD else [])]
        slices = mesh.axis(*parts, ep=size) if parts else None
        if not self._splits:  # unsharded: one sum over all ranks with the parameters; each counts a part in norms
            return GroupRanks(everyone, everyone, None, main, first, None, peers, slices, "pp" in dims)
        shard, others = mesh.axis(*split, ep=size), copies if copies.size > 1 else None
        return GroupRanks(shard, everyone, others, once, first, None, peers, slices, "pp" in dims)


# -- parameters that several slices or stages of a model have ---------------------------------------------------------


def signatures_of(mesh: Mesh, names: Mapping[Parameter, str]) -> dict[Parameter, Signature]:
    """Return the signature of each parameter; see `signature_of`.

    Args:
        mesh: device mesh.
        names: names of the parameters.
    """
    if mesh.is_data_parallel and all(placement_of(param).ep == 1 for param in names):
        return dict.fromkeys(names, DATA_PARALLEL)
    return {param: signature_of(param, name) for param, name in names.items()}


def find_tied(
    mesh: Mesh, names: Mapping[Parameter, str], signatures: Mapping[Parameter, Signature]
) -> dict[str, frozenset[int]]:
    """Find the pipeline stages that have each tied weight, and compare replicated parameters. All ranks must call this.

    Args:
        mesh: device mesh.
        names: names of this rank's parameters.
        signatures: their signatures.

    Returns:
        Stages by name of the tied weight.

    Raises:
        MeshError: ranks that should have equal copies have parameters of other names, shapes or dtypes.
    """
    if mesh.is_data_parallel:
        return {}
    local_names = [
        (name_on_all_ranks(param, name), tuple(param.shape), str(param.dtype), signatures[param][1] != "")
        for param, name in names.items()
        if signatures[param][0][0] in _COPIED or signatures[param][1]
    ]
    everyone = object_exchange.current.gather_present(mesh.axis(*DIMS), (mesh.coordinates["pp"], local_names))
    declared = {name: placement_of(param).stages for param, name in names.items()}  # may include absent stages
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
    """Raise MeshError if two ranks have different parameters; arguments: (rank, rows of (name, shape, dtype, tied))."""
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
    """Broadcast replicated and tied parameters from the first tensor-parallel rank and the first stage with them.

    All ranks must call this.

    Args:
        mesh: device mesh.
        names: names of this rank's parameters; sharded ones are left out.
        signatures: their signatures.
        tied: result of `find_tied`.
    """
    label = "broadcast of a copied parameter"
    copied = [p for p in names if signatures[p][0][0] in _COPIED and not is_managed(p)]
    if mesh.size("tp") > 1:
        broadcast_tensors(mesh.axis("tp"), copied, label)
    own = {names[param]: param for param in names if signatures[param][1]}
    for name in sorted(tied):
        axis = mesh.axis("pp", stages=tied[name])
        if name in own and not is_managed(own[name]):
            broadcast_tensors(axis, [own[name]], label)
