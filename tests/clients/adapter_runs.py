"""PEFT: adapters alone are trained and saved, on a frozen base, sharded or quantised. Functions run on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from tests.clients import transformers_runs
from tests.clients.common import RATE, WORDS, close, sentences, whole_values, zero


def adapters_alone(folder: str) -> None:
    """LoRA at stage 3: what is trained, what a rank holds, what is on disk."""
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments

    with transformers_runs.trainer_state(3):
        values = transformers_runs.settings(3, "fp32", folder, max_steps=2)
        values["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        model = transformers_runs.with_adapters()
        trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
        total = sum(p.numel() for p in model.parameters())
        trainer = Trainer(model=model, args=TrainingArguments(**values), train_dataset=transformers_runs.rows())
        trainer.train()
        held = sum(p.ds_tensor.numel() for p in model.parameters())
        share = total / dist.get_world_size()
        assert share - 64 <= held <= share + 64, (held, share)
        trainer.save_model()
        dist.barrier()
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        assert sum(t.numel() for t in saved.values()) == sum(trained.values())
        assert all("lora_" in name for name in saved)
        trainer.model_wrapped.destroy()


def importance_of_adapters() -> None:
    """AdaLoRA reads weights and their gradients: the same at stage 3 as in plain PyTorch."""
    from peft import AdaLoraConfig, get_peft_model

    def build() -> Any:
        kind = AdaLoraConfig(
            init_r=4, target_r=2, tinit=1, tfinal=1, total_step=9, target_modules=["q_proj"], task_type="CAUSAL_LM"
        )
        return get_peft_model(transformers_runs.small_model(), kind)

    tokens = sentences(4)
    torch.manual_seed(5)
    plain = build()
    torch.manual_seed(5)
    model = build()
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    twin = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=RATE)
    for step in range(1, 4):
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        model.base_model.update_and_allocate(step)
        engine.step()
        plain(input_ids=tokens, labels=tokens).loss.backward()
        plain.base_model.update_and_allocate(step)
        twin.step()
        twin.zero_grad()
        ours, theirs = model.base_model.rankallocator.ipt, plain.base_model.rankallocator.ipt
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-9)
    engine.destroy()


def quantised_base(bits: int, stage: int, folder: str) -> None:
    """QLoRA: the base is bitsandbytes' integers; losses, adapters and bytes held are those of plain training."""
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if dist.get_rank() == 0:
        transformers_runs.small_model().save_pretrained(folder)
    dist.barrier()

    def build() -> Any:
        how = {4: {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}, 8: {"load_in_8bit": True}}[bits]
        base = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=BitsAndBytesConfig(**how), device_map={"": "cpu"}
        )
        torch.manual_seed(5)
        kind = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return get_peft_model(base, kind).train()

    model, plain = build(), build()
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=RATE) for one in (model, plain)
    ]
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero(stage)}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizers[0], config=config)
    integers = [p for p in model.parameters() if not p.is_floating_point()]
    assert len(integers) == 12 and not any(p.requires_grad for p in integers)
    if stage == 3:
        held, total = (sum(count(p) for p in integers) for count in (lambda p: p.ds_tensor.numel(), torch.numel))
        assert abs(held - total / dist.get_world_size()) <= 64, (held, total)
    ours, theirs = [], []
    for tokens in sentences(20).view(5, 4, -1):
        loss = engine(input_ids=tokens, labels=tokens).loss
        ours.append(loss.item())
        engine.backward(loss)
        engine.step()
        loss = plain(input_ids=tokens, labels=tokens).loss
        theirs.append(loss.item())
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    close(ours, theirs, 1e-5, "losses")
    values = whole_values(model)
    trained = {name for name, p in plain.named_parameters() if p.requires_grad}
    for name, p in plain.named_parameters():
        torch.testing.assert_close(values[name], p.detach(), rtol=1e-4, atol=1e-6)
    engine.save_checkpoint(folder, "adapters", exclude_frozen_parameters=True)
    model.save_pretrained(folder, state_dict=values)
    dist.barrier()
    saved = load_file(Path(folder) / "adapter_model.safetensors")
    assert len(saved) == len(trained) and all("lora_" in name for name in saved)
    engine.load_checkpoint(folder, "adapters", load_module_strict=False)
    after = whole_values(model)
    assert all(torch.equal(after[name], values[name]) for name in values)
    engine.destroy()


EXPERTS = {
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4}),
    "qwen": ("Qwen3Moe", {"intermediate_size": 24, "moe_intermediate_size": 24, "num_experts": 4}),
    "gpt-oss": ("GptOss", {"intermediate_size": 24, "num_local_experts": 4}),
}


def packed_experts(kind: str, layers: int = 2) -> Any:
    """A small model whose experts are 3-D parameters."""
    import transformers

    name, sizes = EXPERTS[kind]
    torch.manual_seed(0)
    shape = getattr(transformers, f"{name}Config")(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_experts_per_tok=2, max_position_embeddings=32, **sizes,
    )  # fmt: skip
    return getattr(transformers, f"{name}ForCausalLM")(shape)


def on_experts(base: Any, checkpointing: bool, adapters: tuple[str, ...] = ("default",)) -> Any:
    """LoRA on the packed parameters of the experts (`target_parameters`), and on a linear layer."""
    from peft import LoraConfig, get_peft_model

    if checkpointing:
        base.gradient_checkpointing_enable()
    torch.manual_seed(5)
    packed = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    kind = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=packed, init_lora_weights=False)
    model = get_peft_model(base, kind, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, kind)
    if len(adapters) > 1:
        model.base_model.set_adapter(list(adapters))
    return model


def adam_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def freeing(stage: int, **entries: Any) -> dict[str, Any]:
    """A configuration in which stage 3 frees everything at once."""
    limits = ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
    section = {"stage": stage} | {f"stage3_{key}": 0 for key in limits} | {"stage3_prefetch_bucket_size": 0}
    section["stage3_gather_16bit_weights_on_model_save"] = True
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": section} | entries


def adapters_on_experts(
    kind: str, stage: int, folder: str, born: bool = False, checkpointing: bool = False, layers: int = 2,
    offload: bool = False, adapters: tuple[str, ...] = ("default",), ep: int = 1,
) -> None:  # fmt: skip
    """Losses and values are those of one process; what is saved is loaded again, whole and onto a sharded base."""
    from peft import PeftModel

    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = freeing(stage, expert_parallel={"size": ep})
    if offload:
        config["zero_optimization"] |= dict.fromkeys(("offload_param", "offload_optimizer"), {"device": "cpu"})
    plain = on_experts(packed_experts(kind, layers), checkpointing, adapters)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=born):
        base = packed_experts(kind, layers)
    model = on_experts(base, checkpointing, adapters)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam_of(model), config=config)
    twin, before = adam_of(plain), {name: p.detach().clone() for name, p in plain.named_parameters()}
    for tokens in sentences(4 * 2 * ranks).view(4, ranks, 2, -1):
        losses = [plain(input_ids=own, labels=own).loss for own in tokens]
        (sum(losses) / ranks).backward()
        twin.step()
        twin.zero_grad()
        loss = engine(input_ids=tokens[rank], labels=tokens[rank]).loss
        close([loss.item()], [losses[rank].item()], 1e-6, "losses")
        engine.backward(loss)
        engine.step()
    values = whole_values(model) if ep == 1 else engine._consolidated_16bit_state_dict()  # of rank 0 then
    for name, p in plain.named_parameters() if values else ():
        torch.testing.assert_close(values[name], p.detach(), rtol=1e-6, atol=1e-6)
        assert ("lora_" in name) != torch.equal(before[name], p.detach()), name  # adapters alone, and all of them
    state = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    if rank == 0:
        model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    engine.destroy()
    # A fresh base gives the same; the adapters go on training on one that is born sharded.
    where = folder if adapters == ("default",) else f"{folder}/{adapters[0]}"
    tokens = sentences(2)
    with torch.no_grad():
        plain.base_model.set_adapter(adapters[0])
        wanted = plain(input_ids=tokens).logits
        read = PeftModel.from_pretrained(packed_experts(kind, layers), where)
        torch.testing.assert_close(read(input_ids=tokens).logits, wanted, rtol=1e-5, atol=1e-6)
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=born):
        base = packed_experts(kind, layers)
    model = PeftModel.from_pretrained(base, where, is_trainable=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam_of(model), config=config)
    torch.testing.assert_close(engine(input_ids=tokens).logits.detach(), wanted, rtol=1e-5, atol=1e-6)
    engine.destroy()


def experts_in_bf16() -> None:
    """In bf16 stage 3 with everything freed gives the bits of stage 1, and merged weights those of the adapters."""

    def losses_at(stage: int) -> list[float]:
        model = on_experts(packed_experts("mixtral").bfloat16(), checkpointing=True)
        config = freeing(stage, bf16={"enabled": True})
        engine, *_ = deepspeed.initialize(model=model, optimizer=adam_of(model), config=config)
        found = []
        for tokens in sentences(4 * 2 * dist.get_world_size()).view(4, dist.get_world_size(), 2, -1):
            loss = engine(input_ids=tokens[dist.get_rank()], labels=tokens[dist.get_rank()]).loss
            found.append(loss.item())
            engine.backward(loss)
            engine.step()
        tokens = sentences(2)
        with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
            found.extend(engine(input_ids=tokens).logits.float().flatten().tolist())
        engine.destroy()
        return found

    assert losses_at(3) == losses_at(1)


def experts_under_trainer(folder: str) -> None:
    """Transformers' Trainer at stage 3, base born sharded: trains, saves and resumes adapters on packed experts."""
    from safetensors.torch import load_file
    from transformers import Trainer, TrainingArguments
    from transformers.models.mixtral import MixtralForCausalLM

    with transformers_runs.trainer_state(3):
        if dist.get_rank() == 0:
            packed_experts("mixtral").save_pretrained(f"{folder}/base")
        dist.barrier()
        values = transformers_runs.settings(3, "fp32", folder, max_steps=2)
        values["deepspeed"]["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        arguments = TrainingArguments(**values)
        model = on_experts(MixtralForCausalLM.from_pretrained(f"{folder}/base"), checkpointing=True)
        assert all(hasattr(p, "ds_id") for name, p in model.named_parameters() if "lora_" not in name)
        trainer = Trainer(model=model, args=arguments, train_dataset=transformers_runs.rows())
        trainer.train()
        trainer.save_model()
        dist.barrier()
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert len(saved) == len(trained) and all("lora_" in name for name in saved)
        assert sum(t.numel() for t in saved.values()) == sum(p.numel() for p in trained.values())
        trainer.model_wrapped.destroy()
