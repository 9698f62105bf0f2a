"""Experts of one rank of a `MoE` layer, as children of one module."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class ExpertList(nn.ModuleList):
    """List of this rank's experts, indexed from 0.

    The name of a child is the index of the expert in the whole layer, so names in state dicts are unique over ranks.

    Args:
        experts: the experts of this rank.
    """

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__(experts)
        self._count = len(self)  # experts in the whole layer

    def number_from(self, first: int, count: int) -> None:
        """Rename the children to first, first + 1, …; `count` is the number of experts in the whole layer."""
        experts = list(self._modules.values())
        self._modules.clear()
        self._modules.update({str(first + index): expert for index, expert in enumerate(experts)})
        self._count = count

    def _get_abs_string_index(self, idx: Any) -> str:
        return list(self._modules)[int(super()._get_abs_string_index(idx))]

    def __getitem__(self, idx: int | slice) -> Any:  # type: ignore[override]
        if isinstance(idx, slice):
            return list(self._modules.values())[idx]
        return self._modules[self._get_abs_string_index(idx)]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load as torch does, but do not report experts of other ranks as unexpected keys."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        unexpected: list[str] = args[3]
        elsewhere = {str(number) for number in range(self._count)} - set(self._modules)
        unexpected[:] = [
            name
            for name in unexpected
            if not name.startswith(prefix) or name[len(prefix) :].partition(".")[0] not in elsewhere
        ]


class Experts(nn.Module):
    """Copies of one expert, run one after the other.

    Args:
        expert: a module that maps (rows, H) to (rows, H'), or to a tuple with this result first; it is copied.
        num_local_experts: number of experts on this rank.
        expert_group_name: name of the expert-parallel group, set as attribute `group_name` of the parameters; or None.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.deepspeed_experts = ExpertList(copy.deepcopy(expert) for _ in range(num_local_experts))
        self.num_local_experts = num_local_experts
        for param in self.deepspeed_experts.parameters():
            param.allreduce, param.group_name = False, expert_group_name  # type: ignore[attr-defined]

    def forward(
        self, inputs: torch.Tensor, index: torch.Tensor | None = None, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run every expert, even on an empty batch.

        Args:
            inputs: (ranks, local experts, slots, H), a block for each expert; with `index`, (R, H) rows.
            index: (R, k) local experts chosen by each row; values outside of [0, num_local_experts) are ignored. None:
                `inputs` has blocks.
            weights: (R, k) weights of the chosen experts; None: `inputs` has blocks.

        Returns:
            (ranks, local experts, slots, H'); with `index`, (R, H'): the weighted sum of the results for each row.
        """
        if index is None or weights is None:
            blocks = inputs.chunk(self.num_local_experts, dim=1)
            each = zip(self.deepspeed_experts, blocks, strict=True)
            return torch.cat([first_of(expert(block)) for expert, block in each], dim=1)
        row, choice = ((index >= 0) & (index < self.num_local_experts)).nonzero(as_tuple=True)
        expert_of, order = index[row, choice].sort(stable=True)
        row, choice = row[order], choice[order]
        counts = torch.bincount(expert_of, minlength=self.num_local_experts).tolist()
        parts = inputs[row].split(counts)
        out = torch.cat([first_of(run(part)) for run, part in zip(self.deepspeed_experts, parts, strict=True)])
        out = out * weights[row, choice].unsqueeze(-1).to(out.dtype)
        return sum_rows(out, row, inputs.shape[0])


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(index)
        return rows.new_zeros(count, rows.shape[-1]).index_add_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient.index_select(0, *ctx.saved_tensors), None, None


def sum_rows(rows: torch.Tensor, index: torch.Tensor, count: int) -> torch.Tensor:
    """Sum (P, H) rows with equal index (P,) into (count, H); `index_add` would keep the rows for backward."""
    return _SumRows.apply(rows, index, count)  # type: ignore[return-value]


def first_of(result: Any) -> torch.Tensor:
    """Return the output tensor of an expert that may return a tuple."""
    return result[0] if isinstance(result, tuple) else result
