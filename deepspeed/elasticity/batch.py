"""Batch size of an `elasticity` block, its valid world sizes, and the micro-batch for each.

`ds_elastic` prints them, the micro-batch only with `--world-size`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.version import __version__

ELASTICITY = "elasticity"
SCHEDULER_VIEW = "DEEPSPEED_ELASTICITY_CONFIG"
"""Variable with the block from which the scheduler chose the size of the job."""
OLDEST_TARGET = (0, 3, 8)
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_MOST_DEVICES = 720720


class ElasticityError(DeepSpeedConfigError):
    """Error of the `elasticity` block, such as a block that has no valid batch size."""


class ElasticityConfigError(ElasticityError):
    """Error: a key of the `elasticity` block is missing or invalid."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """Error: the batch of the `elasticity` block cannot be divided by the number of ranks."""


@dataclass(frozen=True)
class ElasticityConfig:
    """Checked values of an `elasticity` block.

    Attributes:
        max_batch: maximum global batch, in samples.
        micro_batches: allowed micro-batches per rank, in samples.
        min_gpus, max_gpus: bounds of the number of ranks.
        prefer_larger: whether the larger of equally good batches is chosen.
        version: version of the block, 0.1 or 0.2; 0.2 counts whole nodes and supports model parallelism.
        gpus_per_node: ranks per node.
        model_parallel: model-parallel ranks, which share their samples.
    """

    max_batch: int
    micro_batches: tuple[int, ...]
    min_gpus: int = 1
    max_gpus: int = 10000
    prefer_larger: bool = True
    version: float = 0.2
    gpus_per_node: int = 1
    model_parallel: int = 1

    def largest_micro(self, batch: int, ranks: int) -> int | None:
        return max((size for size in self.micro_batches if batch // ranks % size == 0), default=None)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether the configuration has an enabled `elasticity` block."""
    return bool((ds_config.get(ELASTICITY) or {}).get("enabled", False))


def read_block(block: Mapping[str, Any]) -> ElasticityConfig:
    """Check the `elasticity` block and add its defaults.

    Raises:
        ElasticityConfigError: a key is missing or invalid, or keys contradict each other or the block's version.
    """
    block = {name: value for name, value in block.items() if value is not None}  # null: not given
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        if name not in block:
            raise ElasticityConfigError(f"elasticity.{name} is missing: it has no default")
    micro = block["micro_batch_sizes"]
    if not isinstance(micro, list) or not micro or not all(_positive(size) for size in micro):
        raise ElasticityConfigError(f"elasticity.micro_batch_sizes is {micro!r}, not a list of whole numbers above 0")
    numbers = {"max_train_batch_size": None, "min_gpus": 1, "max_gpus": 10000, "num_gpus_per_node": 1,
               "model_parallel_size": 1}  # fmt: skip
    values = {name: block.get(name, default) for name, default in numbers.items()}
    for name, value in values.items():
        if not _positive(value):
            raise ElasticityConfigError(f"elasticity.{name} is {value!r}, not a whole number above 0")
    if values["min_gpus"] > values["max_gpus"]:
        raise ElasticityConfigError(f"elasticity: min_gpus {values['min_gpus']} > max_gpus {values['max_gpus']}")
    version = float(block.get("version", 0.2))
    if version not in (0.1, 0.2):
        raise ElasticityConfigError(f"elasticity.version is {version}; there are 0.1 and 0.2")
    if version == 0.1 and values["model_parallel_size"] > 1:
        raise ElasticityConfigError("elasticity.model_parallel_size > 1 needs elasticity.version 0.2")
    if values["num_gpus_per_node"] % values["model_parallel_size"]:
        raise ElasticityConfigError("elasticity: model_parallel_size must divide num_gpus_per_node")
    return ElasticityConfig(
        max_batch=values["max_train_batch_size"],
        micro_batches=tuple(micro),
        min_gpus=values["min_gpus"],
        max_gpus=values["max_gpus"],
        prefer_larger=bool(block.get("prefer_larger_batch", True)),
        version=version,
        gpus_per_node=values["num_gpus_per_node"],
        model_parallel=values["model_parallel_size"],
    )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[Any, ...]:
    """Compute the batch size of a configuration's `elasticity` block.

    Args:
        ds_config: configuration with the block.
        target_deepspeed_version: version that will read the configuration; 0.3.8 or later.
        world_size: ranks of the run; 0: WORLD_SIZE, for version 0.2 of the block or `return_microbatch`.
        return_microbatch: whether to return the micro-batch even if `world_size` is 0.

    Returns:
        (global batch, valid data-parallel sizes), and the micro-batch if `world_size` > 0 or `return_microbatch`.

    Raises:
        ElasticityConfigError: the block is missing, invalid or not enabled, or WORLD_SIZE is needed and not set.
        ElasticityIncompatibleWorldSize: `world_size` ranks cannot divide the batch.
        ElasticityError: no batch is valid, or the version is too old.
        ValueError: `ds_config` is no mapping, or a micro-batch is larger than the maximum batch.
    """
    if not isinstance(ds_config, Mapping):
        raise ValueError(f"ds_config is a {type(ds_config).__name__}, not a dict")
    if ELASTICITY not in ds_config:
        raise ElasticityConfigError("the configuration has no `elasticity` block")
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError("elasticity.enabled is false: set it to true to have a batch computed")
    target = tuple(int(part) for part in re.findall(r"\d+", target_deepspeed_version)[:3])
    if target < OLDEST_TARGET:
        raise ElasticityError(f"version {target_deepspeed_version} has no elasticity: 0.3.8 and later have")
    block = read_block(ds_config[ELASTICITY])
    if block.version == 0.1:
        batch, valid = _best(
            block.micro_batches, block.max_batch, (block.min_gpus, block.max_gpus), block.prefer_larger
        )
        if world_size <= 0 and not return_microbatch:
            return batch, valid
        world = world_size or _world_of_environment()
        if world not in valid:
            raise ElasticityIncompatibleWorldSize(
                f"{world} rank(s) cannot share a batch of {batch}; these can: {valid}"
            )
        micro = block.largest_micro(batch, world)
    else:
        world = world_size or _world_of_environment()
        batch, valid, micro = _by_nodes(block, world)
        if world_size <= 0 and not return_microbatch:
            return batch, valid
    if micro is None:
        raise ElasticityIncompatibleWorldSize(f"no micro-batch of {list(block.micro_batches)} fits {world} rank(s)")
    return batch, valid, micro


def _world_of_environment() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdigit() or int(text) < 1:
        raise ElasticityConfigError("elasticity.version 0.2 needs the number of ranks: world_size, or WORLD_SIZE")
    return int(text)


def highly_composite(limit: int) -> list[int]:
    """Return the numbers up to `limit` that have more divisors than any smaller number."""
    divisor_counts: dict[int, int] = {}
    primes = (2, 3, 5, 7, 11, 13, 17)

    def grow(number: int, divisors: int, index: int, most: int) -> None:
        divisor_counts[number] = divisors
        if index == len(primes):
            return
        power = 1
        while power <= most and number * primes[index] ** power <= limit:
            grow(number * primes[index] ** power, divisors * (power + 1), index + 1, power)
            power += 1

    grow(1, 1, 0, 64)
    record, numbers = 0, []
    for number in sorted(divisor_counts):
        if divisor_counts[number] > record:
            record = divisor_counts[number]
            numbers.append(number)
    return numbers


_SCALES = highly_composite(_MOST_DEVICES)


def _best(micro: Sequence[int], most: int, devices: tuple[int, int], larger: bool) -> tuple[int, list[int]]:
    """Return the batch up to `most` with most valid device counts (`larger`: the largest of equals), and the counts."""
    bases = sorted({*micro, math.lcm(*micro)})
    if min(micro) > most or not all(size <= most for size in micro):
        raise ValueError(f"all micro-batches {list(micro)} must be at most max_train_batch_size {most}")
    candidates = {base * max(scale for scale in _SCALES if base * scale <= most) for base in bases if base <= most}
    ranked = [
        (len(valid), batch if larger else -batch, valid)
        for batch in candidates
        if (valid := _valid(batch, micro, devices))
    ]
    if not ranked:
        raise ElasticityError(
            f"no batch up to {most} of the micro-batches {list(micro)} suits {devices[0]} to {devices[1]} ranks"
        )
    _, batch, valid = max(ranked)
    return abs(batch), valid


def _valid(batch: int, micro: Sequence[int], devices: tuple[int, int]) -> list[int]:
    """Return the device counts within the bounds `devices` that divide a batch into equal numbers of micro-batches."""
    counts: set[int] = set()
    for size in micro:
        if batch % size == 0:
            whole = batch // size
            counts.update(count for count in range(1, math.isqrt(whole) + 1) if whole % count == 0)
            counts.update(whole // count for count in range(1, math.isqrt(whole) + 1) if whole % count == 0)
    return sorted(count for count in counts if devices[0] <= count <= devices[1])


def _by_nodes(block: ElasticityConfig, world: int) -> tuple[int, list[int], int | None]:
    """Return (batch, valid data-parallel sizes, micro-batch) for version 0.2, which counts whole nodes."""
    per_node = block.gpus_per_node // block.model_parallel
    nodes = (max(1, block.min_gpus // block.gpus_per_node), max(1, block.max_gpus // block.gpus_per_node))
    batch, valid = _best(block.micro_batches, block.max_batch // per_node, nodes, block.prefer_larger)
    batch, valid = batch * per_node, [count * per_node for count in valid]
    ranks = world // block.model_parallel
    if ranks in valid:
        return batch, valid, block.largest_micro(batch, ranks)
    fitting = [(block.max_batch // (size * ranks) * size * ranks, size) for size in block.micro_batches if ranks]
    batch, micro = max(fitting, default=(0, 0))
    if batch == 0:
        raise ElasticityIncompatibleWorldSize(f"{world} rank(s) cannot share a batch of at most {block.max_batch}")
    return batch, [ranks], micro


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Check that an `elasticity` block agrees with DEEPSPEED_ELASTICITY_CONFIG, if the scheduler has set the variable.

    Args:
        runtime_elastic_config_dict: the block.

    Raises:
        ElasticityConfigError: maximum batch, micro-batches or version differ, or one of the blocks is invalid.
    """
    seen = os.environ.get(SCHEDULER_VIEW)
    if not seen:
        return
    scheduled, own = read_block(json.loads(seen)), read_block(runtime_elastic_config_dict)
    for name in ("max_batch", "micro_batches", "version"):
        if getattr(scheduled, name) != getattr(own, name):
            raise ElasticityConfigError(
                f"elasticity: {name} is {getattr(own, name)} here and {getattr(scheduled, name)} in {SCHEDULER_VIEW}, "
                "by which the scheduler chose the size of the job"
            )


def main(args: Sequence[str] | None = None) -> int:
    """Run `ds_elastic`: print the batch and its valid world sizes; returns 0, or 1 after an error.

    Args:
        args: the command line; None: that of the process.
    """
    parser = argparse.ArgumentParser(prog="ds_elastic", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-c", "--config", required=True, help="the JSON file")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="ranks: prints their micro-batch too")
    options = parser.parse_args(args)
    try:
        config = json.loads(Path(options.config).read_text())
        elastic = compute_elastic_config(config, __version__, options.world_size)
    except (OSError, ValueError) as error:
        print(f"ds_elastic: {error}", file=sys.stderr)
        return 1
    print(json.dumps(config["elasticity"], indent=4, sort_keys=True))
    print(f"final_batch_size .... {elastic[0]}")
    print(f"valid_gpus .......... {elastic[1]}")
    if options.world_size > 0:
        print(f"micro_batch_size .... {elastic[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
