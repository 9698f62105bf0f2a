"""`optimizer.state` by the model's parameter: forgotten, changed and walked through as in torch, or refused by name."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_optimizer_state
from tests.parallel.tiny import STAGES, loss_of, raises, rows, start, tiny

RANKS = 2
WHOLE = {"stage3_param_persistence_threshold": 0}
PLACES = [*((stage, "") for stage in STAGES), (2, "cpu"), (3, "cpu"), (1, "nvme"), (3, "nvme")]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def zero_of(stage: int, place: str) -> dict[str, Any]:
    entries: dict[str, Any] = dict(WHOLE) if stage == 3 else {}
    if place:
        path = {"nvme_path": tempfile.gettempdir() + "/deepspeed-tests"} if place == "nvme" else {}
        entries["offload_optimizer"] = {"device": place, **path}
    return entries


# -- what clients do with the state of some parameters ----------------------------------------------------------------


def relora(state: Any, params: list[Any]) -> None:
    """The reset of ReLoRA's trainer: state there is is zeroed by key."""
    for p in params:
        for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
            if len(state[p]) and key in state[p]:
                state[p][key].mul_(0.0)


def zeroes(state: Any, params: list[Any]) -> None:
    for p in params:
        for value in state[p].values():
            if isinstance(value, torch.Tensor):
                value.zero_()


def pops(state: Any, params: list[Any]) -> None:
    for p in params:
        state.pop(p)


def deletes(state: Any, params: list[Any]) -> None:
    for p in params:
        if p in state:
            del state[p]


def assigns(state: Any, params: list[Any]) -> None:
    for p in params:
        for key, value in state[p].items():
            if value is not None and value.dim():
                state[p][key] = torch.zeros_like(value)


def scales(state: Any, params: list[Any]) -> None:
    """By a tensor of the parameter's shape, in place and out of place."""
    for p in params:
        mask = (torch.arange(p.numel()) % 2).view(p.shape).float()
        for key, value in list(state[p].items()):
            if value is not None and value.dim():
                value *= mask
                state[p][key] = torch.where(value > 0, value, 0.5 * value)


def masks(state: Any, params: list[Any]) -> None:
    for p in params:
        for value in state[p].values():
            if value is not None and value.dim():
                value[(torch.arange(p.numel()) % 3 == 0).view(p.shape)] = 0.0
                value.data.add_(torch.linspace(0, 0.01, p.numel()).view(p.shape))


def walks(state: Any, params: list[Any]) -> None:
    chosen = {id(p) for p in params}
    for p, entries in list(state.items()):
        if id(p) in chosen:
            entries.clear()
    assert len(state) and all(isinstance(p, nn.Parameter) for p in state)


def rolls_back(state: Any, params: list[Any]) -> None:
    """What Lookahead and rollbacks do: keep a copy, change, put the copy back, halved."""
    for p in params:
        kept = copy.deepcopy(state[p])
        zeroes(state, [p])
        state[p] = {key: value * 0.5 if value is not None and value.dim() else value for key, value in kept.items()}


EDITS: dict[str, Callable[[Any, list[Any]], None]] = {
    edit.__name__: edit for edit in (relora, zeroes, pops, deletes, assigns, scales, masks, walks, rolls_back)
}


def chosen(model: Any) -> list[Any]:
    return [model.layers[1][0].weight, model.layers[1][0].bias, model.out.weight]


def whole_reset(optimizer: Any, how: str) -> None:
    if how == "clear":
        optimizer.state.clear()
    else:
        optimizer.state = defaultdict(dict)


def compare(stage: int, place: str, precision: str, make: Any, through: str, edits: list[str]) -> None:
    for name in edits:
        model = tiny()
        twin = copy.deepcopy(model)
        plain, own = make(twin.parameters()), make(model.parameters())
        settings = {"precision": precision, "sharded": False, "zero": zero_of(stage, place)}
        with start(stage, model, optimizer=own, **settings) as engine:
            for step in range(4):
                for rank in range(RANKS):
                    (loss_of(twin, rows(step, rank)) / RANKS).backward()
                plain.step()
                plain.zero_grad()
                engine.backward(loss_of(engine, rows(step, dist.get_rank()).to(next(model.parameters()).dtype)))
                engine.step()
                if step == 1:
                    ours = own if through == "own" else engine.optimizer
                    if name in EDITS:
                        EDITS[name](ours.state, chosen(model))
                        EDITS[name](plain.state, chosen(twin))
                    else:
                        whole_reset(ours, name)
                        whole_reset(plain, name)
                    assert {n for n, p in model.named_parameters() if p in ours.state} == {
                        n for n, p in twin.named_parameters() if p in plain.state
                    }, name
            where = (name, stage, place, precision, through)
            for key, p in model.named_parameters():
                gap = (safe_get_full_fp32_param(p) - twin.get_parameter(key).detach()).abs().max()
                assert gap <= (1e-5 if precision == "fp32" else 0.02), (where, key, float(gap))


@pytest.mark.drawn(4)
@pytest.mark.parametrize(("stage", "place"), PLACES)
def test_edits_by_parameter_are_those_of_torch(workers: Any, stage: int, place: str) -> None:
    workers(RANKS).run(compare, stage, place, "fp32", adamw, "own", [*EDITS, "clear", "replace"], timeout=120)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_edits_by_parameter_in_bf16(workers: Any, stage: int) -> None:
    names = ["relora", "pops", "assigns", "scales", "walks", "replace"]
    workers(RANKS).run(compare, stage, "", "bf16", momentum, "engine", names, timeout=120)


@pytest.mark.parametrize(("stage", "place"), [(0, ""), (2, "")])
def test_edits_of_momentum_through_the_engine(workers: Any, stage: int, place: str) -> None:
    workers(RANKS).run(compare, stage, place, "fp32", momentum, "engine", [*EDITS, "clear", "replace"], timeout=120)


NEED_THE_WHOLE: list[Callable[[Any, Any], Any]] = [
    lambda state, p: state[p]["exp_avg"].norm(),
    lambda state, p: state[p]["exp_avg"].sum(),
    lambda state, p: torch.quantile(state[p]["exp_avg"].abs().flatten(), 0.9),
    lambda state, p: state[p]["exp_avg"].view(-1)[0].zero_(),
    lambda state, p: state[p]["exp_avg"][0],
    lambda state, p: state[p]["exp_avg"].__setitem__(0, 1.0),
    lambda state, p: state[p]["exp_avg"].tolist(),
    lambda state, p: state[p]["exp_avg"].data_ptr(),
    lambda state, p: bool((state[p]["exp_avg"] == 0).all()),
    lambda state, p: torch.where(state[p]["exp_avg"] > 0),
    lambda state, p: torch.linalg.matrix_norm(state[p]["exp_avg"]),
    lambda state, p: state[p].__setitem__("exp_avg", torch.zeros(2, 5)),
    lambda state, p: state.__setitem__(p, 3),
    lambda state, p: torch.zeros(p.shape).copy_(state[p]["exp_avg"]),
]


def refused() -> None:
    """What needs the whole of a state that is cut raises on all ranks, with the name of what gives the whole."""
    for stage in (1, 2, 3):
        model = tiny()
        own = adamw(model.parameters())
        with start(stage, model, optimizer=own, sharded=False, zero=zero_of(stage, "")) as engine:
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            engine.step()
            for name, p in model.named_parameters():
                moment = own.state[p]["exp_avg"]
                assert moment.shape == p.shape and moment.numel() == p.numel(), name
                before = safe_get_full_optimizer_state(p, "exp_avg").clone()
                for number, what in enumerate(NEED_THE_WHOLE):
                    with raises(UsageError, "safe_set_full_optimizer_state"):
                        what(own.state, p)
                        raise AssertionError(number)
                assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), before), name
                safe_set_full_optimizer_state(p, before * 2, "exp_avg")
                assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), before * 2), name
            first, second = model.layers[0][0].weight, model.layers[1][0].weight
            with raises(UsageError, "another way"):
                own.state[first]["exp_avg"].add_(own.state[second]["exp_avg"])


def test_what_needs_the_whole_state_is_refused(workers: Any) -> None:
    workers(RANKS).run(refused, timeout=90)


def alone_on_a_rank() -> None:
    """What one rank alone does with the state leaves nobody waiting."""
    for stage in STAGES:
        model = tiny()
        own = adamw(model.parameters())
        with start(stage, model, optimizer=own, sharded=False, zero=zero_of(stage, "")) as engine:
            for step in range(2):
                engine.backward(loss_of(engine, rows(step, dist.get_rank())))
                engine.step()
                if dist.get_rank() == 1:
                    zeroes(own.state, chosen(model))
                    own.state.pop(model.out.bias, None)
                    assert len(own.state) and model.out.bias not in own.state


def test_one_rank_alone_may_change_state(workers: Any) -> None:
    workers(RANKS).run(alone_on_a_rank, timeout=60)


def saved_by_leaf(folder: str) -> None:
    """`state_dict` of the client's own object, and a checkpoint, hold what was changed by parameter."""
    for stage, place in ((0, ""), (2, ""), (3, "nvme")):
        model = tiny()
        own = adamw(model.parameters())
        with start(stage, model, optimizer=own, sharded=False, zero=zero_of(stage, place)) as engine:
            engine.backward(loss_of(engine, rows(0, dist.get_rank())))
            engine.step()
            own.state[model.out.weight]["exp_avg"].fill_(0.5)
            own.state.pop(model.out.bias)
            packed = own.state_dict()
            assert all(isinstance(key, int) for key in packed["state"])
            everything = [copy.deepcopy(entry["exp_avg"]).flatten() for entry in packed["state"].values()]
            here = sum(int((values == 0.5).sum()) for values in everything)
            counts = [0] * RANKS
            dist.all_gather_object(counts, here)
            assert sum(counts) == model.out.weight.numel() * (RANKS if stage == 0 else 1), (stage, counts)
            engine.save_checkpoint(folder, tag=f"{stage}")
            own.state.clear()
            assert not own.state
            engine.load_checkpoint(folder, tag=f"{stage}")
            assert (safe_get_full_optimizer_state(model.out.weight, "exp_avg") == 0.5).all()
            assert {n for n, p in model.named_parameters() if p not in own.state} == {"out.bias"}, stage
            own.load_state_dict(own.state_dict())
            own.state[model.out.weight]["exp_avg"].mul_(2)
            assert (safe_get_full_optimizer_state(model.out.weight, "exp_avg") == 1).all()


def test_saved_state_is_what_was_changed_by_parameter(workers: Any, tmp_path: Any) -> None:
    workers(RANKS).run(saved_by_leaf, str(tmp_path), timeout=90)


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(tiny(), LoraConfig(r=2, lora_alpha=4, target_modules=r"layers\.\d\.0|out"))


def restart(model: Any, state: Any, gathered: Any) -> None:
    """ReLoRA: adapters are merged into what they adapt and begin anew, and so does 90 percent of their state."""
    from peft.tuners.lora import LoraLayer

    generator = torch.Generator().manual_seed(7)
    for layer in (m for m in model.modules() if isinstance(m, LoraLayer)):
        base, first, second = (m.weight for m in (layer.get_base_layer(), layer.lora_A.default, layer.lora_B.default))
        with gathered([base, first, second]), torch.no_grad():
            base += layer.get_delta_weight("default")
            first.copy_(torch.randn(first.shape, generator=generator))
            second.zero_()
        for param in (first, second):
            keep = torch.rand(param.shape, generator=generator) > 0.9
            for key in ("exp_avg", "exp_avg_sq"):
                state[param][key].mul_(keep)
            state[param]["step"].zero_()


def relora_loop(stage: int, place: str) -> None:
    import deepspeed

    def gathered(params: list[Any]) -> Any:
        return deepspeed.zero.GatheredParameters(params, modifier_rank=0)

    model, twin = adapted(), adapted()
    plain = adamw([p for p in twin.parameters() if p.requires_grad])
    own = adamw([p for p in model.parameters() if p.requires_grad])
    with start(stage, model, optimizer=own, sharded=False, zero=zero_of(stage, place)) as engine:
        for step in range(6):
            if step in (2, 4):
                restart(twin, plain.state, lambda _params: contextlib.nullcontext())
                restart(model, own.state if step == 2 else engine.optimizer.state, gathered)
            for rank in range(RANKS):
                (loss_of(twin, rows(step, rank)) / RANKS).backward()
            plain.step()
            plain.zero_grad()
            engine.backward(loss_of(engine, rows(step, dist.get_rank())))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
                assert (ours - theirs).abs().max() <= 1e-5, (stage, place, name)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("stage", "place"), [(0, ""), (1, ""), (2, "cpu"), (3, ""), (3, "nvme")])
def test_relora_trains_as_in_one_process(workers: Any, stage: int, place: str) -> None:
    workers(RANKS).run(relora_loop, stage, place, timeout=90)


def under_accelerate(stage: int) -> None:
    from tests.clients.accelerate_runs import accelerator_for
    from tests.clients.common import fresh_clients

    with fresh_clients():
        wrapped_by_accelerate(
            stage, accelerator_for(stage, "fp32", gradient_clipping=0.0, gradient_accumulation_steps=1)
        )


def wrapped_by_accelerate(stage: int, accelerator: Any) -> None:
    model = tiny()
    twin = copy.deepcopy(model)
    plain, own = adamw(twin.parameters()), adamw(model.parameters())
    accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    engine, wrapped = accelerator.prepare(model, own)
    for step in range(4):
        for rank in range(RANKS):
            (loss_of(twin, rows(step, rank)) / RANKS).backward()
        plain.step()
        plain.zero_grad()
        accelerator.backward(loss_of(engine, rows(step, dist.get_rank())))
        wrapped.step()
        wrapped.zero_grad()
        if step == 1:
            for p, q in zip(chosen(model), chosen(twin), strict=True):
                wrapped.state[p]["exp_avg"].zero_()
                plain.state[q]["exp_avg"].zero_()
        elif step == 2:
            wrapped.state = defaultdict(dict)
            plain.state = defaultdict(dict)
    for key, p in model.named_parameters():
        gap = (safe_get_full_fp32_param(p) - twin.get_parameter(key).detach()).abs().max()
        assert gap <= 1e-5, (stage, key, float(gap))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2])
def test_state_through_accelerates_optimizer(workers: Any, stage: int) -> None:
    workers(RANKS).run(under_accelerate, stage, timeout=90)
