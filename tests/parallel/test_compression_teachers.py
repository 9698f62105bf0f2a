"""Teachers: layer by layer at every stage, what one costs at stage 3 on the CPU tier, and that nothing grows."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_compression_handover import distilling, plain_distilled
from tests.parallel.test_compression_removal import engine_of, llama, state_of, train

TEACHER: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}


def teacher_engine(model: Any, precision: str = "fp32") -> Any:
    import deepspeed

    given = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": TEACHER}
    if precision == "bf16":
        given["bf16"] = {"enabled": True}
    return deepspeed.initialize(model=model, config=given)[0]


def plain_layerwise(steps: int) -> dict[str, torch.Tensor]:
    """Each layer learns from the teacher's next one, on the teacher's inputs; nothing else is learned."""
    student, teacher = llama(), llama().eval()
    inner = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(steps):
        inner.zero_grad()
        for rank in range(dist.get_world_size()):
            generator = torch.Generator().manual_seed(100 * step + rank)
            ids = torch.randint(0, 40, (2, 10), generator=generator)
            calls: list[Any] = []
            hooks = [
                layer.register_forward_hook(lambda m, a, k, out, to=calls: to.append((a, k, out)), with_kwargs=True)
                for layer in teacher.model.layers
            ]
            with torch.no_grad():
                teacher(input_ids=ids, use_cache=False)
            for hook in hooks:
                hook.remove()
            pairs = zip(student.model.layers, reversed(calls), strict=True)
            errors = [(layer(*a, **k) - out).square().mean() for layer, (a, k, out) in pairs]
            (torch.stack(errors).mean() * 3 / dist.get_world_size()).backward()
        inner.step()
    return {name: p.detach() for name, p in student.named_parameters()}


def layerwise(stages: list[int]) -> None:
    expected = plain_layerwise(3)
    for stage in stages:
        # the layers are crossed, so that student and teacher differ though they begin alike
        settings = distilling(stage, hard=0.0, logits=0.0, layerwise=3.0, layers=[1, 0])
        with engine_of(settings) as engine, teacher_engine(llama()) as teacher:
            engine.set_teacher(teacher)
            train(engine, range(3))
            found = state_of(engine)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), (stage, name, (found[name] - value).abs().max())


@pytest.mark.parametrize("stages", [[3], pytest.param([0, 1, 2], marks=pytest.mark.slow)])
def test_each_layer_learns_alone(workers: Any, stages: list[int]) -> None:
    workers(2).run(layerwise, stages, timeout=120)


def like_plain(stages: list[int]) -> None:
    expected = plain_distilled(3)
    for stage in stages:
        with engine_of(distilling(stage, temperature=2.0)) as engine, teacher_engine(llama()) as teacher:
            engine.set_teacher(teacher)
            train(engine, range(3))
            found = state_of(engine)
        for name, value in expected.items():
            assert torch.allclose(found[name], value, atol=1e-5), (stage, name)


@pytest.mark.slow
def test_the_loss_is_plains_at_every_stage(workers: Any) -> None:
    workers(2).run(like_plain, [0, 1, 2, 3], timeout=240)


def resident() -> int:
    """Bytes of this process in memory, but for freed blocks that the C library keeps: those come and go."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def costs_its_shard() -> tuple[float, float]:
    """(bytes that a teacher adds to this rank over its shard, growth of this rank in the last 180 of 200 steps)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    with engine_of(distilling(2, temperature=2.0)) as engine:
        before = resident()
        large = LlamaForCausalLM(LlamaConfig(num_attention_heads=8, max_position_embeddings=32, **sizes))
        total = 4 * sum(p.numel() for p in large.parameters())
        with teacher_engine(large) as teacher:
            share = (resident() - before) / (total / dist.get_world_size())
            engine.set_teacher(teacher)
            train(engine, range(20))
            warm = resident()
            train(engine, range(20, 200))
            return share, resident() / warm - 1


@pytest.mark.slow
def test_a_teacher_costs_its_shard_and_nothing_grows(workers: Any) -> None:
    found = workers(2).run(costs_its_shard, timeout=600)
    print(f"teacher: {[f'{share:.3f}' for share, _ in found]} of its shard; grown by {[f'{g:.4%}' for _, g in found]}")
    assert all(share <= 1.1 and grown < 0.01 for share, grown in found), found
