"""Units and layers that low-rank adapters stand on leave the running engine, and their part of the adapters too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_compression_removal import STEPS, batch, engine_of, llama, settings, train

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(**changes: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    changes = {"r": 4, "target_modules": EVERY, "init_lora_weights": False, **changes}
    model = llama(num_hidden_layers=3)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **changes))


def with_layers(config: dict[str, Any]) -> dict[str, Any]:
    config["compression_training"]["layer_reduction"] = {"enabled": True, "teacher_layer": [0, 2], "schedule_offset": 4}
    return config


def units_leave(stage: int, folder: str) -> None:
    with engine_of(settings(stage, physical=False), adapted()) as engine:
        masked = train(engine, range(STEPS))
    with engine_of(settings(stage, physical=True), adapted()) as engine:
        removed = train(engine, range(STEPS))
        assert max(abs(a - b) for a, b in zip(masked, removed, strict=True)) <= 1e-5, (masked, removed)
        shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in engine.module.named_parameters()}
        inner = "base_model.model.model.layers.0."
        assert shapes[f"{inner}mlp.down_proj.lora_A.default.weight"] == (4, 12)
        assert shapes[f"{inner}mlp.up_proj.lora_B.default.weight"] == (12, 4)
        assert shapes[f"{inner}self_attn.k_proj.lora_B.default.weight"] == (4, 4)
        assert shapes[f"{inner}self_attn.q_proj.base_layer.weight"] == (8, 16)
    with engine_of(with_layers(settings(stage, physical=True)), adapted()) as engine:
        train(engine, range(STEPS))
        engine.export_compressed(folder)
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=batch(0)).logits
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        small = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert (small.config.num_hidden_layers, small.config.intermediate_size) == (2, 12)
        with torch.no_grad():
            assert torch.allclose(small(input_ids=batch(0)).logits, logits, atol=1e-5)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_units_and_layers_leave_under_adapters(workers: Any, stage: int, tmp_path: Path) -> None:
    workers(2).run(units_leave, stage, str(tmp_path / "small"), timeout=120)


def other_adapters_are_refused() -> None:
    from peft import IA3Config, get_peft_model

    from deepspeed.errors import CompressionError

    other = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
    for model in (adapted(use_dora=True), get_peft_model(llama(), other)):
        with pytest.raises(CompressionError, match="nor under plain LoRA adapters"):
            engine_of(settings(0, physical=True), model)


def test_other_adapters_are_refused(workers: Any) -> None:
    workers(2).run(other_adapters_are_refused, timeout=60)  # they have imported peft
