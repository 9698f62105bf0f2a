"""PEFT: adapters alone are trained and saved, on a frozen base, sharded or quantised. Functions run on workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from tests.clients import transformers_runs
from tests.clients.common import RATE, close, sentences, whole_values, zero


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
