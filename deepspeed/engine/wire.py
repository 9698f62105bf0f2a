"""Codecs of messages from the configuration: block `wire`, and the keys that mean the same."""

from __future__ import annotations

import torch

from deepspeed.comm.collectives.block_codec import BlockCodec
from deepspeed.comm.collectives.encoded import CastCodec, Codec, ErrorFeedback, Wire
from deepspeed.comm.process_groups.axis import axes_here, make_axes, world_axis
from deepspeed.comm.process_groups.mesh import REPLICATED, SHARD, Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.foundation.log import log_once
from deepspeed.ops.triton.blocks import use_block_kernels
from deepspeed.zero.parameters.parallel_groups import ParallelGroups
from deepspeed.zero.parameters.secondary_shard import SecondaryShard
from deepspeed.zero.parameters.shard_group import ShardGroup


def codec_of(name: str) -> Codec | None:
    """Return the codec with a name of the JSON, None for "none", that of the first steps for "measured"."""
    name = "int8" if name == "measured" else name
    return None if name == "none" else CastCodec() if name == "bf16" else BlockCodec(bits=int(name.removeprefix("int")))


def gradient_wire(config: DeepSpeedConfig) -> Wire:
    """Return the codecs of gradients."""
    wire = config.wire
    names = (wire.gradients, wire.gradients_within_host)
    wanted = "int4" in names if wire.error_memory is None else wire.error_memory
    feedback = ErrorFeedback(wire.error_beta, wire.error_reset) if wanted else None
    return Wire(codec_of(names[0]), codec_of(names[1]), feedback)


def weight_wire(config: DeepSpeedConfig, frozen: bool = False) -> Wire:
    """Return the codecs of trained (or frozen) weights."""
    wire = config.wire
    between = wire.frozen_weights if frozen and wire.frozen_weights is not None else wire.weights
    return Wire(codec_of(between), codec_of(wire.weights_within_host))


def prepare_wire(config: DeepSpeedConfig, mesh: Mesh, device: torch.device) -> None:
    """Load kernels for codecs of the JSON, and find out which ranks are on one host.

    All ranks of the world must call this.
    """
    wire = config.wire
    between = {"gradients": wire.gradients, "weights": wire.weights, "frozen_weights": wire.frozen_weights or "none"}
    encoded = {name: value for name, value in between.items() if value != "none"}
    if not encoded and wire.gradients_within_host == wire.weights_within_host == "none":
        return
    use_block_kernels(device)
    if not encoded:
        return
    registry = axes_here()
    registry.find_hosts()
    for rows in (mesh.rows(*SHARD), mesh.rows(*REPLICATED)):
        registry.divide_by_host(rows, device)
    steps = [axis for hosts in registry.host_axes.values() for axis in (hosts.within, hosts.across)]
    registry.separate_reductions(steps, world_axis(device=device))
    if len(set(registry.hosts.values())) < 2:
        words = ", ".join(f"wire.{name} = {value}" for name, value in encoded.items())
        log_once(
            f"{words}: nothing is encoded, since all ranks are on one host; wire.gradients_within_host and "
            f"wire.weights_within_host are for messages within a host"
        )


def add_secondary_shards(groups: list[ShardGroup], axes: ParallelGroups, config: DeepSpeedConfig) -> None:
    """Create the secondary shards of stage 3 that `zero_hpz_partition_size` asks for. All ranks must call this.

    Groups that are sharded over other ranks than the rest, such as experts, have none.
    """
    size = config.zero.zero_hpz_partition_size
    if size <= 1:
        return
    rows = [row[start : start + size] for row in axes.mesh.rows(*SHARD) for start in range(0, len(row), size)]
    within = make_axes(rows, "hpz", groups[0].device)
    if not SecondaryShard.can_hold(within):
        log_once(
            f"zero_hpz_partition_size = {size} has no effect: ranks {list(within.ranks)} do not share memory; give it "
            f"the number of ranks of one host"
        )
        return
    # Ranks on CPUs without one-sided gathers could disagree on whether a gather stays within the host.
    sharded = [group for group in groups if group.axis is axes.shard]
    held = [group for group in sharded if group.fetch is not None or not group.axis.tagged]
    if not held:
        log_once(f"zero_hpz_partition_size = {size} has no effect with stage3_fixed_graph on CPUs")
        return
    for group in held:
        group.add_secondary(within)
    nbytes = sum(group.numel // size * group.dtype.itemsize for group in held)
    log_once(f"zero_hpz_partition_size = {size}: secondary shards take {nbytes / 2**20:.1f} MiB on each rank")
