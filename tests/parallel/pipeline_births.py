"""Models born sharded or on the meta device, cut into stages: what ranks hold meanwhile, and what they train."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from pytest import MonkeyPatch
from torch import nn

import deepspeed
from deepspeed.comm import get_rank
from deepspeed.engine import engine as engine_module
from deepspeed.engine import tensor_parallel
from deepspeed.errors import CommError, NotAvailableError, PipelineError, TensorParallelError, UsageError
from deepspeed.pipe import PipelineModule
from deepspeed.profiling.live_memory import LiveMemory
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero.api import reshard
from tests.parallel.dense import Dense, momentum
from tests.parallel.pipeline_runs import batches, beside_dense, config_of, deep, engine_of
from tests.parallel.tiny import raises

LAYERS = 4
full: Any = safe_get_full_fp32_param


def made(family: str, layers: int = LAYERS, **changes: Any) -> Any:
    """A toy; Llama's embedding has a row for padding, which Transformers writes through a view."""
    return deep(family, layers, **changes)


def born(how: str, family: str, layers: int, config: Any, seed: int = 0, **changes: Any) -> Any:
    """The toy: "init" under zero.Init with the JSON, "ranks" without it, "meta" without values, or "whole"."""
    torch.manual_seed(seed)
    if how == "meta":
        with torch.device("meta"):
            model = made(family, layers, **changes)
        torch.manual_seed(seed + 1)
        return model
    with deepspeed.zero.Init(config_dict_or_path=config if how == "init" else None, enabled=how != "whole"):
        return made(family, layers, **changes)


def whole(how: str, family: str) -> Any:
    """The same model on one process."""
    if how != "meta":
        return made(family)
    with torch.device("meta"):
        model = made(family)
    model.to_empty(device="cpu").tie_weights()  # to_empty unties
    torch.manual_seed(1)
    return model.apply(model._init_weights)


def trained(how: str, family: str, mesh: Any, stage: int, settings: Any = None) -> list[tuple[float, float]]:
    """Relative distances of loss and parameters from the dense model, by window."""
    replicas = mesh.get("dp", 1)
    dense = Dense(whole(how, family), momentum, replicas, 4)
    config = config_of(stage, mesh["pp"], 4, **(settings or {}))
    if mesh.get("tp", 1) > 1:
        config["tensor_parallel"] = {"autotp_size": mesh["tp"]}
    model = born(how, family, LAYERS, config)
    with engine_of(model, config) as engine:
        names = set(dict(dense.model.named_parameters()))
        assert set(dict(engine.module.named_parameters())) < names, "names are those of the whole model"
        return [(loss, params) for loss, _, params in beside_dense(engine, dense, 2)]


def losses(how: str, precision: str) -> list[float]:
    """Of three windows in low precision."""
    config = config_of(3, 2, 4, **{precision: {"enabled": True}})
    model = born(how, "GPTNeo", LAYERS, config)
    engine = engine_of(model, config)
    with engine:
        return [float(engine.train_batch(batches(engine.module, 4 * at, 4, 0))) for at in range(3)]


def held(how: str, pp: int, stage: int) -> float:
    """Most bytes of tensors on this rank until its stage is cut, as a share of the whole model's parameters."""
    config, seen, build = config_of(stage, pp, 1), list[int](), engine_module.build
    with LiveMemory() as memory:

        def note(*args: Any, **kwargs: Any) -> Any:
            seen.append(memory.peak)
            return build(*args, **kwargs)

        engine_module.build = note
        try:
            model = born(how, "Llama", 8, config, hidden_size=128, intermediate_size=512, head_dim=32)
            size = sum(param.numel() * param.element_size() for param in model.parameters())
            mine = list(model.parameters())  # a list that a script keeps keeps nothing alive
            engine, *_ = deepspeed.initialize(model=model, model_parameters=mine, config=config)
        finally:
            engine_module.build = build
        engine.destroy()
    return seen[0] / size


def saved(folder: str, stage: int) -> dict[str, Any]:
    """Names and values of a born model's checkpoint, consolidated."""
    config = config_of(stage, 2, 2)
    model = born("init", "GPTNeo", LAYERS, config)
    engine = engine_of(model, config)
    with engine:
        engine.train_batch(batches(engine.module, 0, 2, 0))
        engine.save_checkpoint(folder, tag="born")
        return {n: full(p).clone() for n, p in engine.module.named_parameters()}


def loaded(folder: str) -> dict[str, Any]:
    """The same into a whole model without a pipeline."""
    model = made("GPTNeo", seed=3)
    engine = engine_of(model, config_of(1, 1, 2))
    with engine:
        engine.load_checkpoint(folder, tag="born")
        return {n: full(p).clone() for n, p in engine.module.named_parameters()}


class Unsaid(nn.Module):
    """Parameters that nobody initializes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))
        self.example_input_array = torch.ones(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).sum()


def refused() -> None:
    """Births that cannot be staged say why; what is built under a context by layers is built as without it."""
    config = config_of(3, 2, 2)
    with torch.device("meta"):
        model = Unsaid()
    for _ in range(2):  # what was refused remains so
        with raises(UsageError, "'scale' of Unsaid", "reset_parameters"):
            deepspeed.initialize(model=model, config=config)
    with torch.device("meta" if get_rank() else "cpu"):
        model = made("GPTNeo")
    with raises(UsageError, "rank 1 was given a model without values", "rank 0 one that has them"):
        deepspeed.initialize(model=model, config=config)
    with torch.device("meta"):
        model = made("GPTNeo", LAYERS - 2 * get_rank())
    with raises(PipelineError, "different models"):
        deepspeed.initialize(model=model, config=config)
    timed = config_of(3, 2, 2, pipeline={"partition": "profile"})
    with raises(NotAvailableError, '"best"'):
        deepspeed.initialize(model=born("init", "GPTNeo", LAYERS, timed), config=timed)
    with deepspeed.zero.Init(config_dict_or_path=config):
        rows = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2, loss_fn=nn.functional.mse_loss)
    values = [param.detach().clone() for param in rows.whole_parameters().values()]  # born, so read together
    engine = engine_of(rows, config)
    with engine:
        own = [full(param) for param in engine.module.parameters()]
        assert all(map(torch.equal, own, values[2 * get_rank() :])) and len(own) == 2
        assert torch.isfinite(engine.train_batch(iter([(torch.ones(2, 2), torch.ones(2, 2))] * 2)))


def alone(place: str) -> tuple[float, float]:
    """The last rank alone raises while a model is born, cut or laid over its stage; when, and when it was known."""
    last, begun = get_rank() == dist.get_world_size() - 1, [0.0]
    config = config_of(3, 2, 2, **({"tensor_parallel": {"autotp_size": 2}} if place == "slices" else {}))

    def fails(*_: Any) -> None:
        begun[0] = time.monotonic()
        raise MemoryError("planted")

    model: Any = born("meta" if place == "rule" else "init", "GPTNeo", LAYERS, config)
    with MonkeyPatch.context() as patch:
        for one in model.modules() if place == "rule" and last else ():
            if hasattr(one, "_init_weights"):
                patch.setattr(one, "_init_weights", fails)
        if place != "rule" and last:
            patch.setattr(*((tensor_parallel, "shard_parameter") if place == "slices" else (reshard, "unshard")), fails)
        with raises(MemoryError if last else TensorParallelError if place == "slices" else CommError, "planted"):
            engine_of(model, config)
    return begun[0], time.monotonic()
