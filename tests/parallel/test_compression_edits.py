"""What users write into masked weights after the last mask: gone after the next step, and never in an export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_compression import WEIGHTS, pruning, trained
from tests.parallel.test_compression_removal import llama, settings, train
from tests.parallel.tiny import STAGES, Tiny, adamw, loss_of, masters, raises, rows, start, tiny

EDITS = ("full", "local", "in place", "gathered", "load")
GATHER: dict[str, Any] = {"zero": {"stage3_gather_16bit_weights_on_model_save": True}}


def edit(engine: Any, how: str) -> None:
    """Ones everywhere in a masked weight."""
    import deepspeed
    from deepspeed.utils import safe_get_local_fp32_param, safe_set_full_fp32_param, safe_set_local_fp32_param

    param = engine.module.get_parameter(WEIGHTS[1])
    if how == "full":
        safe_set_full_fp32_param(param, torch.ones(6, 6))
    elif how == "local":
        mine = safe_get_local_fp32_param(param)
        safe_set_local_fp32_param(param, torch.empty(0) if mine is None else torch.ones_like(mine))
    elif how == "in place":
        with torch.no_grad():
            param.fill_(1.0)
    elif how == "gathered":
        with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
            param.fill_(1.0)
    else:
        given = {name: torch.ones_like(value) for name, value in masters(engine).items()}
        engine.load_module_state_dict(given)


def one_step(engine: Any, step: int) -> None:
    engine.backward(loss_of(engine, rows(step, dist.get_rank())))
    engine.step()


def seen(engine: Any) -> dict[str, torch.Tensor]:
    """What forward works with, as rank 0 has it."""
    import deepspeed

    found = {}
    for name in WEIGHTS:
        param = engine.module.get_parameter(name)
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().float().clone()
    return found


def edited(stages: tuple[int, ...], hows: tuple[str, ...], extra: dict[str, Any], folder: str) -> None:
    for stage in stages:
        for how in hows:
            if stage == 3 and how == "in place":
                continue
            at = (stage, how)
            with trained(stage, {**pruning("sparse_pruning"), **extra}, adamw, 3) as engine:
                dropped = {name: value == 0 for name, value in masters(engine).items() if name in WEIGHTS}
                assert all(int(flags.sum()) == 18 for flags in dropped.values())
                edit(engine, how)
                one_step(engine, 3)
                now, shown = masters(engine), seen(engine)
                for name, flags in dropped.items():
                    assert torch.equal(now[name] == 0, flags), (at, name, "the master came back")
                    assert torch.equal(shown[name] == 0, flags), (at, name, "forward sees a masked weight")
                assert (now[WEIGHTS[1]][~dropped[WEIGHTS[1]]] > 0.5).all(), (at, "the edit of kept weights was lost")
                edit(engine, how)
                engine.save_16bit_model(folder, f"{stage}{how}.bin")
                if dist.get_rank() == 0:
                    written = torch.load(f"{folder}/{stage}{how}.bin", weights_only=True)
                    for name, flags in dropped.items():
                        assert torch.equal(written[name] == 0, flags), (at, name, "an export has masked weights")
                    assert (written[WEIGHTS[1]][~dropped[WEIGHTS[1]]] == 1).all(), (at, "it has not the edit")
                dist.barrier()


# The fast ones have state divided without the parameters, and with them.
FAST_STAGES = (1, 3)
RUNS = [(2, FAST_STAGES), *(pytest.param(ranks, tuple(STAGES), marks=pytest.mark.slow) for ranks in (1, 2))]


@pytest.mark.parametrize(("ranks", "stages"), RUNS)
def test_an_edit_does_not_bring_masked_weights_back(
    workers: Any, ranks: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    workers(ranks).run(edited, stages, EDITS, GATHER, str(tmp_path), timeout=120)


@pytest.mark.parametrize("stages", [(1, 2), (3,)])
def test_nor_in_bf16_with_masters_elsewhere(workers: Any, stages: tuple[int, ...], tmp_path: Path) -> None:
    zero = {**GATHER["zero"], "offload_optimizer": {"device": "cpu"}}
    extra = {"bf16": {"enabled": True}, "zero": zero}
    workers(2).run(edited, stages, ("full", "in place", "gathered"), extra, str(tmp_path), timeout=120)


class Skipping(Tiny):
    """Its second block can be left out."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[0], self.layers[2]) if self.skips else self.layers:
            x = layer(x)
        return self.out(x)


def untouched(stages: tuple[int, ...]) -> None:
    """The edited weight has no gradient in the step: nothing updates it, and the mask holds all the same."""
    for stage in stages:
        small = {"reduce_bucket_size": 40, "stage3_param_persistence_threshold": 0}
        for how in EDITS:
            if stage == 3 and how == "in place":
                continue
            with start(stage, Skipping(), adamw, **pruning("sparse_pruning"), zero=small) as engine:
                for step in range(3):
                    one_step(engine, step)
                dropped = masters(engine)[WEIGHTS[1]] == 0
                edit(engine, how)
                engine.module.skips = True
                one_step(engine, 3)
                assert torch.equal(masters(engine)[WEIGHTS[1]] == 0, dropped), (stage, how)
                assert torch.equal(seen(engine)[WEIGHTS[1]] == 0, dropped), (stage, how)


@pytest.mark.parametrize(("ranks", "stages"), RUNS)
def test_masks_hold_where_a_step_updates_nothing(workers: Any, ranks: int, stages: tuple[int, ...]) -> None:
    workers(ranks).run(untouched, stages, timeout=120)


# -- parameters that no optimizer updates -----------------------------------------------------------------------------


def ungrouped(stage: int) -> None:
    import deepspeed

    losses = []
    for physical in (False, True):
        config, model = settings(stage, physical), llama()
        del config["optimizer"]
        listed = [param for name, param in model.named_parameters() if "up_proj" not in name]
        inner = torch.optim.AdamW(listed, lr=1e-2, eps=1e-4)
        with deepspeed.initialize(model=model, config=config, optimizer=inner)[0] as engine:
            losses.append(train(engine, range(4)))
            grad = model.model.layers[0].mlp.up_proj.weight.grad
            assert grad is None or not physical or grad.shape == (12, 16)
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) <= 1e-4, losses


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", STAGES)
def test_units_leave_parameters_in_no_optimizer_group(workers: Any, stage: int) -> None:
    workers(1).run(ungrouped, stage, timeout=120)


def blind() -> None:
    """Scores that read gradients, of parameters that nobody trains: the mask would be the first so many units."""
    from deepspeed.errors import CompressionError

    model = tiny()
    for layer in model.layers:
        layer.requires_grad_(False)
    for criterion in ("taylor", "movement"):
        with raises(CompressionError, "reads gradients, and none of its parameters is trained"):
            start(2, model, lambda params: adamw(model.out.parameters()), **pruning("row_pruning", criterion=criterion))


def test_a_criterion_without_gradients_is_refused(workers: Any) -> None:
    workers(1).run(blind, timeout=60)
