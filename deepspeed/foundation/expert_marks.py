"""Parameters of experts by their mark, for programs that ask it of every model: in dense models nothing is marked."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from deepspeed.errors import NotAvailableError

Groups = TypeVar("Groups", dict[str, Any], list[dict[str, Any]], tuple[dict[str, Any], ...])


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter is marked as an expert's: `param.allreduce` is False."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer is marked as one of experts: its "moe" is true."""
    return bool(param_group.get("moe", False))


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and how many experts the first one has.

    Raises:
        NotAvailableError: it has parameters of experts, which cannot be spread over ranks yet.
    """
    _reject_experts(m.parameters())
    return False, 0


def split_params_into_shared_and_expert_params(
    params: list[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Parameters that all data-parallel ranks have alike, and those of experts."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Groups, max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """The groups of an optimizer with expert parameters in groups of their own; those of a dense model as they are.

    Args:
        param_groups: one group, or several.
        max_group_size: largest number of elements of a group of experts.

    Raises:
        NotAvailableError: there are parameters of experts, which cannot be spread over ranks yet.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        _reject_experts(group["params"])
    return groups


def _reject_experts(params: Any) -> None:
    if any(is_moe_param(param) for param in params):
        raise NotAvailableError(
            "mixture of experts is not available yet: parameters are marked as an expert's (`allreduce` is False)"
        )
