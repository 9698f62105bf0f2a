"""Mesh sizes that plans try in addition to data parallelism, and the configuration keys that set them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.load import block_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.simulator.machine import Machine

_SIZES = 3  # smallest sizes of an axis that are tried: each needs as many simulated runs as pure data parallelism
_STAGES = (0, 1, 3)
_OF_PIPELINE = (0, 1)
_MOST_STAGES = 8  # each stage needs its own simulated run


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes besides data parallelism.

    Args:
        tensor: tensor-parallel ranks.
        sequence: sequence-parallel ranks.
        shard: ranks that share one copy of the state (hybrid sharding); 0: as many as possible.
        stages: pipeline stages, each of consecutive ranks.
        expert: ranks among which the experts of a layer are divided.
    """

    tensor: int = 1
    sequence: int = 1
    shard: int = 0
    stages: int = 1
    expert: int = 1

    @property
    def name(self) -> str:
        """Return the suffix of plan names; "" for pure data parallelism."""
        tensor = f"_tp{self.tensor}" if self.tensor > 1 else ""
        sequence = f"_sp{self.sequence}" if self.sequence > 1 else ""
        stages = f"_pp{self.stages}" if self.stages > 1 else ""
        expert = f"_ep{self.expert}" if self.expert > 1 else ""
        return f"{tensor}{sequence}{f'_mics{self.shard}' if self.shard else ''}{stages}{expert}"

    @property
    def width(self) -> int:
        """Return the number of ranks that process the same samples."""
        return self.tensor * self.sequence * self.stages

    def shard_ranks(self, ranks: int) -> range:
        """Return the ranks with the same model slice as rank 0 in a run of `ranks` ranks.

        ZeRO shards over all of them, or over groups of `shard`.
        """
        return range(0, ranks // self.stages, self.tensor)

    def firsts(self, ranks: int) -> range:
        """Return the first rank of each pipeline stage in a run of `ranks` ranks."""
        return range(0, ranks, ranks // self.stages)

    def ask(self, config: dict[str, Any]) -> None:
        """Set the keys of this layout in `config`, in place."""
        if self.tensor > 1:
            config["tensor_parallel"] = {**block_of(config, "tensor_parallel"), "autotp_size": self.tensor}
        if self.sequence > 1:
            config["sequence_parallel_size"] = self.sequence
        if self.shard:
            config["zero_optimization"] = {**block_of(config, "zero_optimization"), "mics_shard_size": self.shard}
        if self.stages > 1:
            config["pipeline"] = {**block_of(config, "pipeline"), "stages": self.stages}
        if self.expert > 1:
            config["expert_parallel"] = {**block_of(config, "expert_parallel"), "enabled": True, "size": self.expert}

    def message_bytes(
        self, whole: float, ranks: int, reductions: int, gathers: int, experts: float = 0.0, ep: int = 1
    ) -> float:
        """Return the bytes that one of `ranks` ranks receives in an update with `reductions` reduce-scatters and
        `gathers` all-gathers of a model of `whole` bytes.

        Args:
            experts: part of `whole` that is divided among `ep` ranks; ranks with the same part share its state.
        """
        if ep > 1:
            alike = ranks // ep
            rest = self.message_bytes(whole - experts, ranks, reductions, gathers)
            return rest + experts / ep * (alike - 1) / alike * (reductions + gathers)
        group = len(self.shard_ranks(ranks))
        shard = self.shard or group
        copies = group // shard
        received = whole * (shard - 1) / shard * (reductions + gathers)
        return received + 2 * whole / shard * (copies - 1) / copies * reductions  # all-reduce over copies


def shapes(machine: Machine, experts: bool = False) -> Iterator[tuple[MeshShape, tuple[int, ...]]]:
    """Yield (mesh with one axis besides data parallelism, ZeRO stages to try); `experts`: also expert parallelism."""
    sizes = [size for size in range(2, machine.ranks + 1) if machine.ranks % size == 0][:_SIZES]  # the smallest
    for size in sizes:
        shape = MeshShape(tensor=size)
        yield shape, _STAGES if len(shape.shard_ranks(machine.ranks)) > 1 else (0,)
    for size in sizes:
        yield MeshShape(sequence=size), _STAGES
    for size in sizes:
        if size < machine.ranks:
            yield MeshShape(shard=size), (3,)
    for size in sizes:
        if size <= _MOST_STAGES:
            yield MeshShape(stages=size), _OF_PIPELINE if size < machine.ranks else (0,)
    for size in sizes if experts else ():
        yield MeshShape(expert=size), _STAGES


def asks_for_axes(config: Any) -> bool:
    """Return whether a configuration sets axes besides data parallelism, or is invalid; plans then add no axis."""
    try:
        known = DeepSpeedConfig.for_init(config)
        return known.expert_parallel_size > 1 or any(axis != "dp" for axis, *_ in known.mesh_sizes())
    except DeepSpeedConfigError:
        return True


def unjudged(machine: Machine) -> list[str]:
    """Return lines of text with the axis sizes that no plan tries, and the reason."""
    sizes = [size for size in range(2, machine.ranks + 1) if machine.ranks % size == 0]
    lines, left = list[str](), sizes[_SIZES:]
    long = [size for size in sizes if size > _MOST_STAGES or size in left]
    if long:
        lines.append(f"pipeline.stages = {', '.join(map(str, long))}: not judged, to keep the search short")
    if left:
        lines.append(
            f"tensor_parallel.autotp_size, sequence_parallel_size, zero_optimization.mics_shard_size, "
            f"expert_parallel.size = "
            f"{', '.join(map(str, left))}: not judged, to keep the search short"
        )
    if len(sizes) > 1:
        lines.append("several axes above 1 together: not judged, to keep the search short")
    lines.append("zero_optimization.zero_hpz_partition_size: not judged")
    return lines if sizes else []
