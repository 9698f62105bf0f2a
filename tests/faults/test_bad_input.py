"""Wrong input and odd models: a typed error that says what to do, or the result of plain PyTorch; at every stage."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, DeepSpeedError, OptimizerError, UsageError
from tests.parallel.tiny import STAGES, Tiny, expect_close, loss_of, masters, raises, reference, rows, sgd, start, tiny
from tests.parallel.tiny import micro_step as step_on
from tests.parity.configs import config

RANKS = 2
PLAIN: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
ADAM = PLAIN | {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
Gathered = deepspeed.zero.GatheredParameters


def train(engine: Any, *steps: int) -> None:
    for step in steps:
        step_on(engine, step)


def expect_trained(engine: Any, steps: int = 3) -> None:
    """The engine has what plain PyTorch has after `steps` steps."""
    twin = reference([[step] for step in range(steps)], dist.get_world_size())
    expect_close(masters(engine), twin.parameters(), 1e-6, at=engine.zero_optimization_stage())


# -- initialize -------------------------------------------------------------------------------------------------------


def adam_with(**params: Any) -> dict[str, Any]:
    return PLAIN | {"optimizer": {"type": "AdamW", "params": params}}


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return Tiny()


def inference_model() -> nn.Module:
    with torch.inference_mode():
        return Tiny()


class Complex(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))


class Expanded(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(1, 3).expand(4, 3))


def foreign() -> torch.optim.Optimizer:
    return sgd(tiny(1).parameters())


def no_arguments() -> None: ...


def two_arguments(_first: Any, _second: Any) -> None: ...


def returns_nothing(_one: Any) -> None: ...


# (arguments of initialize, type of the error, words of its message)
BAD: dict[str, tuple[dict[str, Any], type[DeepSpeedError], str]] = {
    "no model": ({"model": None}, ArgumentError, "model"),
    "a function for a model": ({"model": loss_of}, ArgumentError, "function"),
    "a class for a model": ({"model": Tiny}, ArgumentError, "type"),
    "no config": ({"config": None}, DeepSpeedConfigError, "--deepspeed_config"),
    "missing file": ({"config": "/nowhere/ds.json"}, DeepSpeedConfigError, "/nowhere/ds.json"),
    "config of a wrong type": ({"config": [ADAM]}, DeepSpeedConfigError, "list"),
    "misspelt key": ({"config": ADAM | {"zero_optimisation": {}}}, DeepSpeedConfigError, "zero_optimization"),
    "batch triple": ({"config": ADAM | {"train_batch_size": 7}}, DeepSpeedConfigError, "7 != 1 * "),
    "no batch size": ({"config": {}}, DeepSpeedConfigError, "train_batch_size"),
    "NaN lr": ({"config": adam_with(lr=float("nan"))}, DeepSpeedConfigError, "optimizer.params.lr"),
    "lr in words": ({"config": adam_with(lr="high")}, DeepSpeedConfigError, "optimizer.params.lr"),
    "negative clipping": ({"config": ADAM | {"gradient_clipping": -1}}, DeepSpeedConfigError, "gradient_clipping"),
    "meta parameters": ({"model": meta_model}, ArgumentError, "zero.Init"),
    "lazy parameters": ({"model": lambda: nn.LazyLinear(3)}, ArgumentError, "'weight' of a lazy module"),
    "complex parameters": ({"model": Complex}, OptimizerError, "'phase' is complex"),
    "inference tensors": ({"model": inference_model}, UsageError, "inference_mode"),
    "nothing to train": ({"model": nn.Tanh}, OptimizerError, "no parameter to train"),
    "optimizer over another model": ({"optimizer": foreign}, OptimizerError, "none of the model's parameters"),
    "optimizer of a wrong type": ({"optimizer": lambda: "AdamW"}, OptimizerError, "str"),
    "optimizer callable without argument": (
        {"optimizer": lambda: no_arguments},
        ArgumentError,
        "the optimizer callable",
    ),
    "optimizer callable with two": ({"optimizer": lambda: two_arguments}, ArgumentError, "missing"),
    "optimizer callable that makes none": ({"optimizer": lambda: returns_nothing}, OptimizerError, "NoneType"),
    "scheduler callable without argument": ({"lr_scheduler": no_arguments}, ArgumentError, "the lr_scheduler callable"),
    "scheduler callable that makes none": ({"lr_scheduler": returns_nothing}, ArgumentError, "NoneType"),
    "scheduler in words": ({"lr_scheduler": "WarmupLR"}, ArgumentError, "str"),
    "scheduler without optimizer": ({"lr_scheduler": lambda _: None, "config": PLAIN}, ArgumentError, "no optimizer"),
    "scheduler of another optimizer": (
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(foreign(), 1)},
        ArgumentError,
        "StepLR) schedules a SGD that this engine does not step",
    ),
    "expanded parameters": ({"model": Expanded}, ArgumentError, "'table' is expanded"),
    "collate_fn in words": ({"training_data": [1, 2], "collate_fn": "stack"}, DeepSpeedError, "collate_fn is a str"),
    "mpu without data parallelism": ({"mpu": object()}, ArgumentError, "get_data_parallel_group"),
    "unknown scheduler": ({"config": ADAM | {"scheduler": {"type": "WarmupXR"}}}, ArgumentError, "WarmupLR"),
    "no data": ({"training_data": []}, DeepSpeedError, "no samples"),
    "data without length": ({"training_data": iter([1, 2])}, DeepSpeedError, "no length"),
    "mesh": ({"mesh_param": (1, 5)}, DeepSpeedError, "mesh_param"),
    "names with parameters": ({"model_parameters": lambda m: m.named_parameters()}, ArgumentError, "pairs"),
    "strings": ({"model_parameters": lambda m: ["out.weight"]}, ArgumentError, "a str"),
    "one string": ({"model_parameters": lambda m: "out"}, ArgumentError, "is a str"),
    "a number": ({"model_parameters": lambda m: 5}, ArgumentError, "is a int"),
    "a bare group": ({"model_parameters": lambda m: {"params": list(m.parameters())}}, ArgumentError, "is a dict"),
    "a group without parameters": ({"model_parameters": lambda m: [{"lr": 1.0}]}, ArgumentError, "needs 'params'"),
    "a group of numbers": ({"model_parameters": lambda m: [{"params": [1]}]}, ArgumentError, "a int"),
    "groups and parameters": (
        {"model_parameters": lambda m: [{"params": [m.out.weight]}, m.out.bias]},
        ArgumentError,
        "mixes",
    ),
    "parameters of another model": ({"model_parameters": lambda m: tiny(1).parameters()}, OptimizerError, "none of"),
    "twice": (
        {"model_parameters": lambda m: [*m.parameters(), m.out.bias]},
        OptimizerError,
        "'out.bias' appears twice",
    ),
    "in two groups": (
        {"model_parameters": lambda m: [{"params": [m.out.bias]}, {"params": [m.out.bias]}]},
        OptimizerError,
        "more than one parameter group",
    ),
}


def refuse(name: str, config_too: dict[str, Any]) -> None:
    given, error, words = BAD[name]
    arguments: dict[str, Any] = {"model": tiny, "config": ADAM} | given
    if arguments["model"] not in (None, loss_of, Tiny):
        arguments["model"] = arguments["model"]()
    if callable(arguments.get("optimizer")):
        arguments["optimizer"] = arguments["optimizer"]()
    if callable(arguments.get("model_parameters")):
        arguments["model_parameters"] = arguments["model_parameters"](arguments["model"])
    if isinstance(arguments["config"], dict):
        arguments["config"] = arguments["config"] | config_too
    with raises(error, words):
        deepspeed.initialize(**arguments)


def refuse_all() -> None:
    for name in BAD:
        for extra in ({}, {"zero_optimization": {"stage": 3}}):
            try:
                refuse(name, extra)
            except BaseException as problem:
                raise AssertionError(f"{name}: {type(problem).__name__}: {problem}") from problem
    model = tiny()  # a model that was refused, in every way, still trains
    with start(3, model) as engine:
        train(engine, 0, 1, 2)
        expect_trained(engine)


def test_initialize_refuses_by_name(workers: Any) -> None:
    workers(RANKS).run(refuse_all, timeout=60)


# -- calls ------------------------------------------------------------------------------------------------------------


def wrong_calls(stage: int) -> None:
    with start(stage) as engine:
        x = rows(0, dist.get_rank())
        for loss, word in (("x", "str"), (None, "NoneType"), (engine(x), "shape (2, 3)"), (torch.ones(()), "no graph")):
            with raises(ArgumentError, word):
                engine.backward(loss)
        for items in (-1, float("nan"), "3"):
            with raises(ArgumentError, "num_items"):
                engine.backward(loss_of(engine, x), num_items=items)
        for size in (0, -2, 3):
            with raises(ArgumentError, "train_batch_size"):
                engine.set_train_batch_size(size)
        with raises(UsageError, "no_sync"), engine.no_sync():
            engine.step()
        with raises(ArgumentError, "'0'"), Gathered(engine.module.out.weight, modifier_rank="0"):  # type: ignore[arg-type]
            pass
        for what in (engine.module, "out.weight", engine.module.named_parameters()):
            with raises(ArgumentError, "GatheredParameters"), Gathered(what):  # type: ignore[arg-type]
                pass
        with raises(UsageError, "engine.step()"):
            engine.client_optimizer.step()
        loss = loss_of(engine, rows(0, dist.get_rank()))
        engine.backward(loss)
        with raises(RuntimeError, "backward through the graph a second time"):
            engine.backward(loss)
        engine.step()
        train(engine, 1, 2)
        expect_trained(engine)
    model = tiny()
    with start(stage, model, optimizer=lambda parameters: sgd(parameters[:4])) as engine:
        engine.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
        with raises(OptimizerError, "after initialize"):
            train(engine, 0)


def engines_and_models(stage: int) -> None:
    model = tiny()
    engine = start(stage, model)
    train(engine, 0)
    with raises(UsageError, "'0.layers.0.0.weight' belongs to another engine"):
        start(stage, nn.Sequential(model))
    train(engine, 1)
    engine.destroy()
    engine.destroy()
    engine(rows(0, 0))
    for call in (engine.step, engine.flush, lambda: engine.backward(engine(rows(0, 0)).sum())):
        with raises(UsageError, "destroyed"):
            call()
    with start(stage, model) as second:
        train(second, 2)
        expect_trained(second)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_calls_at_the_wrong_moment(workers: Any, stage: int) -> None:
    workers(RANKS).run(wrong_calls, stage)
    workers(RANKS).run(engines_and_models, stage)


# -- passes that break, or stop half-way ------------------------------------------------------------------------------


class Bang(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _grad: Any) -> Any:  # type: ignore[override]
        raise ValueError("bang")


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def broken_forward(engine: Any) -> None:
    block = engine.module.layers[1]
    for where in (block[0].register_forward_pre_hook, block[0].register_forward_hook, block.register_forward_hook):
        for training in (True, False):
            handle = where(interrupt)
            engine.train(training)
            with raises(KeyboardInterrupt), torch.set_grad_enabled(training):
                engine(rows(9, 0))
            handle.remove()
    engine.train()
    with raises(RuntimeError, "shapes"):
        engine(torch.ones(2, 5))


def broken_backward(engine: Any) -> None:
    for ranks in ((0, 1), (1,)):
        handle = engine.module.layers[1].register_forward_hook(
            lambda _m, _i, out, ranks=ranks: Bang.apply(out) if dist.get_rank() in ranks else out
        )
        loss = loss_of(engine, rows(9, 0))
        if dist.get_rank() in ranks:
            with raises(ValueError, "bang"):
                engine.backward(loss)
        else:
            engine.backward(loss)
        handle.remove()
        engine.zero_grad()


def unused_passes(engine: Any) -> None:
    engine(rows(7, 0))
    engine.backward(loss_of(engine, rows(6, 0)))
    engine.zero_grad()
    engine(rows(5, 0))


def other_modes(engine: Any) -> None:
    engine.eval()
    with torch.inference_mode():
        assert engine(rows(0, 0)).isfinite().all() and engine.module.out.weight.sum().isfinite()
    engine.train()
    engine.module.requires_grad_(False)
    with torch.no_grad():
        engine(rows(0, 0))
    engine.module.requires_grad_(True)


def copies(engine: Any) -> None:
    whole, saved, stream = masters(engine), io.BytesIO(), io.BytesIO()
    torch.save(engine.module.state_dict(), saved)
    expect_close(torch.load(io.BytesIO(saved.getvalue()), weights_only=True), whole, 0.0)
    torch.save(engine.module, stream)
    expect_close(dict(torch.load(io.BytesIO(stream.getvalue()), weights_only=False).named_parameters()), whole, 0.0)
    copied = copy.deepcopy(engine.module)
    expect_close(dict(copied.named_parameters()), whole, 0.0)
    loss_of(copied, rows(0, 0)).backward()
    sgd(copied.parameters()).step()
    weight = pickle.loads(pickle.dumps(engine.module.out.weight))
    assert type(weight) is nn.Parameter and torch.equal(weight, whole["out.weight"])
    called = torch.func.functional_call(engine.module, whole, (rows(0, 0),))
    assert torch.equal(called, engine.module(rows(0, 0)))


def gathers(engine: Any) -> None:
    module, last = engine.module, dist.get_world_size() - 1
    with Gathered(module.out.weight), Gathered(list(module.parameters())):
        with Gathered(module.out.bias, modifier_rank=last):
            pass
        assert module.out.weight.isfinite().all() and module.layers[0][0].weight.isfinite().all()
    with raises(KeyError), Gathered(list(module.parameters()), modifier_rank=0):
        raise KeyError
    with Gathered(list(module.parameters()), modifier_rank=0):
        module.load_state_dict(copy.deepcopy(module.state_dict()))


def in_a_thread(engine: Any) -> None:
    box: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: box.append(engine(rows(3, 0)).sum()))
    thread.start()
    thread.join()
    engine.backward(box[0])
    engine.zero_grad()


BREAKS: tuple[Callable[[Any], None], ...] = (
    broken_forward, broken_backward, unused_passes, other_modes, copies, gathers, in_a_thread,
)  # fmt: skip


def goes_on(stage: int) -> None:
    for harm in BREAKS:
        with start(stage) as engine:
            train(engine, 0)
            harm(engine)
            train(engine, 1, 2)
            expect_trained(engine)
    with start(stage) as engine:
        for modifier in (None, 0):
            with Gathered(list(engine.module.parameters()), modifier_rank=modifier):
                train(engine, 0 if modifier is None else 1)
        train(engine, 2)
        expect_trained(engine)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_as_if_nothing_had_been(workers: Any, stage: int) -> None:
    workers(RANKS).run(goes_on, stage)


# -- weights changed by the user --------------------------------------------------------------------------------------


def by_data(weight: Any, value: float) -> None:
    weight.data.fill_(value)


def by_new_data(weight: Any, value: float) -> None:
    weight.data = torch.full(weight.shape, value, dtype=weight.dtype)


def by_no_grad(weight: Any, value: float) -> None:
    with torch.no_grad():
        weight.fill_(value)


def edited(stage: int, precision: str) -> None:
    """An edit counts from the next step on, as in plain PyTorch; at stage 3 it is refused outside a gather."""
    for edit in (by_data, by_new_data, by_no_grad):
        with start(stage, precision=precision) as engine:
            train(engine, 0)
            weight = engine.module.out.weight
            if stage == 3:
                with raises(DeepSpeedError, "'out.weight'", "GatheredParameters"):
                    edit(weight, 0.5)
                before = masters(engine)["out.bias"]
                with Gathered(weight, modifier_rank=0):
                    edit(weight, 0.5)
                assert masters(engine)["out.weight"].eq(0.5).all()
                assert precision == "bf16" or torch.equal(before, masters(engine)["out.bias"])
            else:
                edit(weight, 0.5)
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.0
            train(engine, 1)
            assert masters(engine)["out.weight"].eq(0.5).all(), edit.__name__
            assert weight.detach().clone().eq(0.5).all(), edit.__name__
    with start(stage, precision=precision) as engine:  # a look at .data is no edit: masters keep their bits
        train(engine, 0)
        before = masters(engine)
        assert all(p.data.isfinite().all() for p in engine.module.parameters())
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        train(engine, 1)
        expect_close(masters(engine), before, 0.0)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_edited_by_the_user(workers: Any, stage: int) -> None:
    for precision in ("fp32", "bf16"):
        workers(RANKS).run(edited, stage, precision)


def cast_later(stage: int) -> None:
    with start(stage) as engine:
        train(engine, 0)
        with raises(DeepSpeedError, "parameter '"):
            engine.module.half()
            loss = engine(rows(0, 0).half()).float().square().mean()
            engine.backward(loss)
            engine.step()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_cast_after_initialize_is_refused(workers: Any, stage: int) -> None:
    workers(RANKS).run(cast_later, stage)


# -- no parameters, and birth -----------------------------------------------------------------------------------------


def no_parameters() -> None:
    for stage in STAGES:
        engine, *_ = deepspeed.initialize(model=nn.Tanh(), config=config(stage, nn.Tanh()))
        assert engine(torch.zeros(2)).eq(0).all()
        engine.destroy()


def birth() -> None:
    with raises(KeyError), deepspeed.zero.Init():
        raise KeyError
    assert type(tiny().out.weight) is nn.Parameter
    with deepspeed.zero.Init(), deepspeed.zero.Init():
        model = tiny()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    expect_close(torch.load(io.BytesIO(saved.getvalue()), weights_only=True), dict(tiny().named_parameters()), 0.0)
    with start(3, model) as engine:
        train(engine, 0, 1, 2)
        expect_trained(engine)


def test_models_without_parameters_and_birth(workers: Any) -> None:
    workers(RANKS).run(no_parameters)
    workers(RANKS).run(birth)
