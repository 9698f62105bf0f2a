"""TRL's trainers, with and without this package: one engine, two of them, and generation under way."""

from __future__ import annotations

import random
from typing import Any

import torch

from tests.clients.common import WORDS, Run
from tests.clients.transformers_runs import noted, settings, small_config, small_model, trainer_state


def tokenizer() -> Any:
    """One token per word, made without a download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(WORDS - 3))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def data(**lengths: int) -> Any:
    from datasets import Dataset

    draw = random.Random(0)
    text = lambda count: " ".join(f"w{draw.randrange(WORDS - 3)}" for _ in range(count))  # noqa: E731
    return Dataset.from_list([{name: text(length) for name, length in lengths.items()} for _ in range(64)])


def train_sft(stage: int | None, precision: str) -> Run:
    from trl import SFTConfig, SFTTrainer

    with trainer_state(stage) as folder:
        arguments = SFTConfig(**settings(stage, precision, folder, max_length=32, gradient_checkpointing=True))
        trainer = SFTTrainer(small_model(), arguments, train_dataset=data(text=10), processing_class=tokenizer())
        trainer.train()
        return noted(trainer)


def train_dpo(stage: int | None, precision: str) -> Run:
    """The trained model and the reference are two engines."""
    from trl import DPOConfig, DPOTrainer

    with trainer_state(stage) as folder:
        arguments = DPOConfig(**settings(stage, precision, folder, max_length=32))
        trainer = DPOTrainer(
            small_model(),
            small_model(),
            arguments,
            train_dataset=data(prompt=4, chosen=5, rejected=5),
            processing_class=tokenizer(),
        )
        trainer.train()
        if stage is not None:
            trainer.ref_model.destroy()
        return noted(trainer)


def reward_model(**values: Any) -> Any:
    """Gives one figure for a text."""
    from transformers import GPTNeoForSequenceClassification

    torch.manual_seed(0)
    return GPTNeoForSequenceClassification(small_config(num_labels=1, **values))


def train_reward(stage: int | None, precision: str) -> Run:
    from trl import RewardConfig, RewardTrainer

    with trainer_state(stage) as folder:
        arguments = RewardConfig(**settings(stage, precision, folder, max_length=32))
        texts = data(prompt=4, chosen=5, rejected=5)
        trainer = RewardTrainer(reward_model(), arguments, train_dataset=texts, processing_class=tokenizer())
        trainer.train()
        return noted(trainer)


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def train_grpo(stage: int | None, precision: str) -> Run:
    """Generates in each step, with the engine's hooks taken off and put back at stage 3."""
    from trl import GRPOConfig, GRPOTrainer

    with trainer_state(stage) as folder:
        arguments = GRPOConfig(
            **settings(stage, precision, folder, max_completion_length=8, num_generations=2, beta=0.0)
        )
        trainer = GRPOTrainer(
            small_model(), distinct_words, arguments, train_dataset=data(prompt=4), processing_class=tokenizer()
        )
        trainer.train()
        return noted(trainer)
