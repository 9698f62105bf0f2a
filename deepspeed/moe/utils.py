"""Tells the parameters of experts from others, and sorts optimizer groups by it.

The engine needs no such groups: they are for scripts that make them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from deepspeed.moe.layer import MoE

Groups = dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has `MoE` layers, and how many experts the first one has, on all ranks together."""
    for module in m.modules():
        if isinstance(module, MoE):
            return True, module.num_experts
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is marked as an expert's: `param.allreduce` is False."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer is marked as one of experts: its "moe" is true."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: list[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters that all data-parallel ranks have alike, and those of experts."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: list[Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of parameters that all ranks have alike, and of experts; those without one are left out."""
    shared, experts = split_params_into_shared_and_expert_params([p for p in group if p.grad is not None])
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Groups, max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups of an optimizer, with the parameters of experts in groups of their own.

    Args:
        param_groups: one group, or several; they are changed in place: experts leave them.
        max_group_size: largest number of elements of a group of experts that has several parameters.

    Returns:
        The groups, then those of experts: with the settings of the group that they left, the "name" of the ranks that
        have the experts together, and "moe" true.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    of_experts: list[dict[str, Any]] = []
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(list(group["params"]))
        if not experts:
            continue
        group["params"] = shared
        by_name: dict[str, list[Parameter]] = {}
        for param in experts:
            by_name.setdefault(getattr(param, "group_name", None) or "experts", []).append(param)
        for name, params in by_name.items():
            parts = _parts(params, max_group_size)
            of_experts += [{**group, "params": part, "name": name, "moe": True} for part in parts]
    return groups + of_experts


def _parts(params: Iterable[Parameter], most: float) -> list[list[Parameter]]:
    """Parameters in their order, in lists of at most so many elements; a larger parameter is alone."""
    parts: list[list[Parameter]] = []
    size = 0.0
    for param in params:
        if not parts or size + param.numel() > most:
            parts.append([])
            size = 0.0
        parts[-1].append(param)
        size += param.numel()
    return parts


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Groups for an optimizer, split into shared and experts' parameters.

    Args:
        model_parameters: parameters, which make a group "dense-params", or groups; if one has a "moe" already, the
            groups are returned as they are.
    """
    if not model_parameters or isinstance(model_parameters[0], torch.Tensor):
        model_parameters = [{"params": model_parameters, "name": "dense-params"}]
    elif any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
