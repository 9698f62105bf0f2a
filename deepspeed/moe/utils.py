"""Helpers that separate expert parameters from shared ones and build optimizer groups for both.

The engine does not need such groups; these helpers are for scripts that build them.
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
    """Return whether a model has `MoE` layers, and the number of experts on all ranks of the first one (0: none)."""
    for module in m.modules():
        if isinstance(module, MoE):
            return True, module.num_experts
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert: its attribute `allreduce` is False."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether an optimizer group has expert parameters: its entry "moe" is true."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(params: list[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Return (parameters replicated on all data-parallel ranks, parameters of experts)."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: list[Parameter],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (gradients of replicated parameters, gradients of experts); parameters without gradient are skipped."""
    shared, experts = split_params_into_shared_and_expert_params([p for p in group if p.grad is not None])
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Groups, max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Move the parameters of experts to optimizer groups of their own.

    Args:
        param_groups: one group, or several; the expert parameters are removed from them in place.
        max_group_size: maximum number of elements in a group of several expert parameters.

    Returns:
        The given groups, then the new ones. A new group has the settings of its original group, the "name" of its
        expert-parallel group, and "moe" true.
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
    """Split parameters, in order, into lists of at most `most` elements; a larger parameter gets a list of its own."""
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
    """Build optimizer groups, split into shared and expert parameters.

    Args:
        model_parameters: parameters, which form a group "dense-params", or groups, which are changed in place. If a
            group has the key "moe", the groups are returned unchanged.
    """
    if not model_parameters or isinstance(model_parameters[0], torch.Tensor):
        model_parameters = [{"params": model_parameters, "name": "dense-params"}]
    elif any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
