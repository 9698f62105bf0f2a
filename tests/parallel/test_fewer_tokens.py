"""Random-LTD, layer drop and keywords of a step under the engine, on two ranks: stages, recomputation, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.data import random_ltd
from deepspeed.data.curriculum import truncate_batch
from deepspeed.data.draw_keys import DrawKey, DrawKeys
from deepspeed.data.layer_drop import LayerDrop, enable_layer_drop
from deepspeed.errors import ArgumentError, DeepSpeedConfigError, NotAvailableError, UsageError
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd
from tests.parallel.tiny import STAGES, adamw, expect_close, masters, raises, said, start, tiny, with_words
from tests.unit.data.ltd_models import LAYERS, MODELS, batch, build, layers_of, ltd_config

RECOMPUTES = ("none", "ours", "transformers")
LENGTH, ACCUMULATION = 10, 2
LINEAR = {
    "curriculum_type": "seqlen", "min_difficulty": 4, "max_difficulty": 8, "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 2},
}  # fmt: skip


def engine_of(kind: str, stage: int, recompute: str = "none", low: int = 0, drop: float | None = None) -> Any:
    """An engine; `low`: tokens that two layers keep at first (0: no random-LTD); `drop`: θ of layer drop."""
    model = build(kind, **({"hidden_dropout_prob": 0.1} if kind == "bert" else {}))
    more: dict[str, Any] = {"data_efficiency": ltd_config(low, max(low, 7))} if low else {}
    if recompute == "ours":
        more["activation_checkpointing"] = {"enabled": True}
    elif recompute == "transformers":
        model.gradient_checkpointing_enable()
    layer = type(layers_of(model)[0])
    engine = start(stage, model.train(), adamw, accumulation=ACCUMULATION, **more)
    if low:
        convert_to_random_ltd(engine, layer)
    if drop is not None:
        enable_layer_drop(engine, theta=drop, gamma=100.0)
    torch.manual_seed(17 + dist.get_rank())
    return engine


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(ACCUMULATION):
            inputs = batch(10 * step + 2 * micro + dist.get_rank(), length=LENGTH)
            loss = engine(**inputs).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def result(*args: Any, **kwargs: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters of three updates."""
    engine = engine_of(*args, **kwargs)
    losses = train(engine, range(3))
    whole = masters(engine)
    engine.destroy()
    return losses, whole


def expect_equal(ours: Any, theirs: Any, at: Any) -> None:
    assert ours[0] == theirs[0], (at, ours[0], theirs[0])
    different = [name for name, values in ours[1].items() if not torch.equal(values, theirs[1][name])]
    assert not different and ours[1].keys() == theirs[1].keys(), (at, different)


def cell(kind: str, stage: int, recompute: str) -> None:
    plain = result(kind, stage, recompute)
    expect_equal(result(kind, stage, recompute, low=LENGTH, drop=1.0), plain, "all tokens and layers are kept")
    fewer = result(kind, stage, recompute, low=5, drop=0.5)
    assert fewer[0] != plain[0]
    # without recomputation, where each call of a layer happens once
    expect_equal(fewer, result(kind, stage, low=5, drop=0.5), "recomputed")
    if stage:  # stages 2 and 3 sum the micro-batches in another order
        expect_close(fewer[1], result(kind, 0, low=5, drop=0.5)[1], 0.0 if stage == 1 else 1e-4, "stage 0")


@pytest.mark.drawn(2)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_all_kept_is_plain_and_fewer_are_the_same_ones_everywhere(
    workers: Any, kind: str, stage: int, recompute: str
) -> None:
    workers(2).run(cell, kind, stage, recompute, timeout=120)


# -- one draw ---------------------------------------------------------------------------------------------------------


def draws(stage: int) -> tuple[list[Any], list[Any]]:
    """Positions that random-LTD and decisions that layer drop have drawn."""
    tokens: list[Any] = []
    layers: list[Any] = []
    tokens_, draw_ = random_ltd.RandomLTD.draw, LayerDrop.draw

    def note(self: Any, layer: int, hidden: torch.Tensor) -> Any:
        drawn = tokens_(self, layer, hidden)
        tokens.append((layer, None if drawn is None else drawn.positions.tolist()))
        return drawn

    def draw(self: Any, number: int, depth: float, hidden: torch.Tensor) -> Any:
        drawn = draw_(self, number, depth, hidden)
        layers.append((number, *drawn))
        return drawn

    random_ltd.RandomLTD.draw, LayerDrop.draw = note, draw  # type: ignore[method-assign]
    try:
        result("llama", stage, low=5, drop=0.5)
    finally:
        random_ltd.RandomLTD.draw, LayerDrop.draw = tokens_, draw_  # type: ignore[method-assign]
    return tokens, layers


def one_draw(stage: int) -> None:
    tokens, layers = draws(stage)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (tokens, layers))
    assert everyone[0][1] == everyone[1][1] and len(layers) == 3 * ACCUMULATION * LAYERS
    assert {kept for _, kept, _ in layers} == {True, False}
    # each rank has samples of its own, but as many tokens of each
    assert everyone[0][0] != everyone[1][0]
    assert [[len(row) for row in kept or ()] for _, kept in tokens] == [
        [len(row) for row in kept or ()] for _, kept in everyone[1 - dist.get_rank()][0]
    ]


def test_all_ranks_skip_the_same_layers_and_keep_as_many_tokens(workers: Any) -> None:
    workers(2).run(one_draw, 3)


def model_parallel(dim: str) -> None:
    draw_ = random_ltd.RandomLTD.draw
    tokens: list[Any] = []

    def note(self: Any, layer: int, hidden: torch.Tensor) -> Any:
        drawn = draw_(self, layer, hidden)
        tokens.append(drawn.positions.tolist())
        return drawn

    random_ltd.RandomLTD.draw = note  # type: ignore[method-assign]
    model = build("gpt_neo" if dim == "tp" else "gpt2")
    layer = type(layers_of(model)[0])
    more: dict[str, Any] = {"data_efficiency": ltd_config(5, 5), "tensor_parallel": {"autotp_size": 2}}
    engine = start(1, model.train(), adamw, **(more if dim == "tp" else {"sequence_parallel_size": 2}))
    try:
        if dim == "tp":
            convert_to_random_ltd(engine, layer)
        enable_layer_drop(engine, theta=0.5, gamma=100.0)
        for step in range(2):
            loss = engine(**batch(step, padded=False)).loss
            engine.backward(loss)
            engine.step()
    finally:
        random_ltd.RandomLTD.draw = draw_  # type: ignore[method-assign]
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, (tokens, loss.item()))
    assert everyone[0] == everyone[1] and bool(tokens) == (dim == "tp")
    assert any(parameter.grad is None for parameter in engine.module.parameters())
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize("dim", ["tp", "sp"])
def test_ranks_with_parts_of_the_model_or_the_sequence_draw_the_same(workers: Any, dim: str) -> None:
    workers(2).run(model_parallel, dim)


def planted(fault: str) -> None:
    key_of = DrawKeys.next
    if fault == "a key of the rank's own":  # as a count of the rank's forwards would be
        DrawKeys.next = lambda self, layer, hidden: DrawKey(dist.get_rank(), *key_of(self, layer, hidden)[1:])  # type: ignore[method-assign]
    else:
        DrawKeys.next = lambda self, layer, hidden: DrawKey(*torch.randint(99, (3,)).tolist())  # type: ignore[method-assign]
    try:
        with raises(AssertionError):
            one_draw(0) if fault == "a key of the rank's own" else cell("bert", 1, "none")
    finally:
        DrawKeys.next = key_of  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a key of the rank's own", "a key of random states"])
def test_a_planted_fault_of_the_draws_is_found(workers: Any, fault: str) -> None:
    workers(2).run(planted, fault)


# -- checkpoints and exports ------------------------------------------------------------------------------------------


def resumed(kind: str, stage: int, folder: str) -> None:
    engine = engine_of(kind, stage, low=4, drop=0.5)
    train(engine, range(2))
    engine.save_checkpoint(folder)
    state = engine.random_ltd_scheduler.state_dict()
    assert state["current_step"] == 2 and state["consumed_layer_tokens"] == 2 * 8 * (2 * 4 + 2 * 7)
    want = train(engine, range(2, 4)), masters(engine)
    weights = save_without_random_ltd(engine)
    names = list(build(kind).state_dict())
    if dist.get_rank() == 0:
        assert sorted(weights) == sorted(names)
    engine.destroy()

    other = engine_of(kind, stage, low=4, drop=0.5)
    other.load_checkpoint(folder)
    assert other.random_ltd_scheduler.state_dict() == state
    expect_equal((train(other, range(2, 4)), masters(other)), want, "after a resume")
    other.destroy()

    plain = engine_of(kind, stage)  # the names are the model's, so a run without random-LTD goes on
    plain.load_checkpoint(folder)
    train(plain, range(2, 3))
    plain.destroy()


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_resumed_run_is_the_run(workers: Any, kind: str, stage: int, tmp_path: Path) -> None:
    workers(2).run(resumed, kind, stage, str(tmp_path), timeout=120)


def compiled(stage: int) -> None:
    want = result("llama", stage, low=5, drop=0.5)[1]
    engine = engine_of("llama", stage, low=5, drop=0.5)
    engine.compile(backend="eager")
    train(engine, range(3))
    for name, values in masters(engine).items():
        torch.testing.assert_close(values, want[name], rtol=1e-4, atol=1e-4)
    engine.destroy()
    assert not any("forward" in vars(module) for module in engine.module.modules())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_layers_may_be_compiled(workers: Any, stage: int) -> None:
    workers(2).run(compiled, stage, timeout=180)


def unwound() -> None:
    for recompute in ("none", "ours"):
        engine = engine_of("llama", 2, recompute, low=5, drop=0.5)
        train(engine, range(1))
        handle = engine._keywords._drop
        handle.remove()
        handle.remove()
        enable_layer_drop(engine)
        engine.destroy()
        assert not any("forward" in vars(module) for module in engine.module.modules())


def test_destroy_gives_layers_their_forward_again(workers: Any) -> None:
    workers(1).run(unwound)


# -- keywords ---------------------------------------------------------------------------------------------------------


class Told(nn.Module):
    """Notes the keywords it gets, and shortens its input as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.told: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor, curriculum_seqlen: int = 0, **more: Any) -> torch.Tensor:
        self.told.append({"curriculum_seqlen": curriculum_seqlen, **more})
        return self.layer(x[:, : curriculum_seqlen or None]).square().mean()


def keywords(folder: str) -> None:
    layers = {"enabled": True, "theta": 0.5, "gamma": 0.1}
    more = {"curriculum_learning": {"enabled": True, **LINEAR}, "progressive_layer_drop": layers}
    engine = start(1, Told(), **more)
    assert engine.curriculum_enabled_legacy() and engine.pld_enabled() and not engine.random_ltd_enabled()
    assert engine.curriculum_params_legacy()["max_difficulty"] == 8
    assert (engine.pld_theta(), engine.pld_gamma(), engine.pld_params()) == (0.5, 0.1, {"theta": 0.5, "gamma": 0.1})
    for step in range(6):
        if step == 1:
            engine.save_checkpoint(folder)
        loss = engine(torch.ones(2, 8, 6))
        told = engine.module.told[-1]
        assert told["curriculum_seqlen"] == (4, 6, 6, 8, 8, 8)[step]
        assert told["curriculum_seqlen"] == engine.curriculum_scheduler_legacy.get_current_difficulty()
        assert told["progressive_layer_drop"] is True and told["pld_theta"] == engine.progressive_layer_drop.get_theta()
        assert told["pld_theta"] == pytest.approx(0.5 * torch.tensor(-0.1 * step).exp().item() + 0.5, abs=1e-6)
        engine.backward(loss)
        engine.step()
    engine.eval()
    engine(torch.ones(2, 8, 6))
    assert engine.module.told[-1] == {"curriculum_seqlen": 0}
    engine.train()
    engine.load_checkpoint(folder)
    engine(torch.ones(2, 8, 6))
    assert engine.module.told[-1] == engine.module.told[1]
    engine.destroy()

    off = start(0)
    assert not off.curriculum_enabled_legacy() and not off.pld_enabled() and off.pld_params() is False
    assert off.curriculum_scheduler_legacy is off.progressive_layer_drop is off.random_ltd_scheduler is None
    off.destroy()


def test_a_models_forward_gets_the_keywords_of_the_step(workers: Any, tmp_path: Path) -> None:
    workers(2).run(keywords, str(tmp_path))


def refused() -> None:
    for block, advice in (
        ({"curriculum_learning": {"enabled": True, **LINEAR}}, "truncate_batch"),
        ({"progressive_layer_drop": {"enabled": True}}, "enable_layer_drop(engine)"),
    ):
        for model, inputs in ((tiny(), {"x": torch.ones(2, 6)}), (build("llama"), batch(0))):
            engine = start(0, model.train(), **block)
            for _ in range(2):
                with raises(UsageError, "does not take", advice):
                    engine(**inputs)
            engine.destroy()
    for change, key in (
        ({"curriculum_type": "voc"}, "curriculum_type"),
        ({"schedule_type": "fixed"}, "schedule_type"),
        ({"min_difficulty": None}, "min_difficulty"),
        ({"min_difficulty": 3}, "min_difficulty"),
        ({"schedule_config": {}}, "total_curriculum_step"),
    ):
        with raises(DeepSpeedConfigError, key):
            start(0, Told(), curriculum_learning={"enabled": True, **LINEAR, **change})
    custom = LINEAR | {"schedule_type": "custom"}
    engine = start(0, Told(), curriculum_learning={"enabled": True, **custom})
    with raises(UsageError, "set_custom_get_difficulty"):
        engine(torch.ones(2, 8, 6))
    engine.curriculum_scheduler_legacy.set_custom_get_difficulty(lambda step: step + 2)
    engine(torch.ones(2, 8, 6))
    assert engine.module.told[-1]["curriculum_seqlen"] == 3
    engine.destroy()

    with raises(DeepSpeedConfigError, "random_ltd_layer_id"):
        start(0, data_efficiency=ltd_config(4, 8, ids=(1, 9)))
    with raises(NotAvailableError, "layer_token_lr_schedule"):
        start(0, data_efficiency=ltd_config(4, 8, layer_token_lr_schedule={"enabled": True}))
    for name in ("data_efficiency", "data_efficiency.data_routing"):
        block = ltd_config(4, 8)
        (block if name == "data_efficiency" else block["data_routing"])["enabled"] = False
        with said() as lines:
            engine = start(0, data_efficiency=block)
        assert not engine.random_ltd_enabled() and with_words(lines, f"{name}.enabled is false") == 1
        with raises(UsageError, "`enabled` true"):
            convert_to_random_ltd(engine, nn.Sequential)
        engine.destroy()
    engine = start(0, data_efficiency=ltd_config(4, 8, ids=(1,), layers=3))
    with said() as lines:
        engine(torch.ones(2, 6))
    assert with_words(lines, "call convert_to_random_ltd") == 1
    with raises(ArgumentError, "has 0 modules"):
        convert_to_random_ltd(engine, nn.Conv2d)
    assert convert_to_random_ltd(engine, nn.Sequential) is engine
    with raises(UsageError, "called before"):
        convert_to_random_ltd(engine, nn.Sequential)
    with raises(UsageError, "not [batch, sequence, width]"):
        engine(torch.ones(2, 6))
    enable_layer_drop(engine)
    with raises(UsageError, "skipped already"):
        enable_layer_drop(engine)
    engine.destroy()
    engine = start(0, progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1})
    with raises(ArgumentError, "theta 0.4", "0.5"):
        enable_layer_drop(engine, theta=0.4)
    assert enable_layer_drop(engine).schedule is engine.progressive_layer_drop
    engine(torch.ones(2, 6))  # layers are skipped, so the model gets no keywords
    assert engine.progressive_layer_drop.get_theta() == 1.0
    engine.destroy()


def test_wrong_configurations_and_calls_are_refused(workers: Any) -> None:
    workers(1).run(refused)


def meshes() -> None:
    with raises(NotAvailableError, "random_ltd", "(sp)"):
        start(0, build("llama"), data_efficiency=ltd_config(4, 8), sequence_parallel_size=2)
    for block in ({"data_efficiency": ltd_config(4, 8)}, {"progressive_layer_drop": {"enabled": True}}):
        with raises(NotAvailableError, "with pipeline stages is not available"):
            start(0, build("gpt_neo"), pipeline={"stages": 2}, **block)
    engine = start(0, build("gpt_neo"), pipeline={"stages": 2}, curriculum_learning={"enabled": True, **LINEAR})
    scheduler, lengths = engine.curriculum_scheduler_legacy, []

    def shorter(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        lengths.append(scheduler.get_current_difficulty())
        return truncate_batch(inputs, lengths[-1])

    engine.set_batch_fn(shorter)
    with raises(NotAvailableError, "with pipeline stages is not available"):
        enable_layer_drop(engine)
    for step in range(4):
        loss = engine.train_batch(iter([batch(step, padded=False)]))
        assert loss.isfinite()
    assert lengths == [4, 6, 6, 8]
    engine.destroy()


def test_meshes_that_cannot_do_it_are_refused_and_stages_cut_their_batches(workers: Any) -> None:
    workers(2).run(meshes)


def test_a_batch_is_cut_to_a_length() -> None:
    inputs = batch(0, padded=False) | {"mask": torch.ones(4, 1, LENGTH, LENGTH), "weights": torch.ones(4), "name": "x"}
    cut = truncate_batch([inputs], 3)[0]
    assert cut["input_ids"].equal(inputs["input_ids"][:, :3]) and cut["mask"].shape == (4, 1, 3, 3)
    assert cut["weights"] is inputs["weights"] and cut["name"] == "x"
    assert truncate_batch(inputs, LENGTH) is inputs
    with pytest.raises(ArgumentError):
        truncate_batch(inputs, 0)


# -- an old script ----------------------------------------------------------------------------------------------------


def old_script(folder: str) -> None:
    """What DeepSpeedExamples and Megatron-DeepSpeed do with the names of data routing."""
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
    from deepspeed.runtime.data_pipeline.data_routing.helper import remove_random_ltd_state_dict

    model = build("gpt_neo").train()
    layer = type(layers_of(model)[0])
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
            "data_efficiency": ltd_config(4, 8) | {"seed": 5},
        },
    )
    if engine.random_ltd_enabled():
        engine = convert_to_random_ltd(engine, layer)
    scheduler = engine.random_ltd_scheduler
    total = scheduler.get_total_layer_tokens(3)
    for step in range(3):
        loss = engine(**batch(step)).loss
        engine.backward(loss)
        engine.step()
        assert scheduler.get_current_seq() == 4 + step
    scheduler.update_seq(engine.global_steps)
    assert scheduler.state_dict()["consumed_layer_tokens"] == total
    assert scheduler.get_random_ltd_layer_num() == 2
    torch.save(remove_random_ltd_state_dict(save_without_random_ltd(engine)), Path(folder, f"{dist.get_rank()}.pt"))
    build("gpt_neo", seed=1).load_state_dict(torch.load(Path(folder, f"{dist.get_rank()}.pt")))
    assert CurriculumScheduler(LINEAR).get_difficulty(1) == 4
    engine.destroy()


def test_an_old_script_runs(workers: Any, tmp_path: Path) -> None:
    workers(2).run(old_script, str(tmp_path))
