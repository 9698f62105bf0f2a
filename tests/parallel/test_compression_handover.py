"""Teachers under their own sharding, exports of the running engine, and one block through both ways of calling."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_compression_removal import batch, engine_of, llama, settings, state_of, train
from tests.parallel.tiny import raises


def distilling(stage: int, **section: Any) -> dict[str, Any]:
    made = settings(stage, True)
    made["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}  # Adam makes a rounding of a small gradient large
    made["compression_training"] = {"distillation": {"enabled": True, "hard": 0.5, "logits": 0.5, **section}}
    return made


def plain_distilled(steps: int) -> dict[str, torch.Tensor]:
    student, teacher = llama(), llama().eval()
    inner = torch.optim.SGD(student.parameters(), lr=0.1)
    ranks = dist.get_world_size()
    for step in range(steps):
        inner.zero_grad()
        for rank in range(ranks):
            generator = torch.Generator().manual_seed(100 * step + rank)
            ids = torch.randint(0, 40, (2, 10), generator=generator)
            out = student(input_ids=ids, labels=ids)
            with torch.no_grad():
                told = torch.log_softmax(teacher(input_ids=ids).logits / 2, -1)
            mine = torch.log_softmax(out.logits / 2, -1)
            soft = 4 * (told.exp() * (told - mine)).sum(-1)[:, :-1].mean()
            ((0.5 * out.loss + 0.5 * soft) / ranks).backward()
        inner.step()
    return {name: p.detach() for name, p in student.named_parameters()}


def teachers() -> None:
    import deepspeed
    from deepspeed.errors import UsageError

    expected = plain_distilled(3)
    for stage in (0, 3):
        with engine_of(distilling(stage, temperature=2.0)) as engine:
            with raises(UsageError, "set_teacher"):
                train(engine, range(1))
            zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
            given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
            with deepspeed.initialize(model=llama(), config=given)[0] as teacher:
                engine.set_teacher(teacher)
                train(engine, range(3))
                found = state_of(engine)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), (stage, name, (found[name] - value).abs().max())
        with engine_of(distilling(stage, temperature=2.0, teacher="before")) as engine:
            train(engine, range(3))
            for name, value in expected.items():
                assert torch.allclose(state_of(engine)[name], value, atol=1e-5), (stage, name)


def test_teachers_under_their_own_sharding(workers: Any) -> None:
    workers(2).run(teachers, timeout=240)


def exports(folder: str, weights: str) -> None:
    from transformers import AutoModelForCausalLM

    section = settings(3, True)
    section["compression_training"]["export"] = {"folder": f"{folder}/when_due", "after": 4}
    with engine_of(section) as engine:
        train(engine, range(4))
        with torch.no_grad():
            expected = engine.eval()(input_ids=batch(0)).logits
        assert Path(folder, "when_due", "config.json").exists()
        report = engine.export_compressed(f"{folder}/again", weights=weights)
        assert (report is not None) == (dist.get_rank() == 0)
    dist.barrier()
    loaded = AutoModelForCausalLM.from_pretrained(f"{folder}/when_due").eval()
    assert loaded.config.intermediate_size == 12 and loaded.config.num_key_value_heads == 1
    with torch.no_grad():
        assert torch.allclose(loaded(input_ids=batch(0)).logits, expected, atol=1e-5)


# what int8 needs is an optional dependency, which takes long to import
INT8 = "int8" if importlib.util.find_spec("compressed_tensors") else "float"


@pytest.mark.parametrize("weights", ["float", pytest.param(INT8, marks=pytest.mark.slow, id="int8")])
def test_the_exported_folder_is_the_engine(workers: Any, tmp_path: Path, weights: str) -> None:
    workers(2).run(exports, str(tmp_path), weights, timeout=240)


def both_ways() -> None:
    """`initialize` alone removes; the old calls mask, and `redundancy_clean` removes: the small models are equal."""
    from deepspeed.compression import init_compression, redundancy_clean

    section = settings(2, True)
    for technique in section["compression_training"].values():
        del technique["shared_parameters"]["physical"]
    with engine_of(section) as engine:
        train(engine, range(4))
        small = {name: value for name, value in state_of(engine).items() if "exp_avg" not in name}
    model = init_compression(llama(), section)
    with engine_of(section, model) as engine:
        train(engine, range(4))
        masked = {name: value for name, value in state_of(engine).items() if "exp_avg" not in name}
    fresh = init_compression(llama(), section)
    fresh.load_state_dict(masked, strict=False)
    cleaned = dict(redundancy_clean(fresh, section).named_parameters())
    for name, value in small.items():
        assert cleaned[name].shape == value.shape, name
        assert torch.allclose(cleaned[name], value, atol=1e-5), name


@pytest.mark.slow  # removed is masked: test_compression_removal.py; old calls remove: unit/compression/test_calls.py
def test_the_old_calls_give_the_same_small_model(workers: Any) -> None:
    workers(2).run(both_ways, timeout=240)
