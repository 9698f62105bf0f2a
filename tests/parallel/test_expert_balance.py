"""The auxiliary loss of all ranks' tokens, biases of routers, and the load of experts, against one process."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import deepspeed
from deepspeed import utils
from deepspeed.errors import DeepSpeedError, ExpertParallelError
from deepspeed.moe.layer import MoE
from deepspeed.monitor.top import table
from tests.parallel.test_experts import toy
from tests.parallel.tiny import raises

FACTOR, K, ACCUMULATION = 0.5, 2, 2


def balanced(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = toy(family)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = FACTOR
    return model.to(dtype)


def batch(rank: int, micro: int, padded: bool) -> dict[str, torch.Tensor]:
    """Ranks have other bytes and other lengths, so that their experts differ; the mask ends rows early."""
    generator = torch.Generator().manual_seed(7 * micro + rank)
    ids = torch.randint(3 + 30 * rank, 33 + 30 * rank, (2, 9 + 4 * rank), generator=generator)
    inputs = {"input_ids": ids, "labels": ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[0, 5 + rank :] = 0
        inputs |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return inputs


def settings(stage: int, ep: int, balance: str, accumulation: int = ACCUMULATION, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "expert_parallel": {"size": ep, "balance": balance, **more.pop("experts", {})},
        "steps_per_print": None,
        **more,
    }


def of_all_tokens(model: Any, world: int, balance: str, padded: bool, accumulation: int = ACCUMULATION) -> None:
    """Gradients in one process: each rank's own loss, and the auxiliary loss of the tokens of all, by the window."""
    model.train()
    experts = model.config.num_local_experts
    before: tuple[Any, Any] = (0.0, 0.0)
    for micro in range(accumulation):
        loss, logits, masks = torch.zeros(()), [], []
        for rank in range(world):
            inputs = batch(rank, micro, padded)
            output = model(**inputs)
            loss = loss + (output.loss - FACTOR * output.aux_loss) / world
            logits.append(output.router_logits)
            masks.append(inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).flatten())
        joined = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
        mask = torch.cat(masks)
        if balance == "all_ranks":
            aux = load_balancing_loss_func(joined, experts, K, mask)
        else:
            chosen = sum(nn.functional.one_hot(x.topk(K).indices, experts).sum(1).T @ mask for x in joined)
            sums = sum(x.softmax(-1).T @ mask.to(x.dtype) for x in joined)
            rows = len(joined) * mask.sum()
            before = before[0] + chosen, before[1] + rows
            aux = experts * ((before[0] / before[1]) * (sums / rows)).sum()
        ((loss + FACTOR * aux) / accumulation).backward()


def apart(engine: Any, dense: nn.Module) -> float:
    """The largest difference of a gradient, of the largest element of its tensor."""
    wanted, worst = dict(dense.named_parameters()), 0.0
    for name, param in engine.module.named_parameters():
        ours, other = utils.safe_get_full_grad(param), wanted[name].grad
        assert ours is not None and other is not None, name
        worst = max(worst, float((ours - other).abs().max() / other.abs().max()))
    return worst


def gradients(
    stage: int, ep: int, balance: str, padded: bool, dtype: torch.dtype, recompute: str = ""
) -> tuple[float, float]:
    """Apart from the loss of all tokens, and from the mean of the ranks' losses."""
    model, rank = balanced("Mixtral", dtype), dist.get_rank()
    config = settings(stage, ep, balance)
    if recompute == "theirs":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif recompute:
        config["activation_checkpointing"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    for micro in range(ACCUMULATION):
        engine.backward(engine(**batch(rank, micro, padded)).loss)
        if micro < ACCUMULATION - 1:
            engine.step()
    dense, plain = balanced("Mixtral", dtype), balanced("Mixtral", dtype)
    of_all_tokens(dense, dist.get_world_size(), balance, padded)
    for micro in range(ACCUMULATION):
        for other in range(dist.get_world_size()):
            (plain.train()(**batch(other, micro, padded)).loss / dist.get_world_size() / ACCUMULATION).backward()
    result = apart(engine, dense), apart(engine, plain)
    engine.destroy()
    return result


@pytest.mark.parametrize(
    ("stage", "world", "ep", "balance", "padded", "dtype", "recompute"),
    [
        (0, 2, 2, "all_ranks", True, torch.float32, ""),
        (2, 2, 1, "window", True, torch.float32, "ours"),
        (3, 2, 2, "all_ranks", False, torch.float64, "theirs"),
        pytest.param(1, 2, 2, "window", False, torch.float64, "", marks=pytest.mark.slow),
        pytest.param(3, 4, 2, "window", True, torch.float32, "ours", marks=pytest.mark.slow),
        pytest.param(1, 4, 4, "all_ranks", True, torch.float64, "ours", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_all_tokens(
    workers: Any, stage: int, world: int, ep: int, balance: str, padded: bool, dtype: torch.dtype, recompute: str
) -> None:
    for difference, from_mean in workers(world).run(
        gradients, stage, ep, balance, padded, dtype, recompute, timeout=580
    ):
        assert difference <= 2e-6 and from_mean >= 1e-3, (difference, from_mean)
