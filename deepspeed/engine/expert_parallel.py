"""Division of a model's experts among ranks, as its `MoE` layers or `expert_parallel` of the JSON require."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.mesh import DIMS, Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.expert_balance import ExpertBalance
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.moe import groups
from deepspeed.moe.expert_parallel import DividedExperts, divide_experts, find_experts, is_divided
from deepspeed.moe.layer import MoE
from deepspeed.moe.load import LayerLoad


def divide_experts_of(
    model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any, parameters: Any = None
) -> None:
    """Divide the experts of a whole model in place, unless they are divided already. All ranks must call this.

    `MoE` layers have their own ep size; `expert_parallel` of the JSON applies to other modules of experts. Parameters
    of experts that other ranks keep are removed from the optimizer and from the list `parameters`.

    Raises:
        ArgumentError: the optimizer has state already.
        NotAvailableError: the JSON also enables compression.
    """
    ep, with_layers = config.expert_parallel_size, any(isinstance(module, MoE) for module in model.modules())
    if ep > 1 and not is_divided(model) and (not with_layers or any(find_experts(model))):
        if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
            raise ArgumentError("the optimizer has state of all experts: pass it to initialize before its first step")
        _refuse_compression(config)
        before = set(model.parameters())
        divide_experts(model, mesh, ep)
        _leave_out(before - set(model.parameters()), optimizer, parameters)
    divide_layers_of(model, config, mesh)


def _leave_out(gone: Iterable[torch.Tensor], optimizer: Any, parameters: Any) -> None:
    """Remove the parameters `gone` in place from an optimizer's groups and from a list of parameters or groups."""
    ids = {id(param) for param in gone}
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    lists: list[Any] = [parameters, *(group["params"] for group in groups)]
    lists += [entry["params"] for entry in parameters or () if isinstance(entry, dict)]
    for params in lists:
        if ids and isinstance(params, list):
            params[:] = [entry for entry in params if id(entry) not in ids]


def divide_layers_of(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh) -> None:
    """Divide the experts of a model's or pipeline stage's `MoE` layers. All ranks must call this.

    Raises:
        NotAvailableError: the JSON also enables compression.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    sizes = {layer.ep_size for layer in layers.values()}
    if mesh.size("pp") > 1:  # stages have different layers, but all ranks must create all groups
        sizes = set().union(*all_gather_objects(mesh.axis(*DIMS), sizes))
    if sizes - {1}:
        _refuse_compression(config)
    for size in sorted(sizes):
        groups._create_expert_and_data_parallel(size)
    for name, layer in layers.items():
        layer.set_deepspeed_parallelism()
        if layer.deepspeed_moe.location is not None:
            layer.deepspeed_moe.location.name = name


def _refuse_compression(config: DeepSpeedConfig) -> None:
    for name in ("compression_training", "quantize_training"):
        block = getattr(config.top, name)
        if block != type(block)():
            raise NotAvailableError(f"{name} together with expert parallelism is not available yet; leave one out")


class ExpertAccessors:
    """Properties of an engine that describe its model's MoE layers."""

    _state: EngineState
    _balance: ExpertBalance

    @property
    def moe_layers(self) -> list[nn.Module]:
        """Return the `MoE` layers and the modules whose experts are divided among ranks, in the model's order."""
        return [module for module in self._state.module.modules() if isinstance(module, (MoE, DividedExperts))]

    @property
    def has_moe_layers(self) -> bool:
        """Return whether the model has MoE layers."""
        return bool(self.moe_layers)

    @property
    def num_experts(self) -> list[int]:
        """Return the number of experts of each layer, over all ranks."""
        layers: list[Any] = self.moe_layers
        return [layer.num_experts if isinstance(layer, MoE) else layer.location.count for layer in layers]

    @property
    def expert_load(self) -> dict[str, LayerLoad]:
        """Return the load of experts by layer name in the last update, over all ranks; {} if tokens are not counted."""
        return self._balance.load()

    @property
    def expert_parallel_group(self) -> dict[str, Any]:
        """Return the process groups of ranks that together have the experts of a layer, by name `ep_size_<n>`."""
        return groups._get_expert_parallel_group_dict()

    @property
    def expert_data_parallel_group(self) -> dict[str, Any]:
        """Return the process groups of ranks with the same experts, by name `ep_size_<n>`."""
        return groups._get_expert_data_parallel_group_dict()
