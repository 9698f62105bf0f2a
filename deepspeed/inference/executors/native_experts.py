"""Mixtures of experts of the native executor: recognition of their routers, and descriptions of their experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from deepspeed.errors import PackingError
from deepspeed.foundation.log import describe_error
from deepspeed.inference.executors.native_tensors import GROUP, GatedMlp, matrix_of, rows_of
from deepspeed.inference.executors.structure import is_mixture
from deepspeed.inference.quantization.experts import PackedExperts, stacks_of, try_gated

ROWS = 64  # of a trial of a router
SPREADS = (0.5, 4.0)  # of the logits in a trial
ALIKE = {torch.float32: 1e-5, torch.bfloat16: 0.01}  # tolerance of a router's weights
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}  # steps between roundings of a router's inputs


@torch.no_grad()
def routing_of(router: nn.Module) -> tuple[torch.Tensor, int, bool]:
    """Return (matrix, experts per row, whether weights are normalized) of a router that takes the likeliest experts.

    Such a router is recognized on random rows; PackingError for others."""
    kind, weight = type(router).__name__, router._parameters.get("weight")
    if weight is None or weight.dim() != 2 or len(router._parameters) > 1 or router._modules or router._buffers:
        raise PackingError(f"its router {kind} has other parts than one matrix")
    if weight.dtype not in ALIKE or weight.device.type != "cpu":
        raise PackingError(f"its router is {weight.dtype} on {weight.device}")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, weight.shape[1], generator=generator)
    spread = float((rows @ weight.float().T).std(unbiased=False)) or 1.0
    errors, chosen = {False: torch.zeros(()), True: torch.zeros(())}, 0
    for size in SPREADS:
        x = (rows * (size / spread)).to(weight.dtype)
        try:
            _, scores, index = router(x)
        except Exception as error:  # any error of a router with another interface
            raise PackingError(f"its router {kind} is called in another way: {describe_error(error)}") from error
        if not isinstance(index, torch.Tensor) or not isinstance(scores, torch.Tensor):
            raise PackingError(f"its router {kind} returns other results than logits, weights, experts")
        chosen = index.shape[-1]
        probabilities = F.linear(x, weight).float().softmax(-1)
        if index.is_floating_point() or scores.shape != (ROWS, chosen) or index.shape != scores.shape:
            raise PackingError(f"its router {kind} returns other results than logits, weights, experts")
        own = probabilities.gather(1, index)
        largest, distinct = probabilities.topk(chosen).values, index.sort(-1).values.diff(dim=-1)
        if float((own.sort(-1, descending=True).values - largest).abs().max()) > 1e-5 or bool((distinct == 0).any()):
            raise PackingError(f"its router {kind} does not choose the largest probabilities")
        for normalized in errors:
            right = own / own.sum(-1, keepdim=True) if normalized else own
            error = ((scores.float() - right).abs() / right.clamp(min=1e-6)).max()
            errors[normalized] = torch.maximum(errors[normalized], error)  # unlike Python's `max`, it does not lose NaN
    normalized = bool(errors[True] < errors[False])
    if not errors[normalized] <= ALIKE[weight.dtype]:
        raise PackingError(f"its router {kind} weighs its experts by something else than their probabilities")
    return weight, chosen, normalized


def experts_of(experts: Any, count: int) -> tuple[Any, bool]:
    """Return `count` experts as an array of `GatedMlp`, and whether every expert begins at a multiple of `GROUP` rows
    (for packing in 12 bits); PackingError for unsupported experts."""
    if isinstance(experts, PackedExperts):
        stacks = experts.gate_up, experts.down
    else:
        whole = stacks_of(experts)
        if len(whole[0]) != count:
            raise PackingError(f"its router chooses among {count} experts, and it has {len(whole[0])}")
        try_gated(experts)
        stacks = tuple(stack.detach().flatten(0, 1) for stack in whole)
    gate_up, down = (matrix_of(stack) for stack in stacks)
    if isinstance(gate_up, str) or isinstance(down, str):
        raise PackingError(f"experts: {gate_up if isinstance(gate_up, str) else down}")
    inner, width = down.inputs, gate_up.inputs
    if (gate_up.outputs, down.outputs) != (2 * inner * count, width * count):
        raise PackingError("its experts have matrices of unequal sizes")
    each = (GatedMlp * count)()
    for number in range(count):
        each[number].gate = rows_of(gate_up, 2 * number * inner, inner)
        each[number].up = rows_of(gate_up, (2 * number + 1) * inner, inner)
        each[number].down = rows_of(down, number * width, width)
    return each, inner % GROUP == 0 and width % GROUP == 0


@torch.no_grad()
def clear_rows(block: Any, stream: torch.Tensor) -> torch.Tensor:
    """Return the indices of the rows of a residual stream [rows, width] for which rounding cannot change the choices of
    a block's router; all rows without a router."""
    if not is_mixture(block.mlp):
        return torch.arange(len(stream))
    router = block.mlp.gate
    weight = router.weight.float()
    rows = block.post_attention_layernorm(stream.to(router.weight.dtype)).float()
    chosen = router(rows[:1].to(router.weight.dtype))[2].shape[-1]
    if chosen == len(weight):
        return torch.arange(len(stream))
    logits, step = rows @ weight.T, ROUNDING[router.weight.dtype]
    noise = step * (rows.square() @ weight.square().T).sqrt().amax(-1) + step * logits.abs().amax(-1)
    ordered = logits.sort(-1, descending=True).values
    return torch.where(ordered[:, chosen - 1] - ordered[:, chosen] > noise)[0]
