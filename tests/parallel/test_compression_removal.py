"""Units leave the running engine: it goes on as one that is masked, and as a small one that was born so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.tiny import said, with_words

STEPS, FFN, HEADS = 5, 2, 3


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, **changes}))


def settings(stage: int, physical: bool, tier: str = "none", precision: str = "fp32") -> dict[str, Any]:
    def technique(offset: int, modules: list[str]) -> dict[str, Any]:
        shared = {"enabled": True, "method": "l1", "schedule_offset": offset, "physical": physical}
        return {
            "shared_parameters": shared,
            "different_groups": {"g": {"params": {"dense_ratio": 0.5}, "modules": modules}},
        }

    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        "compression_training": {
            "row_pruning": technique(FFN, ["gate_proj", "up_proj"]),
            "head_pruning": technique(HEADS, ["o_proj"]),
        },
    }


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if dist.is_initialized() else 0))
    return torch.randint(0, 40, (2, 10), generator=generator)


def engine_of(config: dict[str, Any], model: Any = None) -> Any:
    import deepspeed

    model = model or llama()
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = safe_get_full_fp32_param(param)
        found[f"{name} exp_avg"] = safe_get_full_optimizer_state(param, "exp_avg")
    return found


def removed_like_masked(stage: int, tier: str, precision: str) -> None:
    with engine_of(settings(stage, physical=False, tier=tier, precision=precision)) as engine:
        masked = train(engine, range(STEPS))
    with said() as lines:
        engine = engine_of(settings(stage, physical=True, tier=tier, precision=precision))
    if dist.get_rank() == 0:  # gate, up and down of two layers lose 12 of 24 units; query, key, value, output half
        ffn = ("row_pruning", "leave the engine after step 2", "1,152 parameters of 6", "2,304 FLOPs per token")
        heads = ("head_pruning", "leave the engine after step 3", "768 parameters of 8", "1,536 FLOPs per token")
        assert with_words(lines, *ffn) == with_words(lines, *heads) == 1, lines
    with engine:
        held, scheduled = engine.optimizer, engine.lr_scheduler
        removed = train(engine, range(STEPS))
        assert engine.optimizer is held and engine.lr_scheduler is scheduled
        bar = 1e-5 if precision == "fp32" else 3e-2
        assert max(abs(a - b) for a, b in zip(masked, removed, strict=True)) <= bar, (masked, removed)
        config = engine.module.config
        assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (12, 2, 1)
        attention = engine.module.model.layers[1].self_attn
        assert attention.num_key_value_groups == 2 and attention.q_proj.out_features == 8
        assert engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
        whole = state_of(engine)
        assert whole["model.layers.0.mlp.down_proj.weight"].shape == (16, 12)
        assert whole["model.layers.0.self_attn.o_proj.weight exp_avg"].shape == (16, 8)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_removed_is_masked(workers: Any, stage: int) -> None:
    workers(2).run(removed_like_masked, stage, "none", "fp32", timeout=120)


@pytest.mark.parametrize(
    ("stage", "tier", "precision"),
    [
        (3, "cpu", "bf16"),
        pytest.param(2, "cpu", "bf16", marks=pytest.mark.slow),
        pytest.param(3, "cpu", "fp32", marks=pytest.mark.slow),
    ],
)
def test_removed_is_masked_in_other_tiers_and_precisions(workers: Any, stage: int, tier: str, precision: str) -> None:
    workers(2).run(removed_like_masked, stage, tier, precision, timeout=120)


def resumes(folder: str, stage: int, places: tuple[int, ...]) -> None:
    """Saved before, between and after the removals; loaded by a process that has the dense class alone."""
    with engine_of(settings(stage, physical=True)) as engine:
        losses = []
        for step in range(STEPS):
            losses += train(engine, range(step, step + 1))
            engine.save_checkpoint(folder, tag=f"after{step + 1}")
        expected = state_of(engine)
    for saved in places:
        other = 3 - stage  # any stage, on the same ranks
        with engine_of(settings(other, physical=True)) as engine:
            engine.load_checkpoint(folder, tag=f"after{saved}")
            again = train(engine, range(saved, STEPS))
            assert max(abs(a - b) for a, b in zip(losses[saved:], again, strict=True)) <= 1e-5, (saved, losses, again)
            found = state_of(engine)
            for name, value in expected.items():
                assert torch.allclose(found[name], value, atol=1e-5), (saved, name)
    plain = {key: value for key, value in settings(stage, True).items() if key != "compression_training"}
    with engine_of(plain) as engine:
        engine.load_checkpoint(folder, tag=f"after{STEPS}")
        assert engine.module.config.intermediate_size == 12


@pytest.mark.parametrize(
    ("stage", "places"),
    [(3, (FFN, HEADS)), *(pytest.param(z, (1, FFN, HEADS, HEADS + 1), marks=pytest.mark.slow) for z in (0, 3))],
)
def test_resume(workers: Any, stage: int, places: tuple[int, ...], tmp_path: Path) -> None:
    workers(2).run(resumes, str(tmp_path), stage, places, timeout=240)
