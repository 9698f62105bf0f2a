"""Layers leave the running engine: it goes on as plain torch does with a model whose layers were taken out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parallel.test_compression_removal import engine_of, llama, state_of, train
from tests.parallel.tiny import said, with_words

STEPS, CUT = 6, 3
KEEP = [0, 2]


def settings(stage: int, tier: str = "none", precision: str = "fp32", **layers: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier}
    block = {"enabled": True, "module_name_prefix": "model.layers", "schedule_offset": CUT, **layers}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        "compression_training": {"layer_reduction": block},
    }


def plain(keep: list[int], cut: int = CUT) -> tuple[list[float], Any]:
    """What plain torch makes of the batches of all ranks: the losses of this rank's, and the model."""
    from deepspeed.compression.pruning.layer_selection import keep_layers

    model, losses = llama(num_hidden_layers=4), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(STEPS):
        if step == cut:
            keep_layers(model, "model.layers", keep)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        optimizer.zero_grad()
        for other in range(world):
            ids = batch_of(step, other)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / world).backward()
            if other == rank:
                losses.append(loss.item())
        optimizer.step()
    return losses, model


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 40, (2, 10), generator=torch.Generator().manual_seed(100 * step + rank))


def layers_leave(stage: int, tier: str, precision: str) -> None:
    expected, small = plain(KEEP)
    with said() as lines:
        engine = engine_of(settings(stage, tier, precision, teacher_layer=KEEP), llama(num_hidden_layers=4))
    if dist.get_rank() == 0:
        gone = sum(p.numel() for p in small.model.layers.parameters())
        told = (
            f"layer_reduction: 2 of 4 layers of model.layers leave the engine after step {CUT} ([0, 2] stay): {gone:,}"
        )
        assert with_words(lines, told) == 1, lines
    with engine:
        held, dropped = engine.optimizer, engine.module.model.layers[1]
        kept = engine.module.model.layers[2]
        found = train(engine, range(STEPS))
        bar = 1e-5 if precision == "fp32" else 3e-2
        assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) <= bar, (expected, found)
        assert engine.optimizer is held and engine.module.model.layers[1] is kept
        assert kept.self_attn.layer_idx == 1 and engine.module.config.num_hidden_layers == 2
        assert sum(p.numel() for p in dropped.parameters()) == 0
        whole = state_of(engine)
        assert whole.keys() >= dict(small.named_parameters()).keys() and not any("layers.2" in n for n in whole)
        for name, param in small.named_parameters() if precision == "fp32" else ():
            assert torch.allclose(whole[name], param, atol=1e-5), name


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_layers_leave(workers: Any, stage: int) -> None:
    workers(2).run(layers_leave, stage, "none", "fp32", timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "tier"), [(1, "none"), (2, "cpu"), (3, "cpu"), (3, "none")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_in_other_tiers_precisions_and_worlds(workers: Any, stage: int, tier: str, precision: str, world: int) -> None:
    workers(world).run(layers_leave, stage, tier, precision, timeout=120)


def chosen(stage: int) -> list[Any]:
    """The layers that influence picks, and the loss after."""
    with engine_of(settings(stage, keep_number_layer=2), llama(num_hidden_layers=4)) as engine:
        blocks = list(engine.module.model.layers)
        losses = train(engine, range(STEPS))
        now = list(engine.module.model.layers)
        assert len(now) == 2
        kept = [blocks.index(block) for block in now]
    expected, _ = plain(kept)
    assert max(abs(a - b) for a, b in zip(expected, losses, strict=True)) <= 1e-5
    return kept


def influence_is_that_of_all_ranks() -> None:
    """One choice at every stage, from the batches of all ranks."""
    from deepspeed.compression.pruning.layer_selection import InfluenceWatch, by_influence

    model = llama(num_hidden_layers=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    watch = InfluenceWatch(model.model.layers, training=True)
    for step in range(CUT):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            ids = batch_of(step, rank)
            (model(input_ids=ids, labels=ids).loss / dist.get_world_size()).backward()
        optimizer.step()
    picked = by_influence(watch.means(), 2)
    assert chosen(0) == chosen(3) == picked


def test_influence_picks_layers(workers: Any) -> None:
    workers(2).run(influence_is_that_of_all_ranks, timeout=120)


def resumes(folder: str, stage: int, places: tuple[int, ...]) -> None:
    """Saved before, just before and after layers left; loaded at another stage, and by the dense class alone."""
    block = settings(stage, keep_number_layer=2)
    with engine_of(block, llama(num_hidden_layers=4)) as engine:
        losses = []
        for step in range(STEPS):
            losses += train(engine, range(step, step + 1))
            engine.save_checkpoint(folder, tag=f"after{step + 1}")
        expected = state_of(engine)
    for saved in places:
        with engine_of(settings(3 - stage, keep_number_layer=2), llama(num_hidden_layers=4)) as engine:
            engine.load_checkpoint(folder, tag=f"after{saved}")
            again = train(engine, range(saved, STEPS))
            assert max(abs(a - b) for a, b in zip(losses[saved:], again, strict=True)) <= 1e-5, (saved, losses, again)
            found = state_of(engine)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert torch.allclose(found[name], value, atol=1e-5), (saved, name)
    dense = {key: value for key, value in block.items() if key != "compression_training"}
    with engine_of(dense, llama(num_hidden_layers=4)) as engine:
        engine.load_checkpoint(folder, tag=f"after{STEPS}")
        assert engine.module.config.num_hidden_layers == 2
        again = train(engine, range(STEPS, STEPS + 1))
    with engine_of(block, llama(num_hidden_layers=2)) as engine:  # a script that builds the small model itself
        assert len(engine.module.model.layers) == 2


@pytest.mark.parametrize(
    ("stage", "places"),
    [(3, (CUT - 1, CUT)), *(pytest.param(z, (1, CUT - 1, CUT, CUT + 1), marks=pytest.mark.slow) for z in (0, 3))],
)
def test_resume(workers: Any, stage: int, places: tuple[int, ...], tmp_path: Path) -> None:
    workers(2).run(resumes, str(tmp_path), stage, places, timeout=240)


def with_everything_else(stage: int, folder: str) -> None:
    """Units, single weights and layers of one run, with groups of parameters by layer, one of which becomes empty."""
    import deepspeed

    model = llama(num_hidden_layers=4)
    config = settings(stage, teacher_layer=[0, 3])
    shared = {"enabled": True, "method": "l1", "schedule_offset": 2}
    rows = {"params": {"dense_ratio": 0.5}, "modules": ["gate_proj", "up_proj"]}
    later = {"enabled": True, "criterion": "activation", "schedule_offset": 5, "method": "l1"}
    config["compression_training"] |= {
        "row_pruning": {"shared_parameters": shared, "different_groups": {"g": rows}},
        "sparse_pruning": {
            "shared_parameters": later,
            "different_groups": {"s": {"params": {"dense_ratio": 0.5}, "modules": ["down_proj"]}},
        },
    }
    del config["optimizer"]
    layers = list(model.model.layers)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if id(p) not in inside], "lr": 1e-2}]
    groups += [{"params": list(layer.parameters()), "lr": 1e-2 / (at + 1)} for at, layer in enumerate(layers)]
    optimizer = torch.optim.AdamW(groups, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    with engine:
        train(engine, range(STEPS))
        assert not any(group["params"] for group in engine.optimizer.param_groups[2:4])
        rates = [g["lr"] for g in engine.optimizer.param_groups]
        assert rates == pytest.approx([1e-2 * 0.9**STEPS / max(at, 1) for at in range(5)])
        found = state_of(engine)
        down = found["model.layers.1.mlp.down_proj.weight"]
        assert down.shape == (16, 12) and (down == 0).float().mean().item() == 0.5
        engine.export_compressed(folder)
        engine.eval()
        ids = batch_of(0, 0)
        with torch.no_grad():
            logits = engine(input_ids=ids).logits
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        small = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert (small.config.num_hidden_layers, small.config.intermediate_size) == (2, 12)
        with torch.no_grad():
            assert torch.allclose(small(input_ids=ids).logits, logits, atol=1e-5)
        one, two = (small.generate(ids, max_new_tokens=4, do_sample=False, use_cache=use) for use in (True, False))
        assert torch.equal(one, two)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_with_units_and_single_weights(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(with_everything_else, stage, str(tmp_path / "small"), timeout=120)


class Aliased(nn.Module):
    """Blocks under two names, the first of which holds the weight that another one shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(4))
        self.again = self.blocks
        self.blocks[3][0].weight = self.blocks[1][0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.again:
            x = x + block(x)
        return x


def aliases_and_ties(stage: int) -> None:
    import deepspeed

    def run(model: Any, step: Any) -> list[float]:
        losses = []
        for at in range(STEPS):
            x = torch.linspace(-1, 1, 8).view(2, 4) * (at + 1)
            losses.append(step(model(x).square().mean(), at))
        return losses

    model = Aliased()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)

    def plain_step(loss: torch.Tensor, at: int) -> float:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if at == CUT - 1:
            model.blocks = model.again = nn.ModuleList([model.blocks[0], model.blocks[3]])
            optimizer.param_groups[0]["params"] = list(model.parameters())
        return loss.item()

    expected = run(model, plain_step)
    config = settings(stage, module_name_prefix="again", teacher_layer=[0, 3])
    tied = Aliased()
    engine, *_ = deepspeed.initialize(model=tied, model_parameters=list(tied.parameters()), config=config)

    def step(loss: torch.Tensor, at: int) -> float:
        engine.backward(loss)
        engine.step()
        return loss.item()

    with engine:
        found = run(engine, step)
        assert len(engine.module.again) == len(engine.module.blocks) == 2
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) <= 1e-5, (expected, found)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_lists_with_two_names_and_weights_of_two_layers(workers: Any, stage: int) -> None:
    workers(2).run(aliases_and_ties, stage, timeout=120)


def at_once_and_refused() -> None:
    from deepspeed.errors import CompressionError, DeepSpeedConfigError

    with engine_of(settings(2, teacher_layer=[0, 2], schedule_offset=0), llama(num_hidden_layers=4)) as engine:
        assert len(engine.module.model.layers) == 2
        expected, _ = plain([0, 2], cut=0)
        found = train(engine, range(STEPS))
        assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) <= 1e-5
    with pytest.raises(CompressionError, match=r"layers \[0, 7\] of 'model.layers', which has 4"):
        engine_of(settings(2, teacher_layer=[0, 7]), llama(num_hidden_layers=4))
    with pytest.raises(DeepSpeedConfigError, match="is not the number of layers that teacher_layer names, 2"):
        engine_of(settings(2, teacher_layer=[0, 2], keep_number_layer=3), llama(num_hidden_layers=4))
    with pytest.raises(CompressionError, match="no list of blocks"):
        engine_of(settings(2, teacher_layer=[0], module_name_prefix="encoder.layer"), llama(num_hidden_layers=4))
    with said() as lines, engine_of(settings(2, teacher_layer=[0, 2]), llama(num_hidden_layers=2)) as engine:
        train(engine, range(STEPS))
        assert len(engine.module.model.layers) == 2
    assert dist.get_rank() or with_words(lines, "model.layers has 2 layers already, and none leaves") == 1, lines


def test_at_once_and_what_is_refused(workers: Any) -> None:
    workers(2).run(at_once_and_refused, timeout=120)


def learns_from_the_whole_model(stage: int) -> None:
    """The model before its cut is the teacher; hooks that look at blocks are not on it."""
    config = settings(stage, keep_number_layer=2)
    config["compression_training"]["distillation"] = {"enabled": True, "teacher": "before", "hidden": 0.5}
    with engine_of(config, llama(num_hidden_layers=4)) as engine:
        blocks = list(engine.module.model.layers)
        losses = train(engine, range(STEPS))
        assert len(engine.module.model.layers) == 2 and all(loss == loss for loss in losses)
        kept = [blocks.index(block) for block in engine.module.model.layers]
        assert engine._state.compression.distiller._remaining == kept  # hidden states are paired by it


def test_the_teacher_keeps_its_layers(workers: Any) -> None:
    workers(2).run(learns_from_the_whole_model, 2, timeout=120)


def an_export_alone(folder: str) -> None:
    """No technique, and a folder all the same: weights are packed, or written as they are, after so many steps."""
    from transformers import AutoModelForCausalLM

    config = settings(3)
    config["compression_training"] = {"export": {"folder": folder, "after": 2}}
    with engine_of(config, llama()) as engine:
        train(engine, range(1))
        assert not Path(folder).exists()
        train(engine, range(1, 2))
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=batch_of(0, 0)).logits
    dist.barrier()
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=batch_of(0, 0)).logits
    assert torch.allclose(found, logits, atol=1e-5)


def test_an_export_needs_no_technique(workers: Any, tmp_path: Path) -> None:
    workers(2).run(an_export_alone, str(tmp_path / "out"), timeout=60)
