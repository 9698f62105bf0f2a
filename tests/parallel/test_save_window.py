"""A part of a sharded model saves itself after a client has gathered the whole weights, and dropped them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

from tests.parallel.tiny import (
    Tiny,
    adamw,
    expect_close,
    loss_of,
    masters,
    micro_step,
    raises,
    rows,
    said,
    start,
    with_words,
)

RANKS = 2


class Saves(Tiny):
    """Saves itself as Transformers' models do."""

    def save_pretrained(self, folder: str, is_main_process: bool = True, state_dict: Any = None) -> None:
        state = self.state_dict() if state_dict is None else state_dict
        assert all(value.untyped_storage().data_ptr() for value in state.values())  # shared memory is looked for so
        if is_main_process:
            save_file({name: value.contiguous() for name, value in state.items()}, f"{folder}/model.safetensors")


class Holder(nn.Module):
    """A client's model around another library's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = Saves()
        self.after = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inside(x))


def saved(stage: int, precision: str, everybody: bool, folder: str) -> None:
    engine = start(stage, Holder(), precision=precision)
    for step in range(2):
        micro_step(engine, step)
        state = engine._consolidated_16bit_state_dict()
        if everybody or dist.get_rank() == 0:
            engine.module.inside.save_pretrained(folder)
        dist.barrier()
        if state is not None:
            found = load_file(f"{folder}/model.safetensors")
            assert set(found) == {name.removeprefix("inside.") for name in state if name.startswith("inside.")}
            assert all(torch.equal(value, state[f"inside.{name}"]) for name, value in found.items())
        dist.barrier()
    engine.destroy()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("everybody", [True, False])
@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (3, "bf16"), (2, "bf16"), (0, "fp32")])
def test_it_saves_whole_weights(workers: Any, stage: int, precision: str, everybody: bool, tmp_path: Path) -> None:
    workers(RANKS).run(saved, stage, precision, everybody, str(tmp_path), timeout=120)


def alone(folder: str) -> None:
    """Nobody has gathered the weights, or they have changed since, or nobody has them any more."""

    def saves_what_is() -> None:
        now = masters(engine)
        if dist.get_rank() == 0:
            engine.module.inside.save_pretrained(folder)
            found = load_file(f"{folder}/model.safetensors")
            assert all(torch.equal(value, now[f"inside.{name}"]) for name, value in found.items())
            assert {f"inside.{name}" for name in found} == {name for name in now if name.startswith("inside.")}
        dist.barrier()

    engine = start(3, Holder())
    saves_what_is()
    before = engine.module.state_dict()
    assert all(value.untyped_storage().data_ptr() for value in before.values())
    state = engine._consolidated_16bit_state_dict()
    micro_step(engine, 0)
    saves_what_is()
    now = masters(engine)
    assert all(torch.equal(value.clone(), now[name]) for name, value in before.items())  # read anew after the step
    state = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:  # weights of the caller's, by position
        zeros = {name: torch.zeros(value.shape) for name, value in now.items() if name.startswith("inside.")}
        engine.module.inside.save_pretrained(folder, True, {name[len("inside.") :]: zeros[name] for name in zeros})
        assert not any(bool(value.any()) for value in load_file(f"{folder}/model.safetensors").values())
    dist.barrier()
    del state
    saves_what_is()
    engine.destroy()


def test_one_rank_alone_saves_what_the_weights_are_now(workers: Any, tmp_path: Path) -> None:
    workers(RANKS).run(alone, str(tmp_path), timeout=120)


def two_names() -> None:
    """A parameter under two names is one memory in a state dict, as safetensors and Transformers look for it."""
    model = Tiny()
    model.again = model.layers[1].get_submodule("0")
    with start(3, model) as engine:
        if dist.get_rank() == 0:
            state = engine.module.state_dict()
            one, other = state["layers.1.0.weight"], state["again.weight"]
            assert one.data_ptr() == other.data_ptr() == one.view(-1).data_ptr() != state["out.weight"].data_ptr()
        with raises(RuntimeError, "which is sharded here"):
            engine.module.out.weight.data_ptr()
        with raises(RuntimeError, "which is sharded here"):
            engine.module.out.weight.detach().numpy()


def test_names_of_one_parameter_share_memory(workers: Any) -> None:
    workers(RANKS).run(two_names, timeout=120)


def saved_by_one_rank(folder: str) -> None:
    """As programs do that were written for stage 2."""
    with start(3, optimizer=adamw) as engine:
        micro_step(engine, 0)
        trained = masters(engine)
        if dist.get_rank() == 0:
            torch.save(engine.module.state_dict(), f"{folder}/model.bin")
            saved = torch.load(f"{folder}/model.bin", weights_only=True)
            assert set(saved) == set(trained)
            assert all(torch.equal(saved[name], values) for name, values in trained.items())
        micro_step(engine, 1)


def test_one_rank_alone_saves_a_sharded_state_dict(workers: Any, tmp_path: Path) -> None:
    workers(2).run(saved_by_one_rank, str(tmp_path))


def saved_where_one_rank_has_gradients(folder: str) -> None:
    """The other rank skips a micro-batch, as scripts do whose data ends."""

    def first(engine: Any) -> None:
        if dist.get_rank() == 0:
            engine.backward(loss_of(engine, rows(0, 0)))
        engine.step()

    with start(1, accumulation=2) as engine:
        first(engine)
        engine.save_checkpoint(folder)
        micro_step(engine, 1)
        wanted = masters(engine)
    with start(1, accumulation=2) as engine:
        engine.load_checkpoint(folder)
        micro_step(engine, 1)
        expect_close(masters(engine), wanted)
    with said() as lines, start(1, accumulation=2) as engine:
        engine.load_checkpoint(folder, load_optimizer_states=False)
    if dist.get_rank() == 0:
        assert with_words(lines, "1 of 2 micro-batches", "starts again", "without the optimizer's state"), lines


def test_a_window_is_saved_in_which_only_some_ranks_have_gradients(workers: Any, tmp_path: Path) -> None:
    workers(RANKS).run(saved_where_one_rank_has_gradients, str(tmp_path))
