"""The auxiliary loss of all ranks' tokens, biases of routers, and the load of experts, against one process."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from functools import partial
from itertools import chain
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
from deepspeed.moe.structure import find_experts
from deepspeed.monitor.top import table
from tests.parallel.test_experts import toy
from tests.parallel.tiny import raises

FACTOR, K, ACCUMULATION = 0.5, 2, 2


def balanced(family: str, dtype: torch.dtype = torch.float32) -> Any:
    model = toy(family)
    model.config.output_router_logits = True
    model.router_aux_loss_coef = FACTOR
    model.set_experts_implementation("eager")  # grouped products have no fp64
    return model.to(dtype)


def batch(rank: int, micro: int, padded: bool) -> dict[str, torch.Tensor]:
    """Ranks have other bytes and other lengths, so that their experts differ; the mask ends rows early."""
    generator = torch.Generator().manual_seed(7 * micro + rank)
    ids = torch.randint(3 + 15 * rank, 18 + 15 * rank, (2, 9 + 4 * rank), generator=generator)
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
        joined: Any = tuple(torch.cat(layer) for layer in zip(*logits, strict=True))
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
        pytest.param(3, 2, 2, "all_ranks", False, torch.float64, "theirs", marks=pytest.mark.slow),
        pytest.param(1, 2, 2, "window", False, torch.float64, "", marks=pytest.mark.slow),
        pytest.param(3, 4, 2, "window", True, torch.float32, "ours", marks=pytest.mark.slow),
        pytest.param(1, 4, 4, "all_ranks", True, torch.float64, "ours", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_those_of_all_tokens(
    workers: Any, stage: int, world: int, ep: int, balance: str, padded: bool, dtype: torch.dtype, recompute: str
) -> None:
    for difference, from_mean in workers(world).run(
        gradients, stage, ep, balance, padded, dtype, recompute, timeout=180
    ):
        assert difference <= 2e-6 and from_mean >= 1e-3, (difference, from_mean)


WIDTH, EXPERTS, TOKENS = 6, 4, 8


class Block(nn.Module):
    """A layer of experts, whose balance loss is left in an attribute; it may be computed again in backward."""

    def __init__(self, ep: int, k: int, factor: float) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.moe = MoE(
            WIDTH, expert, EXPERTS, ep, k=k, capacity_factor=factor, min_capacity=1,
            drop_tokens=factor < 1, use_rts=False, top2_2nd_expert_sampling=False,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, loss, _ = self.moe(x)
        return x + out, loss


class Net(nn.Module):
    def __init__(self, ep: int, k: int, factor: float = 1.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(ep, k, factor) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.zeros(())
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return x.square().mean(), total


def tokens_of(rank: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(50 * micro + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator) + 2 * rank  # ranks choose other experts


def same_start(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {name: torch.randn(value.shape, generator=generator) / 2 for name, value in model.state_dict().items()}


def gates(stage: int, k: int, recompute: bool) -> tuple[float, float, list[int]]:
    world, rank, dense, plain = dist.get_world_size(), dist.get_rank(), Net(1, k), Net(1, k)
    start = same_start(dense)
    dense.load_state_dict(start)
    plain.load_state_dict(start)
    config = settings(stage, 1, "all_ranks", experts={"load": True})
    if recompute:
        config["activation_checkpointing"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=Net(2, k), config=config)
    engine.load_module_state_dict(start)
    for micro in range(ACCUMULATION):
        loss, balance = engine(tokens_of(rank, micro))
        engine.backward(loss + FACTOR * balance)
        if micro < ACCUMULATION - 1:
            engine.step()
        losses = []
        for other in range(world):
            of_rank, of_tokens = plain(tokens_of(other, micro))
            losses.append(of_rank)
            ((of_rank + FACTOR * of_tokens) / world / ACCUMULATION).backward()
        _, of_all = dense(torch.cat([tokens_of(other, micro) for other in range(world)]))
        for other in range(world):
            (dense(tokens_of(other, micro))[0] / world / ACCUMULATION).backward()
        (FACTOR * of_all / ACCUMULATION).backward()
        assert abs(float((balance - of_all).detach())) <= 1e-5
    result = apart(engine, dense), apart(engine, plain)
    engine.step()
    counts = [load.total for load in engine.expert_load.values()]
    engine.destroy()
    return *result, counts


@pytest.mark.parametrize(
    ("stage", "k", "recompute"),
    [(1, 2, True), (3, 1, False), pytest.param(2, 3, True, marks=pytest.mark.slow)],
)
def test_gates_of_explicit_layers(workers: Any, stage: int, k: int, recompute: bool) -> None:
    for difference, from_mean, counts in workers(2).run(gates, stage, k, recompute, timeout=120):
        assert difference <= 2e-6 and from_mean >= 1e-3, (difference, from_mean)
        assert counts == [2 * TOKENS * k * ACCUMULATION] * 2  # recomputation does not count again


SPEED = 0.01


@contextlib.contextmanager
def counting(model: nn.Module, mask: torch.Tensor, loads: dict[str, Any]) -> Iterator[None]:
    """Inside, forwards of a whole model add to the loads of its layers, by hand."""

    def count(name: str, experts: int, _: nn.Module, args: Any) -> None:
        ones = nn.functional.one_hot(args[1], experts).sum(1) * mask.flatten().unsqueeze(1)
        loads[name] = loads.get(name, 0) + ones.sum(0)

    found = find_experts(model)
    hooks = [module.register_forward_pre_hook(partial(count, name, of.count)) for name, module, of in found]
    yield
    for hook in hooks:
        hook.remove()


def biases(family: str, stage: int, ep: int, recompute: bool) -> None:
    """Two steps, each of two micro-batches; the loads are those of tokens that are no padding."""
    model, rank, world = toy(family), dist.get_rank(), dist.get_world_size()
    config = settings(stage, ep, "model", experts={"bias_update_speed": SPEED})
    if recompute:
        config["activation_checkpointing"] = {"enabled": True}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    dense = toy(family).train()
    optimizer = torch.optim.SGD([param for param in dense.parameters() if param.requires_grad], lr=0.5)
    wanted = {name: value for name, value in dense.state_dict().items() if "e_score_correction_bias" in name}
    ours = dict(chain(engine.module.named_buffers(), engine.module.named_parameters()))
    for step in range(2):
        loads: dict[str, Any] = {}
        optimizer.zero_grad()
        before = {name: bias.clone() for name, bias in wanted.items()}
        for micro in range(2 * step, 2 * step + 2):
            engine.backward(engine(**batch(rank, micro, padded=True)).loss)
            engine.step()
            for other in range(world):
                inputs = batch(other, micro, padded=True)
                with counting(dense, inputs["attention_mask"], loads):
                    (dense(**inputs).loss / world / 2).backward()
        optimizer.step()
        for load, bias in zip(loads.values(), wanted.values(), strict=True):
            bias += SPEED * (load.double().mean() - load).sign().float().view_as(bias)
        assert any(not torch.equal(before[name], bias) for name, bias in wanted.items())
        with deepspeed.zero.GatheredParameters([ours[name] for name in wanted]):
            for name, bias in wanted.items():
                assert torch.equal(ours[name].detach(), bias), name
    engine.destroy()


@pytest.mark.parametrize(
    ("family", "stage", "ep", "recompute"),
    [
        ("DeepseekV3", 2, 2, True),
        pytest.param("Ernie4_5_Moe", 3, 2, False, marks=pytest.mark.slow),
        pytest.param("Glm4Moe", 3, 1, True, marks=pytest.mark.slow),
    ],
)
def test_biases_follow_the_loads_of_all_ranks(workers: Any, family: str, stage: int, ep: int, recompute: bool) -> None:
    workers(2).run(biases, family, stage, ep, recompute, timeout=120)


class Doubled(nn.Module):
    """Its auxiliary loss is no formula of its logits that is known."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        output = self.model(**inputs)
        output.aux_loss = 1.1 * output.aux_loss
        return output


def refused() -> None:
    unbiased = toy("Mixtral")
    with raises(ExpertParallelError, "no buffer or frozen parameter of", "beside the experts of 'model.layers.0"):
        deepspeed.initialize(model=unbiased, config=settings(1, 2, "model", experts={"bias_update_speed": 0.1}))
    hooks: list[Any] = [hook for module in unbiased.modules() for hook in module._forward_pre_hooks.values()]
    assert "TrainingForward._enter" not in {getattr(hook, "_call", hook).__qualname__ for hook in hooks}
    coarse = toy("DeepseekV3")
    for module in coarse.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.bfloat16()
    with raises(ExpertParallelError, "is torch.bfloat16", "make it float32"):
        deepspeed.initialize(model=coarse, config=settings(1, 2, "model", experts={"bias_update_speed": 0.1}))
    for model, words in ((toy("Mixtral"), "output_router_logits"), (Doubled(balanced("Mixtral")), "its aux_loss is")):
        engine, *_ = deepspeed.initialize(model=model, config=settings(1, 2, "all_ranks"))
        with raises(ExpertParallelError, words, '"balance": "model"'):
            engine(**batch(0, 0, padded=False))
        engine.destroy()
    with raises(DeepSpeedError, "balance", "all_ranks"):
        deepspeed.initialize(model=toy("Mixtral"), config=settings(1, 2, "global"))


def test_what_cannot_be_balanced_is_said(workers: Any) -> None:
    workers(2).run(refused, timeout=120)


def measured(folder: str) -> dict[str, Any]:
    """Three steps with monitors, the page of `ds_top` and the timeline; experts drop tokens, blocks run twice."""
    config = settings(1, 1, "model", accumulation=1, activation_checkpointing={"enabled": True})
    config["csv_monitor"] = {"enabled": True, "output_path": folder, "job_name": "run"}
    config["timeline"] = {"enabled": True, "output_path": folder, "job_name": "time", "start_step": 1, "steps": 2}
    engine, *_ = deepspeed.initialize(model=Net(2, 2, factor=0.5), config=config)
    engine.load_module_state_dict(same_start(Net(1, 2)))
    loads = []
    for step in range(3):
        loss, balance = engine(tokens_of(dist.get_rank(), step))
        engine.backward(loss + balance)
        engine.step()
        loads.append(engine.expert_load)
        with torch.no_grad():
            engine(tokens_of(0, step))  # without a gradient: does not count
    dist.barrier()
    page = table(Path(folder) / "run")
    dist.barrier()
    engine.destroy()
    return {"loads": loads, "page": page}


def test_load_goes_to_monitors_page_and_timeline(workers: Any, tmp_path: Path) -> None:
    first, second = workers(2).run(measured, str(tmp_path), timeout=180)
    assert first["loads"] == second["loads"]
    for layer in ("blocks.0.moe", "blocks.1.moe"):
        of_layer = [loads[layer] for loads in first["loads"]]
        assert all(load.total == 2 * TOKENS * 2 and len(load.counts) == EXPERTS for load in of_layer)
        # capacity: ceil(2 x 8 / 4 x 0.5) slots of each expert, on each rank
        assert all(load.dropped >= load.total - 2 * EXPERTS * 2 > 0 for load in of_layer)
        for kind, values in (
            ("max_over_mean", [max(load.counts) / (load.total / EXPERTS) for load in of_layer]),
            ("dropped", [load.dropped / load.total for load in of_layer]),
            ("entropy", [load.entropy for load in of_layer]),
        ):
            (path,) = (tmp_path / "run").glob(f"*Experts*{layer}*{kind}.csv")
            rows = list(csv.reader(path.open()))[1:]
            assert [float(value) for _, value in rows] == pytest.approx(values), (layer, kind)
    last = first["loads"][-1]
    busiest = max(load.max_over_mean for load in last.values())
    assert f"experts: 2 layer(s), busiest expert {busiest:.2f} x the mean (blocks." in first["page"]
    events = json.loads(next((tmp_path / "time").glob("*.json")).read_text())
    events = events if isinstance(events, list) else events["traceEvents"]
    counters = {event["name"]: event["args"]["value"] for event in events if event["ph"] == "C"}
    assert counters["% of the mean load, busiest expert of blocks.1.moe"] == round(
        100 * last["blocks.1.moe"].max_over_mean
    )
    assert counters["tokens dropped by blocks.0.moe"] == last["blocks.0.moe"].dropped


def unasked() -> None:
    engine, *_ = deepspeed.initialize(model=toy("Mixtral"), config=settings(1, 2, "model"))
    engine.backward(engine(**batch(dist.get_rank(), 0, padded=False)).loss)
    engine.step()
    assert engine.expert_load == {} and engine._balance.stepped() == []
    assert not any(module._forward_pre_hooks for module in engine.moe_layers)
    engine.destroy()


def test_nothing_is_counted_unless_asked(workers: Any) -> None:
    workers(2).run(unasked, timeout=120)
