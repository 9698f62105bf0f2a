"""Whole experts leave the running engine: it goes on as a plain small model with what is left of its state."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_compression_layers import batch_of
from tests.parallel.test_compression_removal import engine_of, state_of, train
from tests.parallel.tiny import said, with_words
from tests.unit.compression.architectures import architecture

STEPS, CUT = 5, 2


def mixture(name: str) -> Any:
    model_class, config = architecture(name)
    config.vocab_size = 40
    torch.manual_seed(0)
    return model_class(config)


def settings(stage: int, tier: str = "none", **shared: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if tier != "none":
        zero["offload_optimizer"] = {"device": tier}
    group = {"params": {"dense_ratio": 0.5}, "modules": [r"mlp\.experts$"]}
    block = {"shared_parameters": {"enabled": True, "schedule_offset": CUT, **shared}, "different_groups": {"g": group}}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}},
        "compression_training": {"expert_pruning": block},
    }


def plain(name: str) -> tuple[list[float], Any]:
    """The same by hand: the experts of the largest weights, of each layer, in a model that is built small."""
    model, losses, keeps = mixture(name), [], {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(STEPS):
        if step == CUT:
            keeps = {
                layer: torch.sort(
                    sum(p.detach().abs().double().sum((1, 2)) for p in block.mlp.experts.parameters() if p.dim() == 3)
                    .topk(2).indices
                ).values
                for layer, block in enumerate(model.model.layers)
            }  # fmt: skip
            model, optimizer = smaller(model, optimizer, keeps)
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            ids = batch_of(step, rank)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                losses.append(loss.item())
        optimizer.step()
    return losses, model


def smaller(model: Any, optimizer: Any, keeps: dict[int, torch.Tensor]) -> tuple[Any, Any]:
    config = copy.deepcopy(model.config)
    for key in ("num_local_experts", "num_experts"):
        if hasattr(config, key):
            setattr(config, key, 2)
    made = type(model)(config)
    fresh = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=1e-4)
    here = dict(model.named_parameters())
    for name, param in made.named_parameters():
        old, state = here[name], optimizer.state[here[name]]
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        cut = old.shape != param.shape

        def part(values: torch.Tensor, cut: bool = cut, layer: int = layer) -> torch.Tensor:
            return values[keeps[layer]].clone() if cut else values.clone()

        param.data.copy_(part(old.data))
        fresh.state[param] = {k: part(v) if v.dim() else v.clone() for k, v in state.items()}
    return made, fresh


def experts_leave(name: str, stage: int, tier: str, folder: str) -> None:
    expected, small = plain(name)
    with said() as lines:
        engine = engine_of(settings(stage, tier), mixture(name))
    if dist.get_rank() == 0:
        told = "expert_pruning.g: 4 of 8 experts in 2 layers leave the engine after step 2"
        assert with_words(lines, told) == 1, lines
    with engine:
        found = train(engine, range(STEPS))
        assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) <= 1e-5, (expected, found)
        whole = state_of(engine)
        for key, param in small.named_parameters():
            assert torch.allclose(whole[key], param, atol=1e-5), key
        engine.export_compressed(folder)
        engine.save_checkpoint(f"{folder}.checkpoint")
        engine.eval()
        with torch.no_grad():
            logits = engine(input_ids=batch_of(0, 0)).logits
    dense = {key: value for key, value in settings(3 - stage).items() if key != "compression_training"}
    with engine_of(dense, mixture(name)) as engine:
        engine.load_checkpoint(f"{folder}.checkpoint")
        engine.eval()
        with torch.no_grad():
            assert torch.allclose(engine(input_ids=batch_of(0, 0)).logits, logits, atol=1e-6)
    if dist.get_rank() == 0:
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            assert torch.allclose(loaded(input_ids=batch_of(0, 0)).logits, logits, atol=1e-5)


CELLS = [("Mixtral", 0, "none"), ("Mixtral", 3, "none")]
SLOW = [
    ("Mixtral", 1, "none"),
    ("Mixtral", 2, "cpu"),
    ("Qwen3Moe", 2, "none"),
    ("Qwen2Moe", 3, "cpu"),
    ("Olmoe", 3, "none"),
]


@pytest.mark.parametrize(
    ("name", "stage", "tier"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in SLOW)]
)
def test_experts_leave(workers: Any, name: str, stage: int, tier: str, tmp_path: Path) -> None:
    workers(2).run(experts_leave, name, stage, tier, str(tmp_path / "small"), timeout=120)


def with_units_of_experts(first: str) -> None:
    """Whole experts and FFN units of each, in both orders."""
    config = settings(2, criterion="taylor")
    shared = {"enabled": True, "method": "l1", "schedule_offset": CUT + (1 if first == "experts" else -1)}
    group = {"params": {"dense_ratio": 0.5}, "modules": [r"mlp\.experts$"]}
    config["compression_training"]["row_pruning"] = {"shared_parameters": shared, "different_groups": {"g": group}}
    with engine_of(config, mixture("Mixtral")) as engine:
        losses = train(engine, range(STEPS))
        experts = engine.module.model.layers[0].mlp.experts
        assert (experts.down_proj.shape, experts.gate_up_proj.shape) == ((2, 32, 24), (2, 48, 32)), experts
        assert engine.module.config.num_local_experts == 2 and engine.module.config.intermediate_size == 24
        assert all(loss == loss for loss in losses) and engine.module.model.layers[0].mlp.gate.weight.shape == (2, 32)


@pytest.mark.parametrize("first", ["experts", "units"])
def test_with_units_of_each_expert(workers: Any, first: str) -> None:
    workers(2).run(with_units_of_experts, first, timeout=60)


def refused() -> None:
    from deepspeed.errors import CompressionError, DeepSpeedConfigError
    from tests.parallel.test_compression_removal import llama

    few = settings(0)
    few["compression_training"]["expert_pruning"]["different_groups"]["g"]["params"]["dense_ratio"] = 0.25
    with pytest.raises(CompressionError, match="a token passes 2; the nearest number that can be exported is 2"):
        engine_of(few, mixture("Mixtral"))
    named = settings(0)
    named["compression_training"]["expert_pruning"]["different_groups"]["g"]["modules"] = ["down_proj"]
    with pytest.raises(CompressionError, match=r"model\.layers\.0\.mlp\.down_proj packs no experts"):
        engine_of(named, llama())
    for key, value in (("schedule_offset_end", 9), ("scope", "global"), ("criterion", "movement")):
        with pytest.raises(DeepSpeedConfigError, match=key):
            engine_of(settings(0, **{key: value}), mixture("Mixtral"))


def test_what_cannot_be_is_refused(workers: Any) -> None:
    workers(1).run(refused, timeout=60)


def test_experts_that_no_token_takes_are_not_missed() -> None:
    """The router's correction of scores follows: what is left chooses among the same experts as before."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from deepspeed.compression.pruning.pruning_plan import PruningPlan
    from deepspeed.compression.pruning.structured_removal import remove_from

    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "moe_intermediate_size": 16}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**heads, **experts, **sizes, **counts)).eval()
    gate: Any = model.get_submodule("model.layers.1.mlp.gate")
    gate.e_score_correction_bias.copy_(torch.tensor([0.1, -9.0, 0.3, -9.0]))
    plan, ids = PruningPlan(model), torch.arange(8)[None]
    (family,) = plan.shrinks("experts")[0].families
    with torch.no_grad():
        before = model(input_ids=ids).logits
        remove_from(model, plan.removal_of([(family, torch.tensor([True, False, True, False]))]))
        assert torch.allclose(model(input_ids=ids).logits, before, atol=1e-6)
    assert gate.e_score_correction_bias.tolist() == pytest.approx([0.1, 0.3]) and model.config.n_routed_experts == 2
