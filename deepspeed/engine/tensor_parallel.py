"""Split of a full model over tensor-parallel ranks, and weight quantization of models that are not trained."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import DIMS, REPLICATED, Asked, Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.sections.parallel import PartitionConfig
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, NotAvailableError, OptimizerError, TensorParallelError
from deepspeed.inference.quantization.quantization import apply_section
from deepspeed.optim.build import needs_whole_tensors
from deepspeed.pipe.module import PipelineModule
from deepspeed.tensor_parallel.parallelize import cut_over, is_cut, plan_of
from deepspeed.tensor_parallel.plan import Spec, Specs
from deepspeed.tensor_parallel.plan_file import same_file
from deepspeed.zero.api.reshard import is_sharded_by_init, shard_parameter
from deepspeed.zero.layout.placement import placement_of
from deepspeed.zero.parameters.parameter import is_managed


def axes_cut_by_model(model: nn.Module) -> list[Asked]:
    """Return (mesh dim, size, origin) of the dims over which `tp_model_init` or `PipelineModule` has split a model."""
    plan = plan_of(model)
    axes = [] if plan is None else [("tp", plan.ranks, "tp_model_init")]
    stages = model.num_pipeline_stages() if isinstance(model, PipelineModule) else 1
    return axes if stages == 1 else [*axes, ("pp", stages, "PipelineModule")]


def slice_model(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, mpu: Any, optimizer: Any) -> None:
    """Split a whole model in place over the `tp` ranks of the mesh. All ranks must call this.

    Does nothing if the model is already split, or if `mpu` is given and the JSON has no `tp` size: then the client has
    split it.

    Raises:
        ArgumentError: the optimizer has state already.
        NotAvailableError: the JSON also enables compression.
        TensorParallelError: the model cannot be split, or in `strict_mode` a matrix is not split.
        DeepSpeedConfigError: an entry of `layer_specs` is invalid.
    """
    cuts = mpu is None or any(dim == "tp" for dim, *_ in config.mesh_sizes())
    if mesh.size("tp") == 1 or not cuts or is_cut(model):
        return
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        raise ArgumentError("the optimizer has state of whole matrices: pass it to initialize before its first step")
    for name in ("compression_training", "quantize_training"):
        block = getattr(config.top, name)
        if block != type(block)():
            raise NotAvailableError(f"{name} together with tensor parallelism is not available yet; leave one out")
    section = config.top.tensor_parallel
    same_file(mesh.axis(*DIMS), section.plan_file, mesh.coordinates["pp"])  # all ranks must read the same plan
    plan = cut_over(
        mesh,
        model,
        check=section.verify,
        specs=_specs(section.partition_config, getattr(model, "config", None)),
        vocabulary=bool(section.vocab_parallel_lm_head),
        settle=_settler(mesh) if mesh.size("pp") > 1 and is_sharded_by_init(model) else None,
        plan_file=section.plan_file,
    )
    if section.partition_config.strict_mode and plan.whole:
        name, why = next(iter(plan.whole.items()))
        raise TensorParallelError(
            f"tensor_parallel.partition_config.strict_mode: {len(plan.whole)} matrices of blocks stay whole, such as "
            f"'{name}': {why}"
        )


def _settler(mesh: Mesh) -> Callable[[nn.Module], None]:
    """Create a function that shards slices over the ranks of all stages, before the model is split into stages."""
    axis = mesh.axis(*REPLICATED, "pp")

    def settle(unit: nn.Module) -> None:
        for name, param in unit.named_parameters():
            if not is_managed(param):
                shard_parameter(param, name, axis)

    return settle


def _specs(section: PartitionConfig, config: Any) -> Specs:
    """Return the layer specs that apply to a model with this Hugging Face config; DeepSpeedConfigError if invalid."""
    specs = []
    for index, spec in enumerate(section.layer_specs):
        where = f"tensor_parallel.partition_config.layer_specs[{index}]"
        if not spec.patterns or not spec.partition_type:
            raise DeepSpeedConfigError(f'{where}: an entry needs "patterns" and "partition_type"')
        if spec.model_types is not None and getattr(config, "model_type", None) not in spec.model_types:
            continue
        try:
            specs.append(Spec(tuple(re.compile(pattern) for pattern in spec.patterns), spec.partition_type))
        except re.error as error:
            raise DeepSpeedConfigError(
                f"{where}.patterns: {error.pattern!r} is no regular expression: {error}"
            ) from None
    return Specs(specs, others=section.use_default_specs)


def check_elementwise_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raise OptimizerError for an optimizer whose update reads whole matrices, if this package has split the model.

    A client that splits its model itself and passes `mpu` has chosen an optimizer for slices, as in Megatron-LM.
    """
    if optimizer is None or not needs_whole_tensors(optimizer):
        return
    placed = ((name, placement_of(param)) for name, param in model.named_parameters())
    ours = plan_of(model) is not None
    cut = next((name for name, placement in placed if placement.cuts and (ours or placement.ep > 1)), None)
    if cut is not None:
        raise OptimizerError(
            f"{type(optimizer).__name__} may read whole matrices, and '{cut}' is split over ranks (tp, ep): use an "
            f"optimizer that updates element by element, such as AdamW, SGD or Lion"
        )


def pack_weights(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any, parameters: Any) -> None:
    """Quantize in place the weights that `weight_quantization` of the JSON selects, in a model that is not trained.

    Raises:
        ArgumentError: an optimizer (also in the JSON) or `parameters` are given.
        NotAvailableError: the mesh has tensor or pipeline parallelism.
    """
    section = config.top.weight_quantization
    options = {"post_init_quant": section.post_init_quant, "quantized_initialization": section.quantized_initialization}
    if not any(options.values()):
        return
    if optimizer is not None or parameters or config.top.optimizer is not None:
        raise ArgumentError(
            "weight_quantization is for a model that answers: packed weights are not trained; leave optimizer and "
            "model_parameters out"
        )
    if mesh.size("tp") > 1 or mesh.size("pp") > 1:
        raise NotAvailableError("weight_quantization together with tensor or pipeline parallelism is not available yet")
    apply_section(model, options)
