"""What a cut model is used for beside its training loop: evaluation, generation, loops, weights in and out."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed.checkpoint import huggingface
from deepspeed.checkpoint.compat.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.comm.process_groups.mesh import current_mesh, mesh_for
from deepspeed.errors import CheckpointError, DataError, OptimizerError
from deepspeed.tensor_parallel.parallelize import cut_model
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.dense import Dense, momentum
from tests.parallel.tensor_runs import batch_of, config_of, loss_of, model_of
from tests.parallel.tiny import raises


def start(model: Any, config: dict[str, Any], optimizer: Any = momentum) -> Any:
    import deepspeed

    given = {"optimizer": optimizer(model.parameters())} if optimizer is not None else {}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **given)
    return engine


def agree(engine: Any, dense: Any, bar: float) -> None:
    for name, wanted in dense.named_parameters():
        found = safe_get_full_fp32_param(engine.module.get_parameter(name))
        assert found.shape == wanted.shape and (found - wanted).abs().max() <= bar, name


def served(stage: int) -> None:
    """In the middle of a window: outputs, greedy and drawn tokens, by ranks whose scripts seed by rank."""
    model = model_of("Llama")
    dense, rank = copy.deepcopy(model), dist.get_rank()
    with start(model, config_of(stage, 2, accumulation=2)) as engine:
        engine.backward(loss_of(engine, 0, 0))
        engine.step()
        engine.eval()
        dense.eval()
        given = batch_of(model, 1, 0)
        with torch.no_grad():
            ours, theirs = (one(**given).logits for one in (engine, dense))
        assert (ours - theirs).abs().max() <= 1e-5
        for how in ({"do_sample": False}, {"do_sample": True, "top_k": 8}, {"num_beams": 2, "do_sample": False}):
            torch.manual_seed(7 + rank)
            ours = model.generate(input_ids=given["input_ids"], max_new_tokens=6, **how)
            following = torch.rand(3)  # ranks go on alike: they share activations that are dropped
            torch.manual_seed(7)
            theirs = dense.generate(input_ids=given["input_ids"], max_new_tokens=6, **how)
            assert torch.equal(ours, theirs), how
            assert torch.equal(following, torch.rand(3)), how
        with raises(DataError, "ranks 0 and 1", "generate()"):
            model.generate(input_ids=given["input_ids"] + rank, max_new_tokens=2)
        engine.train()
        engine.backward(loss_of(engine, 1, 0))
        engine.step()
        twin = Dense(dense.train(), momentum, 1, 2)
        twin.window(0, loss_of)
        twin.step()
        agree(engine, twin.model, 1e-6)


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_cut_model_evaluates_and_generates(workers: Any, stage: int) -> None:
    workers(2).run(served, stage, timeout=60)


def copied() -> None:
    """A copy of a cut model is a cut model of its own; noise that modules draw is alike on all ranks."""
    torch.manual_seed(3 + dist.get_rank())
    model = model_of("Mixtral", seed=0)
    torch.manual_seed(3 + dist.get_rank())
    cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    drawn = torch.rand(2)
    everyone = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(everyone, drawn)
    assert torch.equal(*everyone)
    twin, given = copy.deepcopy(model).eval(), batch_of(model, 0, 0)["input_ids"]
    how = {"input_ids": given, "max_new_tokens": 3, "do_sample": False}
    assert torch.equal(twin.generate(**how), model.eval().generate(**how))
    with torch.no_grad():
        for param in twin.lm_head.parameters():
            param.neg_()
    assert not torch.equal(twin.generate(**how), model.generate(**how))


def test_a_copy_generates_for_itself(workers: Any) -> None:
    workers(2).run(copied, timeout=60)


def looped(policy: str) -> None:
    """Loaders of other lengths on two data-parallel coordinates, each of two ranks."""
    model = model_of("Llama")
    dense = copy.deepcopy(model)
    lengths = (3, 2)
    with start(model, config_of(1, 2)) as engine:
        at = engine.get_data_parallel_rank()
        loader = [batch_of(model, step, at) for step in range(lengths[at])]
        losses = []
        for batch in engine.loop(loader, policy=policy):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        steps = max(lengths) if policy == "pad" else min(lengths)
        assert len(losses) == steps
        optimizer = momentum(dense.parameters())
        for step in range(steps):
            optimizer.zero_grad()
            real = [rank for rank in range(2) if step < lengths[rank]]
            (sum(loss_of(dense, step, rank) for rank in real) / len(real)).backward()  # type: ignore[union-attr]
            optimizer.step()
        agree(engine, dense, 2e-6)


@pytest.mark.parametrize("policy", ["pad", pytest.param("drop", marks=pytest.mark.slow)])
def test_loops_count_samples_of_shared_matrices_once(workers: Any, policy: str) -> None:
    workers(4).run(looped, policy, timeout=60)


def streamed(folder: str, stage: int) -> tuple[int, int, int]:
    """Elements read, held and of the whole model."""
    wanted = model_of("Llama", seed=9)
    if dist.get_rank() == 0:
        wanted.save_pretrained(folder)
    dist.barrier()
    read: list[int] = []
    right = huggingface.read_all

    def noted(of_files: Any) -> None:
        read.extend(one.into.numel() for ranges in of_files.values() for one in ranges)
        right(of_files)

    model = model_of("Llama", seed=1)
    with start(model, config_of(stage, 2)) as engine:
        huggingface.read_all = noted
        try:
            engine.load_pretrained(folder)
        finally:
            huggingface.read_all = right
        agree(engine, wanted, 0.0)
        held = sum(param.numel() for param in model.parameters())
        whole = sum(param.numel() for param in wanted.parameters())
        if stage == 3:
            held = sum(param.ds_numel for param in model.parameters()) // current_mesh().size("dp_shard")
        return sum(read), held, whole


@pytest.mark.parametrize(("stage", "dp"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_weights_stream_in_already_cut(workers: Any, tmp_path: Path, stage: int, dp: int) -> None:
    for read, held, whole in workers(2 * dp).run(streamed, str(tmp_path), stage, timeout=60):
        assert read < 0.75 * whole and abs(read - held) <= 0.02 * held + 64, (read, held, whole)


def exported(folder: str, stage: int) -> None:
    """Everything that leaves is of whole matrices."""
    model = model_of("Llama")
    gathers = {"stage3_gather_16bit_weights_on_model_save": True}
    with start(model, config_of(stage, 2, zero=gathers)) as engine:
        engine.backward(loss_of(engine, 0, 0))
        engine.step()
        engine.save_checkpoint(folder)
        engine.save_16bit_model(folder + "/16")
        consolidated = engine._consolidated_16bit_state_dict()
        wanted = {name: safe_get_full_fp32_param(p).clone() for name, p in model.named_parameters()}
    if dist.get_rank() == 0:
        found = get_fp32_state_dict_from_zero_checkpoint(folder)
        saved = torch.load(folder + "/16/pytorch_model.bin", weights_only=True)
        for name, value in wanted.items():
            assert torch.equal(found[name], value) and torch.equal(saved[name], value), name
            assert torch.equal(consolidated[name], value), name
    dist.barrier()
    config = {**config_of(stage, 2), "checkpoint": {"format": "deepspeed"}}
    with start(model_of("Llama"), config) as engine, raises(CheckpointError, "checkpoint.format", "slices"):
        engine.save_checkpoint(folder + "/upstream")


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_what_leaves_is_whole(workers: Any, tmp_path: Path, stage: int) -> None:
    workers(2).run(exported, str(tmp_path), stage, timeout=60)


def by_json(kinds: list[str]) -> None:
    for kind in kinds:
        config = {**config_of(1, 2), "optimizer": {"type": kind, "params": {"lr": 1e-3}}}
        with raises(OptimizerError, "whole matrices", "q_proj", "AdamW"):
            start(model_of("Llama"), config, None)


def test_optimizers_that_read_whole_matrices_are_refused(workers: Any) -> None:
    workers(2).run(by_json, ["Muon", "Lamb", "Adafactor"], timeout=60)
