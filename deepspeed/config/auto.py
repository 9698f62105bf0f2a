"""Resolution of values that a configuration leaves open: "auto", the batch sizes, and the values of a stored plan."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.config.base_model import AUTO, is_number
from deepspeed.config.errors import wrong
from deepspeed.config.keys import Reading
from deepspeed.config.load import block_of, load_raw
from deepspeed.config.sections.optimizer import DEFAULT_LR
from deepspeed.elasticity import compute_elastic_config, ensure_immutable_elastic_config
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.foundation.log import log_once
from deepspeed.version import __version__

_USUAL_LR = 1e-3


@dataclass(frozen=True)
class Facts:
    """Values from which "auto" is resolved; None: unknown.

    Attributes:
        hidden_size: width of the model.
        loader_batch_size: samples per micro-batch of the loader that was passed to `initialize`.
        num_train_steps: optimizer steps of the whole run.
        device: "cpu" or "cuda".
        bf16_fast: whether the device computes bf16 faster than fp32.
        learning_rate: learning rate of the client's optimizer.
    """

    hidden_size: int | None = None
    loader_batch_size: int | None = None
    num_train_steps: int | None = None
    device: str | None = None
    bf16_fast: bool | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class AutoRule:
    """Rule that resolves "auto" for one configuration key.

    Args:
        find: function that returns the value; None: unknown.
        becomes: description of the value, for the configuration reference.
        needs: advice in the error for an unknown value; empty: the key's default is used.
    """

    find: Callable[[Reading, Facts], Any]
    becomes: str
    needs: str = ""


def _learning_rate(reading: Reading, facts: Facts) -> float:
    if facts.learning_rate is not None:
        return facts.learning_rate
    rate = reading.find("optimizer.params.lr")
    if is_number(rate):
        return rate
    return DEFAULT_LR.get(str(reading.find("optimizer.type")).lower(), _USUAL_LR)


def _fp16(reading: Reading, facts: Facts) -> bool | None:
    if reading.enabled("bf16", "torch_autocast"):
        return False
    return None if facts.bf16_fast is None else facts.device == "cuda" and not facts.bf16_fast


_MACHINE = "give true or false, or leave it to deepspeed.initialize, which knows the machine"

# In this order: later rules may read what earlier ones found.
RULES: dict[str, AutoRule] = {
    "bf16.enabled": AutoRule(
        lambda reading, facts: False if reading.enabled("fp16", "torch_autocast") else facts.bf16_fast,
        "true where the device computes bf16 faster than fp32, unless another precision is enabled",
        _MACHINE,
    ),
    "fp16.enabled": AutoRule(
        _fp16, "true on a CUDA device without fast bf16, unless another precision is enabled", _MACHINE
    ),
    "optimizer.params.lr": AutoRule(
        _learning_rate,
        "the learning rate of the client's optimizer, else 1e-3 (Adagrad 1e-2, Lion 1e-4)",
    ),
    "scheduler.params.warmup_min_lr": AutoRule(lambda _, __: 0.0, "0"),
    "scheduler.params.warmup_max_lr": AutoRule(_learning_rate, "the optimizer's learning rate"),
    "scheduler.params.warmup_num_steps": AutoRule(
        lambda _, facts: min(1000, max(2, facts.num_train_steps // 10)) if facts.num_train_steps is not None else None,
        "a tenth of the run, at most 1000; 1000 when unknown",
    ),
    "scheduler.params.total_num_steps": AutoRule(
        lambda _, facts: facts.num_train_steps,
        "the optimizer steps of the run",
        "give the number; the length of the run is not known here",
    ),
    "gradient_clipping": AutoRule(lambda _, __: 1.0, "1.0"),
    "zero_optimization.reduce_bucket_size": AutoRule(
        lambda _, facts: facts.hidden_size**2 if facts.hidden_size else None,
        "hidden_size squared, the default when the model does not tell it",
    ),
    "zero_optimization.prefetch_bucket_size": AutoRule(
        lambda _, facts: int(0.9 * facts.hidden_size * facts.hidden_size) if facts.hidden_size else None,
        "0.9 x hidden_size squared, or the default",
    ),
    "zero_optimization.param_persistence_threshold": AutoRule(
        lambda _, facts: 10 * facts.hidden_size if facts.hidden_size else None, "10 x hidden_size, or the default"
    ),
    "zero_optimization.gather_16bit_weights_on_model_save": AutoRule(
        lambda reading, _: reading.find("zero_optimization.stage") == 3, "true at stage 3"
    ),
}
BATCH = {
    "train_batch_size": "derived from the other two and the world",
    "train_micro_batch_size_per_gpu": "derived from the other two, else the batch size of the loader",
    "gradient_accumulation_steps": "derived from the other two, else 1",
}


def resolve_autos(reading: Reading, facts: Facts, *, lenient: bool) -> None:
    """Resolve the "auto" values of a reading, in place, except those of the batch sizes (`BATCH`).

    If a value is unknown, the default of the key is used. Some keys add a problem instead, unless `lenient` is True.
    """
    for path in sorted(reading.autos, key=lambda path: list(RULES).index(path) if path in RULES else -1):
        rule = RULES.get(path)
        value = rule.find(reading, facts) if rule else None
        if value is not None:
            reading.put(path, value, "auto: " + (rule.becomes if rule else ""))
        elif rule is not None and rule.needs and not lenient:
            reading.problems.append(wrong(reading.name(path), AUTO, f"cannot be resolved: {rule.needs}"))
        elif path not in BATCH:
            reading.origins[path] = "auto: the default"


TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_ONE_RANK = (
    ". They agree on one rank: a client that counts ranks itself has counted one, as Transformers does without a GPU "
    '(docs/clients.md, "On machines without a GPU")'
)


@dataclass(frozen=True)
class BatchSizes:
    """Resolved batch sizes: train = micro x steps x data-parallel ranks.

    Attributes:
        train: samples per optimizer step, over all ranks.
        micro: samples per rank and forward.
        steps: micro-batches per optimizer step.
        derived: origin of each value that the user did not give, by key.
    """

    train: int
    micro: int
    steps: int
    derived: dict[str, str]


def derive_batch(train: int | None, micro: int | None, steps: int | None, world: int) -> BatchSizes | str:
    """Derive the None batch sizes for `world` data-parallel ranks; return an error text if that is impossible."""
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
    """Compute the batch sizes of an `elasticity` block.

    Args:
        block: the block, as the user wrote it.
        triple: (train, micro, steps) from the other keys of the JSON; None: not given.
        world: number of data-parallel ranks.

    Returns:
        The batch sizes, or an error text if the block is invalid or does not ignore values in `triple`.
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


PLAN = "plan"
PLAN_VARIABLE = "DS_PLAN"
"""Variable with the path of the plan; the default is the path at which `ds_plan` and the autotuner store plans."""
_ZERO, _RECOMPUTE, _TUNING = "zero_optimization", "activation_checkpointing", "autotuning"
_OF_ZERO = (
    "stage", "offload_optimizer", "offload_param", "reduce_bucket_size", "allgather_bucket_size", "mics_shard_size",
)  # fmt: skip
_TENSOR, _SLICES, _SEQUENCE = "tensor_parallel", "autotp_size", "sequence_parallel_size"
_PIPELINE, _STAGES = "pipeline", "stages"
_EXPERTS, _SIZE = "expert_parallel", "size"


def with_plan(raw: dict[str, Any]) -> dict[str, Any]:
    """Merge the stored plan into a configuration with `"stage": "plan"`; other configurations are returned unchanged.

    Raises:
        DeepSpeedConfigError: there is no plan, the file is not a plan, or the plan is for another global batch.
    """
    zero = block_of(raw, _ZERO)
    if zero.get("stage") != PLAN:
        return raw
    path = _plan_file(raw)
    plan = load_raw(str(path))
    planned = block_of(plan, _ZERO)
    if not isinstance(planned.get("stage"), int) or not all(isinstance(plan.get(key), int) for key in (MICRO, STEPS)):
        raise DeepSpeedConfigError(f"{path} is no plan: it lacks {_ZERO}.stage, {MICRO} or {STEPS} as numbers")
    _check_batch(raw, plan, path)
    config = {**raw, MICRO: plan[MICRO], STEPS: plan[STEPS]}
    config |= {TRAIN: plan[TRAIN]} if TRAIN in plan else {}
    own = {key: value for key, value in zero.items() if key not in ("offload_optimizer", "offload_param")}
    config[_ZERO] = own | {key: planned[key] for key in _OF_ZERO if key in planned}
    if _SLICES in block_of(plan, _TENSOR):
        config[_TENSOR] = {**block_of(raw, _TENSOR), _SLICES: block_of(plan, _TENSOR)[_SLICES]}
    if _STAGES in block_of(plan, _PIPELINE):
        config[_PIPELINE] = {**block_of(raw, _PIPELINE), _STAGES: block_of(plan, _PIPELINE)[_STAGES]}
    if _SIZE in block_of(plan, _EXPERTS):
        config[_EXPERTS] = {**block_of(raw, _EXPERTS), **block_of(plan, _EXPERTS)}
    if _SEQUENCE in plan:
        config[_SEQUENCE] = plan[_SEQUENCE]
    if _RECOMPUTE in raw or _RECOMPUTE in plan:
        config[_RECOMPUTE] = {
            **block_of(raw, _RECOMPUTE),
            "enabled": bool(block_of(plan, _RECOMPUTE).get("enabled", False)),
        }
    log_once(f'"stage": "plan" takes {path}: stage {planned["stage"]}, micro-batch {plan[MICRO]} x {plan[STEPS]}')
    return config


def _plan_file(raw: Mapping[str, Any]) -> Path:
    results = str(block_of(raw, _TUNING).get("results_dir") or "autotuning_results")
    named = os.environ.get(PLAN_VARIABLE)
    places = [Path(named)] if named else [Path(results, "ds_config_optimal.json"), Path("ds_plan.json")]
    for place in places:
        if place.is_file():
            return place
    raise DeepSpeedConfigError(
        f'{_ZERO}.stage = "plan", and there is no plan: {" and ".join(map(str, places))} looked for in {Path.cwd()}. '
        f"Run `ds_plan` or `deepspeed --autotuning tune` first, or name its file in {PLAN_VARIABLE}"
    )


def _check_batch(raw: Mapping[str, Any], plan: Mapping[str, Any], path: Path) -> None:
    """Raise DeepSpeedConfigError if the user's global batch differs from that of the plan."""
    pairs = [("train_batch_size", raw.get(TRAIN), plan.get(TRAIN))]
    if isinstance(raw.get(MICRO), int) and isinstance(raw.get(STEPS), int):
        # Ranks that are given the same samples, as far as these keys say, take more of them together.
        sharing: list[int] = []
        for config in (plan, raw):
            sizes = (
                block_of(config, _TENSOR).get(_SLICES),
                config.get(_SEQUENCE),
                block_of(config, _PIPELINE).get(_STAGES),
            )
            sharing.append(math.prod(size for size in sizes if isinstance(size, int) and size > 1))
        planned = int(plan[MICRO] * plan[STEPS] / (sharing[0] / sharing[1]))
        pairs.append((f"{MICRO} x {STEPS}", raw[MICRO] * raw[STEPS], planned))
    for name, own, planned in pairs:
        if isinstance(own, int) and isinstance(planned, int) and own != planned:
            raise DeepSpeedConfigError(
                f"{name} is {own}, and the plan in {path} is for {planned}: plan again for this global batch"
            )
