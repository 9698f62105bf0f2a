"""Transformers' Trainer, and PEFT under it, with and without this package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.clients.common import (
    ACCUMULATION,
    CLIP,
    MICRO,
    RATE,
    UPDATES,
    WORDS,
    Run,
    fresh_clients,
    sentences,
    zero,
)

AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def small_config(**values: Any) -> Any:
    from transformers import GPTNeoConfig

    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64}
    names = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    return GPTNeoConfig(attention_types=[[["global", "local"], 1]], **sizes | names | values)


def small_model(**values: Any) -> Any:
    from transformers import GPTNeoForCausalLM

    torch.manual_seed(0)
    return GPTNeoForCausalLM(small_config(**values))


def rows(count: int = 64) -> list[dict[str, Any]]:
    return [{"input_ids": tokens, "labels": tokens} for tokens in sentences(count)]


def settings(stage: int | None, precision: str, folder: str, **more: Any) -> dict[str, Any]:
    """Keywords of TrainingArguments."""
    found: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": UPDATES,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "learning_rate": RATE,
        "max_grad_norm": CLIP,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": precision == "bf16",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 3,
        "ddp_find_unused_parameters": False,
    }
    if stage is not None:
        found["accelerator_config"] = {"use_configured_state": True}
        found["deepspeed"] = dict.fromkeys(AUTO, "auto") | {
            "zero_optimization": zero(stage) | {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"},
            "bf16": {"enabled": "auto"},
            "fp16": {"enabled": "auto"},
        }
    return found | more


@contextlib.contextmanager
def trainer_state(stage: int | None) -> Iterator[str]:
    """A folder, with what Transformers needs set up for this package on CPU."""
    with fresh_clients(**({} if stage is None else {"ACCELERATE_USE_DEEPSPEED": "true"})) as folder:
        if stage is not None:
            from accelerate import PartialState

            PartialState(backend="gloo")
        yield folder


def noted(trainer: Any) -> Run:
    """What the Trainer logged."""
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    run = Run(updates=trainer.state.global_step)
    run.losses = [entry["loss"] for entry in logs]
    run.norms = [float(entry["grad_norm"]) for entry in logs]
    run.rates = [entry["learning_rate"] for entry in logs]
    engine = trainer.model_wrapped
    if hasattr(engine, "global_steps"):
        assert engine.global_steps == run.updates
        engine.destroy()
    return run


def run_trainer(
    stage: int | None, precision: str, make: Callable[[], Any], *, in_json: bool = False, **more: Any
) -> Run:
    from transformers import Trainer, TrainingArguments

    with trainer_state(stage) as folder:
        values = settings(stage, precision, folder, **more)
        if in_json:
            values["deepspeed"]["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
        arguments = TrainingArguments(**values)
        trainer = Trainer(model=make(), args=arguments, train_dataset=rows(), eval_dataset=rows(8))
        trainer.train()
        return noted(trainer)


def train(stage: int | None, precision: str) -> Run:
    return run_trainer(stage, precision, small_model)


def train_by_json(stage: int | None, precision: str) -> Run:
    """The optimizer is the JSON's, so that the engine steps the schedule, before the Trainer looks at it."""
    run = run_trainer(stage, precision, small_model, in_json=stage is not None)
    if stage is not None:
        run.rates = [0.0, *run.rates[:-1]]
    return run


def with_adapters(**values: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **values)
    return get_peft_model(small_model(), adapters)


def train_adapters(stage: int | None, precision: str) -> Run:
    again = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return run_trainer(stage, precision, with_adapters, **again)
