"""Toys whose routers are forced to a load of one rank, for predictions of memory under expert parallelism."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

EXPERTS, CHOICES, WIDTH, INNER, LAYERS, ROWS, LENGTH = 8, 2, 64, 96, 2, 4, 96


def forced(ranks: int, busiest: float) -> Callable[[nn.Module, Any, Any], Any]:
    """A hook that replaces a router's choices: the first rank's experts get `busiest` times the mean, all alike."""
    assert busiest in (1, ranks)  # all sets of experts, or all choices are experts of that rank
    allowed = range(EXPERTS // ranks if busiest > 1 else EXPERTS)
    sets = torch.tensor(list(itertools.combinations(allowed, CHOICES)))

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        logits, weights, index = output
        return logits, weights, sets[torch.arange(index.shape[0]) % len(sets)].to(index.dtype)

    return hook


def mixtral(ranks: int, load: float, checkpointing: bool) -> nn.Module:
    """A Mixtral with forced routers, and Transformers' own checkpointing if that is asked for."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=EXPERTS, num_experts_per_tok=CHOICES))
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(forced(ranks, load))
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def maker(ranks: int, load: float, checkpointing: bool) -> Callable[[], nn.Module]:
    return functools.partial(mixtral, ranks, load, checkpointing)
