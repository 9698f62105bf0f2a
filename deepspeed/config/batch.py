"""The batch triple: train_batch_size = micro-batch x accumulation x data-parallel world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.elasticity import compute_elastic_config, ensure_immutable_elastic_config
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.version import __version__

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ONE_RANK = (
    ". They agree on one rank: a client that counts ranks itself has counted one, as Transformers does without a GPU "
    '(docs/clients.md, "On machines without a GPU")'
)


@dataclass(frozen=True)
class BatchSizes:
    """The batch triple, with the origin of what was not given."""

    train: int
    micro: int
    steps: int
    derived: dict[str, str]


def derive_batch(train: int | None, micro: int | None, steps: int | None, world: int) -> BatchSizes | str:
    """Derive what is missing of the batch triple and check that it holds.

    Args:
        train: samples per optimizer step over all ranks, or None.
        micro: samples per rank and forward, or None.
        steps: micro-batches per optimizer step, or None.
        world: data-parallel ranks.

    Returns:
        The triple, or the text of the problem.
    """
    if train is None and micro is None:
        return (
            f"{TRAIN} or {MICRO} must be given: the other is derived from it and from the {world} rank(s) of this run"
        )
    derived: dict[str, str] = {}
    if steps is None:
        if train is not None and micro is not None:
            steps, derived[STEPS] = train // micro // world, f"derived: {TRAIN} / {MICRO} / {world} rank(s)"
        else:
            steps, derived[STEPS] = 1, "default"
    if micro is None and train is not None:
        micro, derived[MICRO] = train // steps // world, f"derived: {TRAIN} / {STEPS} / {world} rank(s)"
    micro = micro or 0
    if train is None:
        train, derived[TRAIN] = micro * steps * world, f"derived: {MICRO} x {STEPS} x {world} rank(s)"
    if train != micro * steps * world:
        # clients search for this sentence
        return (
            "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
            f"gradient_acc_step * world_size {train} != {micro} * {steps} * {world}. "
            f"Change one of {TRAIN}, {MICRO}, {STEPS} or the number of ranks, or leave one of the three out"
            + (_ONE_RANK if train == micro * steps else "")
            + (f". {train} is no multiple of {world} ranks, whatever the others are" if train % world else "")
        )
    return BatchSizes(train, micro, steps, derived)


def elastic_batch(
    block: Mapping[str, Any], triple: tuple[int | None, int | None, int | None], world: int
) -> BatchSizes | str:
    """The batch triple of an `elasticity` block: the same global batch for every number of ranks that can share it.

    Args:
        block: as the user wrote it.
        triple: the triple, as far as it was given beside the block.
        world: data-parallel ranks.

    Returns:
        The triple, or the text of the problem.
    """
    if any(triple) and not block.get("ignore_non_elastic_batch_info", False):
        return (
            f"elasticity computes the batch: leave {TRAIN}, {MICRO} and {STEPS} out, or set "
            "elasticity.ignore_non_elastic_batch_info to have them ignored"
        )
    try:
        ensure_immutable_elastic_config(block)
        ranks = world * int(block.get("model_parallel_size", 1))
        train, _, micro = compute_elastic_config({"elasticity": block}, __version__, ranks)
    except (DeepSpeedConfigError, ValueError) as error:
        return str(error)
    steps = train // micro // world
    derived: dict[str, str] = dict.fromkeys((TRAIN, MICRO, STEPS), f"elasticity, for {world} rank(s)")
    return BatchSizes(train, micro, steps, derived)
