"""Reduction of a full model to this rank's pipeline stage; `generate` over all stages."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.same_error import alarmed, first_difference, raise_together
from deepspeed.comm.collectives.torch_api import all_gather_objects, object_exchange
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.process_groups.mesh import DIMS, REPLICATED, Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, DeepSpeedError, MeshError, NotAvailableError, PipelineError, UsageError
from deepspeed.foundation.equivalence import example_inputs
from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import log_rank0
from deepspeed.foundation.pytree import map_tensors
from deepspeed.pipe.executor import ModelPart
from deepspeed.pipe.module import PipelineModule
from deepspeed.pipe.partition_cost import seconds
from deepspeed.pipe.split_model import Meter, ModelSplit, find_layout, keep_stage
from deepspeed.zero.api.materialize import is_without_values
from deepspeed.zero.api.reshard import check_not_served, is_sharded_by_init, shard_over
from deepspeed.zero.layout.placement import Relation, placement_of
from deepspeed.zero.layout.stages import policy_for
from deepspeed.zero.parameters.prefetch import PrefetchLimits

_PROFILED_TOKENS = 512  # tokens per row; at most a model's positions minus two, since RoBERTa's begin at two


def is_pipelined(model: Any, config: Any, mpu: Any, mesh_param: Any = None) -> bool:
    """Return whether a pipeline engine is needed: for a `PipelineModule`, or without `mpu` if pp is set above 1.

    Args:
        config: dict, path or base64 of the JSON.
        mesh_param: sizes by axis name, see `find_mesh`.
    """
    if isinstance(model, PipelineModule):
        return True
    if mpu is None and isinstance(mesh_param, Mapping) and mesh_param.get("pp", 1) != 1:
        return True
    return mpu is None and any(axis == "pp" for axis, *_ in DeepSpeedConfig.for_init(config).mesh_sizes())


def check_model(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any) -> bool:
    """Check that a model can be split into stages, before its values are created or moved.

    All ranks must call this, and an error is raised on all.

    Returns:
        Whether the model has no values (meta device), equal on all ranks.

    Raises:
        UsageError: the model is on the meta device on some ranks only, or belongs to another engine.
        PipelineError: models differ between stages, or another rank raised an error.
        NotAvailableError: the JSON has settings that a pipeline does not support.
        ArgumentError: the optimizer has state already.
    """
    axis = mesh.axis(*DIMS)
    raise_together(
        axis,
        lambda: (check_not_served(model), _check_supported(model, config, mesh, optimizer)),
        lambda rank, words: PipelineError(f"rank {rank} cannot be made a stage: {words}"),
    )
    without_values = all_gather_objects(axis, is_without_values(model))
    empty = dict(zip(axis.ranks, without_values, strict=True))
    if len(set(empty.values())) > 1:
        without, having = (next(rank for rank, is_so in empty.items() if is_so is wanted) for wanted in (True, False))
        raise UsageError(
            f"rank {without} was given a model without values (on the meta device), and rank {having} one that has "
            f"them: make it on the meta device on every rank or on none; to hold it once only, make it under zero.Init"
        )
    _check_same_model(model, mesh)
    return empty[axis.ranks[axis.rank]]


def stage_model(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any) -> list[ModelPart]:
    """Reduce a model in place to this rank's stage. All ranks must call this.

    Parameters of other stages are also removed from `optimizer`.

    Returns:
        The parts of the stage, one for each chunk.

    Raises:
        MeshError: a `PipelineModule` was built for other stages.
        PipelineError: the model cannot be split, or stages share a parameter that is not tied.
    """
    section, stages, stage = config.top.pipeline, mesh.size("pp"), mesh.coordinates["pp"]
    if isinstance(model, PipelineModule):
        if (model.num_pipeline_stages(), model.stage) != (stages, stage):
            raise MeshError(
                f"the PipelineModule was built for stage {model.stage} of {model.num_pipeline_stages()}, and this rank "
                f"is stage {stage} of {stages} of mesh {mesh.describe()}"
            )
        _take_own(model.whole_parameters(), model, config, mesh)
        _check_tied_copies(model, mesh)
        return list(model.parts())
    meter = meters.current(config, mesh) if section.partition == "profile" else None
    layout = _find(model, stages, section, meter, mesh)
    everything = dict(model.named_parameters())
    parts: list[ModelPart] = list(keep_stage(model, layout, stages, stage))
    _take_own(everything, model, config, mesh)
    _check_tied_copies(model, mesh)
    names = [
        ", ".join(layout.words(part) for part in range(stage_index, layout.parts, stages))
        for stage_index in range(stages)
    ]
    shares = [sum(layout.costs[stage_index::stages]) / sum(layout.costs) for stage_index in range(stages)]
    unit = "time" if meter is not None else "operations"
    log_rank0(
        f"{stages} stages: {'; '.join(f'{n} ({share:.0%} of {unit})' for n, share in zip(names, shares, strict=True))}"
    )
    left = set(model.parameters())
    if isinstance(optimizer, torch.optim.Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [param for param in group["params"] if param in left]
    return parts


def _find(model: nn.Module, stages: int, section: Any, meter: Meter | None, mesh: Mesh) -> ModelSplit:
    """Find the cuts between stages. All ranks must call this; an error on one rank raises on all."""

    def find(method: str, meter: Meter | None = None) -> ModelSplit:
        return find_layout(model, stages, example_inputs(model), method, section.chunks, meter)

    if not is_sharded_by_init(model):
        make_error = lambda rank, words: PipelineError(f"rank {rank} could not split the model into stages: {words}")  # noqa: E731
        axis = mesh.axis(*DIMS)
        if meter is None:
            return raise_together(axis, lambda: find(section.partition), make_error)
        raise_together(
            axis, lambda: find("uniform"), make_error
        )  # all ranks can split the model, so that all reach the collectives of the measurement
    with alarmed(lambda: "looking for where to split", (DeepSpeedError,)):  # it has collectives: gathers or medians
        return find(section.partition, meter)


def _meter(config: DeepSpeedConfig, mesh: Mesh) -> Meter:
    """Create a function that times blocks on all ranks, on at most 512 tokens per row; it returns median seconds."""

    def measured(model: nn.Module, blocks: Sequence[nn.Module]) -> list[float]:
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        tokens = min(_PROFILED_TOKENS, limit - 2 if isinstance(limit, int) and limit > 2 else _PROFILED_TOKENS)
        rows = config.train_micro_batch_size_per_gpu
        measured_seconds = seconds(model, blocks, example_inputs(model, shape=(rows, tokens)))
        return [
            statistics.median(column)
            for column in zip(*all_gather_objects(mesh.axis(*DIMS), measured_seconds), strict=True)
        ]

    return measured


meters: Replaceable[Callable[[DeepSpeedConfig, Mesh], Meter | None]] = Replaceable(_meter)


def _take_own(everything: dict[str, nn.Parameter], stage: nn.Module, config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Reshard parameters of `zero.Init` over their stage's ranks (below stage 3: unshard). All ranks must call this."""
    shards = config.zero.stage == 3
    with alarmed(lambda: "laying parameters over the ranks of their stage"):
        shard_over(everything, stage.parameters(), mesh.axis(*REPLICATED) if shards else None)


def _check_same_model(model: nn.Module, mesh: Mesh) -> None:
    """Raise PipelineError unless all stages got the same model, parameter by parameter. All ranks must call this."""
    if isinstance(model, PipelineModule):
        names = model.description()
    else:
        first: dict[int, str] = {}  # first name of each parameter, by id
        names = [
            f"{name} {list(param.shape)} {param.dtype}"
            + (f", tied to {first[id(param)]}" if first.setdefault(id(param), name) != name else "")
            + ("" if param.requires_grad else ", frozen")
            for name, param in model.named_parameters(remove_duplicate=False)
        ]
    axis = mesh.axis("pp")
    difference = first_difference(axis, names)
    if difference is None:
        return
    stage, a, b = difference
    raise PipelineError(
        f"rank {axis.ranks[0]} (stage 0) and rank {axis.ranks[stage]} (stage {stage}) were given different models: "
        f"{a or 'nothing'} there, {b or 'nothing'} here; every stage must get the same model"
    )


def _check_tied_copies(model: nn.Module, mesh: Mesh) -> None:
    """Raise PipelineError if a parameter is on several stages, but not as a tied copy. All ranks must call this."""
    copies = {name: placement_of(p).relations.get("pp") is Relation.PARTIAL for name, p in model.named_parameters()}
    everyone = object_exchange.current.gather_present(mesh.axis("pp"), copies)
    first: dict[str, int] = {}
    for stage, stage_copies in everyone.items():
        for name, copied in stage_copies.items():
            other = first.setdefault(name, stage)
            if other != stage and not (copied and everyone[other][name]):
                raise PipelineError(f"'{name}' is held by stages {other} and {stage}, and nothing ties it there")


def _check_supported(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any) -> None:
    stage, section = config.zero.stage, config.top.pipeline
    if section.schedule == "zero_bubble" and policy_for(stage, mesh.size("pp")).reduces_as_gradients_arrive:
        raise NotAvailableError(
            f'pipeline.schedule "zero_bubble" is not available with ZeRO stage {stage}: that sends gradients as soon '
            f"as those of a block are complete, and here those of its weights come after the next micro-batch has "
            f'begun. The nearest are stage 1, or the schedule "1f1b"'
        )
    for name in ("compression_training", "quantize_training"):
        block = getattr(config.top, name)
        if block != type(block)():
            raise NotAvailableError(f"{name} together with pipeline stages is not available yet; leave one out")
    if isinstance(model, PipelineModule):
        return
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        raise ArgumentError("the optimizer has state of the whole model: pass it to initialize before its first step")
    if (is_sharded_by_init(model) or is_without_values(model)) and config.top.pipeline.partition == "profile":
        raise NotAvailableError(
            'pipeline.partition "profile" times whole blocks, and of a model built under zero.Init or on the meta '
            'device no rank has one: take "best", which counts operations'
        )


def staying(model: nn.Module, parameters: list[Any] | None) -> list[Any] | None:
    """Return the parameters, or parameter groups, that belong to this stage, for its optimizer.

    None stays None (all trainable parameters). Groups stay, even empty ones. If nothing is left: one empty group.
    """
    left = set(model.parameters())
    if parameters is None:
        return None if any(param.requires_grad for param in left) else [{"params": []}]
    tensors: list[Any] = []
    for entry in parameters:
        if isinstance(entry, dict):
            tensors.append({**entry, "params": [param for param in entry["params"] if param in left]})
        elif entry in left:
            tensors.append(entry)
    return tensors or [{"params": []}]


def limits_of_stages(held: int, limits: PrefetchLimits, config: DeepSpeedConfig) -> PrefetchLimits:
    """Return ZeRO-3's prefetch limits for a pipeline stage, and log the cost of both choices.

    Args:
        held: number of parameter elements of this stage.
        limits: limits from the JSON, used with `pipeline.stage3_gather` "auto".
    """
    wanted, micros = config.top.pipeline.stage3_gather, config.gradient_accumulation_steps
    keeps = limits.live >= held if wanted == "auto" else wanted == "window"
    log_rank0(
        f"stage 3 under a pipeline: units gathered in each micro-batch are {2 * micros * held:,} elements in a "
        f"window of {micros}; kept for the window {held:,}, and {held:,} are whole at a time. "
        f"pipeline.stage3_gather = {wanted!r}: {'kept for the window' if keeps else 'gathered in each micro-batch'}"
    )
    if wanted == "auto":
        return limits
    everything = max(held, 1)
    return replace(limits, live=everything, reuse=everything) if keeps else replace(limits, live=0, reuse=0)


def generate(
    model: Any, axis: Axis, outputs_of: Callable[[dict[str, Any]], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a model's own `generate` with forward passes through all stages. All ranks must call this.

    Args:
        axis: the ranks of the pipeline.
        outputs_of: runs the model's forward through all stages with keyword arguments; returns the outputs on the last
            stage, else None.
        args, kwargs: arguments of the model's `generate`.

    Returns:
        The result of `generate`, on all ranks.

    Raises:
        PipelineError: the model has no `generate`, or calls forward with positional arguments.
    """
    if not hasattr(model, "generate"):
        raise PipelineError(f"{type(model).__name__} has no generate()")
    # All stages use the random state of the first one; afterwards each has its own state again.
    with _through_stages(model, axis, outputs_of):
        state = all_gather_objects(axis, torch.get_rng_state())[0]
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            return model.generate(*args, **{**kwargs, "use_cache": False})


@contextmanager
def _through_stages(model: nn.Module, axis: Axis, outputs_of: Callable[[dict[str, Any]], Any]) -> Iterator[None]:
    """Context in which a forward of the model runs all stages and returns the last stage's outputs on every rank."""
    own, before, inside = model.forward, vars(model).get("forward"), False

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        if args:
            raise PipelineError("forward passes of generate() name their arguments")
        if inside:
            return own(**kwargs)
        inside = True
        try:
            outputs = outputs_of(kwargs)
        finally:
            inside = False
        local_outputs = None if outputs is None else map_tensors(lambda tensor: tensor.detach(), outputs)
        return all_gather_objects(axis, local_outputs)[-1]

    # `generate` reads the signature of forward to find out the model's arguments.
    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward
        if before is not None:  # the client had replaced forward
            model.forward = before
