"""What clients do beside training: load, generate, save, resume, validate. Each function runs on a worker."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from tests.clients import lightning_runs, transformers_runs
from tests.clients.accelerate_runs import accelerator_for
from tests.clients.common import RATE, Run, Words, fresh_clients, sentences, zero

STAGE_3 = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero(3)}


def same_values(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    with deepspeed.zero.GatheredParameters(list(ours.parameters())):
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        return all(torch.equal(a.detach(), b.detach()) for a, b in pairs)


def born_resized_and_generating(folder: str) -> None:
    """from_pretrained and from_config under zero.Init, tied and resized embeddings, ranks that stop apart."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    rank = dist.get_rank()
    with fresh_clients():
        plain = transformers_runs.small_model().eval()
        if rank == 0:
            plain.save_pretrained(folder)
        dist.barrier()
        keep = HfDeepSpeedConfig(STAGE_3 | {"bf16": {"enabled": "auto"}})
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert all(hasattr(p, "ds_id") for p in model.parameters())
        assert same_values(model, plain)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
        assert all(hasattr(p, "ds_id") for p in AutoModelForCausalLM.from_config(plain.config).parameters())
        words = plain.config.vocab_size
        model.resize_token_embeddings(words + 6)
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            assert torch.equal(model.get_input_embeddings().weight[:words], plain.get_input_embeddings().weight)
            plain.resize_token_embeddings(words + 6)
            plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        del keep
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    engine.eval()
    prompt = torch.randint(3, words, (1, 4 + rank), generator=torch.Generator().manual_seed(rank))
    wanted = plain.generate(prompt, max_new_tokens=4 + 6 * rank, do_sample=False)
    assert torch.equal(engine.generate(prompt, max_new_tokens=4 + 6 * rank, do_sample=False), wanted)
    engine.train()
    engine.backward(engine(prompt, labels=prompt).loss)
    engine.step()
    engine.destroy()


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


def trainer_steps(stage: int, folder: str, resume: bool) -> list[float]:
    """Losses of ten updates with a checkpoint after five, or of those after the checkpoint."""
    from transformers import Trainer, TrainingArguments

    with transformers_runs.trainer_state(stage):
        more = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2}
        arguments = TrainingArguments(**transformers_runs.settings(stage, "fp32", folder, **more))
        trainer = Trainer(model=transformers_runs.small_model(), args=arguments, train_dataset=transformers_runs.rows())
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-5") if resume else None)
        logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.model_wrapped.destroy()
        return logs


def accelerate_state(stage: int, folder: str) -> None:
    """save_state, load_state and get_state_dict."""
    with fresh_clients():
        accelerator = accelerator_for(stage, "fp32")
        model = Words()
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        loader = torch.utils.data.DataLoader(sentences(16), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

        def train() -> list[float]:
            losses = []
            for tokens in loader:
                with accelerator.accumulate(model):
                    loss = model(tokens)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        train()
        accelerator.save_state(folder)
        if stage < 3 or model.zero_gather_16bit_weights_on_model_save():
            state = accelerator.get_state_dict(model)
            if dist.get_rank() == 0:
                assert {n: tuple(v.shape) for n, v in state.items()} == {
                    n: tuple(v.shape) for n, v in Words().state_dict().items()
                }
        after = train()
        accelerator.load_state(folder)
        assert train() == after
        model.destroy()


def lightning_modes(stage: int, folder: str, offload: bool) -> None:
    """fit, validate, test, predict with one Trainer; a checkpoint, resumed by another; its fp32 converter."""
    how = {"offload_optimizer": offload, "offload_parameters": offload and stage == 3}

    def trainer(**more: Any) -> Any:
        strategy = lightning_runs.trainer_strategy(stage, **how)
        return lightning_runs.make_trainer(strategy, "fp32", folder, enable_checkpointing=True, **more)

    with fresh_clients():
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

        whole = Run()
        first = trainer(
            max_epochs=2, callbacks=[ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)]
        )
        module = lightning_runs.lightning_module(whole, sharded=True)
        first.fit(module, lightning_runs.batches())
        value = first.validate(module, lightning_runs.batches(), verbose=False)[0]["loss"]
        assert first.test(module, lightning_runs.batches(), verbose=False)[0]["loss"] == value
        assert len(first.predict(module, lightning_runs.batches())) == 20
        first.strategy.model.destroy()
        saved = Path(folder) / "epoch=0.ckpt"
        rest = Run()
        second = trainer(max_epochs=2)
        second.fit(lightning_runs.lightning_module(rest, sharded=True), lightning_runs.batches(), ckpt_path=str(saved))
        assert rest.losses == whole.losses[20:], (rest.losses, whole.losses)
        second.strategy.model.destroy()
        if dist.get_rank() == 0:
            state = convert_zero_checkpoint_to_fp32_state_dict(saved, Path(folder) / "whole.pt")["state_dict"]
            assert {n.removeprefix("net."): tuple(v.shape) for n, v in state.items()} == {
                n: tuple(v.shape) for n, v in Words().state_dict().items()
            }
        dist.barrier()


def module_moves() -> None:
    """`module.cpu()` and the like, which Lightning calls at the end, leave sharded parameters sharded."""
    model = Words()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    for move in (model.cpu, model.float, lambda: model.to("cpu", torch.float32)):
        move()
    assert all(p.device.type == "cpu" for p in model.parameters())
    moved = model.head.weight.to("meta")  # stands for another device
    model.head.weight.data = moved
    moved.zero_()
    for wrong in (moved, torch.zeros(model.head.weight.shape)):
        try:
            model.head.weight.data = wrong
        except deepspeed.errors.ShardedParameterError:
            continue
        raise AssertionError("a write to a sharded parameter went unnoticed")
    engine.backward(engine(sentences(2)))
    engine.step()
    engine.destroy()


def born_with_written_children() -> None:
    """Modules that write to parameters of their children in `__init__` are born with those values."""

    def build() -> Any:
        torch.manual_seed(0)
        return torch.nn.TransformerEncoderLayer(16, 2, 32)

    plain = build()
    with deepspeed.zero.Init():
        model = build()
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    assert same_values(model, plain)


def one_model_after_another() -> None:
    """A model that gets a second engine closes the first."""
    model = Words()
    first, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    twin = copy.deepcopy(model)
    assert json.dumps(sorted(twin.state_dict())) == json.dumps(sorted(model.state_dict()))
    second, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=STAGE_3)
    try:
        first.step()
    except RuntimeError as error:
        assert "was destroyed" in str(error)
    else:
        raise AssertionError("the closed engine still steps")
    second.backward(second(sentences(2)))
    second.step()
    second.destroy()
