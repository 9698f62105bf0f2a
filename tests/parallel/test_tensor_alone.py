"""A rank that alone raises, or goes another way, while a model is cut: all ranks end at once, with the layer's name."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.llama.modeling_llama import LlamaMLP

from deepspeed.comm.collectives.autograd import copy_to, gathered, reduce_from, summed
from deepspeed.comm.collectives.same_error import run_collectively
from deepspeed.comm.process_groups.axis import world_axis
from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.errors import TensorParallelError
from deepspeed.tensor_parallel import parallelize
from deepspeed.tensor_parallel.layers import RowParallel
from tests.parallel.tensor_runs import config_of, model_of
from tests.parallel.tiny import raises


class Alone(Exception):
    pass


def fails(*_: Any) -> Any:
    raise Alone("planted")


def together() -> None:
    axis = world_axis()
    alone = axis.rank == 1

    def before() -> None:
        if alone:
            fails()
        summed(torch.ones(2), axis, "first")

    def after() -> float:
        total = float(summed(torch.ones(2), axis, "first").sum())
        return total if not alone else fails()

    def backward() -> None:
        x = torch.ones(2, requires_grad=True)
        y = copy_to(x, axis, "back") * 2
        if alone:
            y.register_hook(fails)
        reduce_from(y, axis, "there").sum().backward()

    def swallowed() -> None:
        """As `before`, in a model that goes on whatever a layer raises."""
        try:
            before()
        except Exception:
            summed(torch.ones(2), axis, "second")

    def elsewhere() -> None:
        summed(torch.ones(2), axis, "left") if alone else gathered(torch.ones(2), axis, 0, label="right")

    for action in (before, after, backward):
        ended = run_collectively(axis, action)
        expected = ["" if rank != 1 else "Alone: planted" for rank in range(axis.size)]
        assert not ended.ok and ended.texts == expected and ended.result is None, (action, ended)
        assert isinstance(ended.error, Alone) is alone
    ended = run_collectively(axis, swallowed)
    assert not ended.ok and "second" in ended.texts[1] and "first" in ended.texts[0], ended
    ended = run_collectively(axis, elsewhere)
    assert "right" in ended.texts[0] and "left" in ended.texts[1], ended
    well = run_collectively(axis, lambda: float(summed(torch.ones(2), axis).sum()))
    assert well.ok and well.result == 2 * axis.size


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_one_rank_raises_ends_all(workers: Any, ranks: int) -> None:
    if ranks > 1:
        workers(ranks).run(together, timeout=30)
        return
    ended = run_collectively(world_axis(), fails)
    assert ended.texts == ["Alone: planted"] and isinstance(ended.error, Alone)


class Planted(LlamaMLP):
    """Raises on the last rank alone once it is cut, when the unit is compared."""

    place = ""
    raised = 0.0

    def fails(self, *_: Any) -> Any:
        Planted.raised = time.monotonic()
        fails()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sliced = isinstance(self.down_proj, RowParallel) and self.down_proj.slot.axis.size > 1
        here = sliced and dist.get_rank() == dist.get_world_size() - 1
        if here and self.place == "before":
            self.fails()
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if here and self.place == "between":
            self.fails()
        if here and self.place == "backward" and hidden.requires_grad:
            hidden.register_hook(self.fails)
        out = self.down_proj(hidden)
        if here and self.place == "after":
            self.fails()
        return out


def planted(place: str, layer: int = 1) -> Any:
    model = model_of("Llama")
    Planted.place = place
    model.model.layers[layer].mlp.__class__ = Planted
    return model


def cut_with(place: str) -> tuple[float, float]:
    model = planted(place)
    with raises(TensorParallelError, "'model.layers.1.mlp'", "rank 1: Alone: planted"):
        parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    return Planted.raised, time.monotonic()


@pytest.mark.parametrize("place", ["before", "between", "after", "backward"])
def test_a_unit_that_raises_on_one_rank_ends_all_by_name(workers: Any, place: str) -> None:
    ends = workers(2).run(cut_with, place, timeout=40)
    raised = ends[1][0]
    assert all(0 < end - raised < 2 for _, end in ends), ends  # the watch's limit is minutes


def initialised(place: str) -> None:
    """The other rows of `tp`, where nothing is wrong, end too."""
    import deepspeed

    model = planted(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(TensorParallelError, "'model.layers.1.mlp'", "rank 3: Alone: planted"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(1, 2))


def test_all_rows_end_where_one_rank_raises(workers: Any) -> None:
    workers(4).run(initialised, "between", timeout=60)


def born() -> None:
    """Rows meet in the gathers of each unit: one that ended in the first is not waited for in the second."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=config_of(3, 2)):
        model = planted("between", layer=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(TensorParallelError, "'model.layers.0.mlp'", "rank 3: Alone: planted"):
        deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(3, 2))


def test_all_rows_of_a_model_born_sharded_end(workers: Any) -> None:
    workers(4).run(born, timeout=60)


def vocabulary() -> None:
    model = model_of("Llama")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1 and torch.is_grad_enabled():
            fails()
        return type(model.model.embed_tokens).forward(model.model.embed_tokens, ids)

    model.model.embed_tokens.forward = forward
    with raises(TensorParallelError, "vocabulary", "rank 1: Alone: planted"):
        parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"), vocabulary=True)


def test_a_vocabulary_that_raises_on_one_rank_ends_all(workers: Any) -> None:
    workers(2).run(vocabulary, timeout=40)
