"""TRL's trainers that generate (and SFT, which does not), greedily, with `hybrid_engine` in the JSON and without."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from tests.clients.common import WORDS
from tests.clients.transformers_runs import noted, settings, trainer_state
from tests.clients.trl_runs import data, tokenizer
from tests.unit.inference.toys import scale

UPDATES, NEW, BAR = 4, 8, 1e-5
GREEDY = {"generation_kwargs": {"do_sample": False}}


@dataclass
class GeneratingRun:
    """What one run reports on one rank."""

    figures: dict[str, list[float]] = field(default_factory=dict)  # by name of TRL's log
    tokens: list[list[list[int]]] = field(default_factory=list)  # of each call of generate: rows of prompt and answer
    by_transformers: int = 0  # calls of Transformers' own generate


class Recorder:
    """The model that a trainer unwraps, whose tokens are noted."""

    def __init__(self, model: Any, run: GeneratingRun) -> None:
        self._model, self._run = model, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **options: Any) -> Any:
        result = self._model.generate(**options)
        self._run.tokens.append(getattr(result, "sequences", result).tolist())
        return result


@contextlib.contextmanager
def recorded(trainer: Any, run: GeneratingRun) -> Iterator[None]:
    """Note what the trainer generates, and how often Transformers did it."""
    from transformers import GenerationMixin

    module, own = sys.modules[type(trainer).__module__], GenerationMixin.generate
    unwrap = getattr(module, "unwrap_model_for_generation", None)

    @contextlib.contextmanager
    def unwrapped(*args: Any, **kwargs: Any) -> Iterator[Recorder]:
        with unwrap(*args, **kwargs) as model:
            yield Recorder(model, run)

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        run.by_transformers += 1
        return own(self, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(GenerationMixin, "generate", counted))
        if unwrap is not None:
            stack.enter_context(mock.patch.object(module, "unwrap_model_for_generation", unwrapped))
        yield


def llama(seed: int = 5) -> Any:
    """A small decoder with a native form, whose greedy answers are not one repeated token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return scale(LlamaForCausalLM(config), 0.3, 0.3, seed=seed).train()


def texts(kind: str) -> Any:
    """Prompts of 2 to 6 words, so that batches are padded."""
    from datasets import Dataset

    rows = [row["text"].split() for row in data(text=10)]
    prompts = [" ".join(words[: 2 + at % 5]) for at, words in enumerate(rows)]
    if kind == "gkd":
        ends = [" ".join(words[-3:]) for words in rows]
        turns = lambda ask, end: [{"role": "user", "content": ask}, {"role": "assistant", "content": end}]  # noqa: E731
        return Dataset.from_list([{"messages": turns(*pair)} for pair in zip(prompts, ends, strict=True)])
    return Dataset.from_list([{"text": " ".join(words)} if kind == "sft" else {"prompt": prompt}
                              for words, prompt in zip(rows, prompts, strict=True)])  # fmt: skip


def parity(completions: list[str], **_: Any) -> list[float]:
    """Greedy answers to one prompt are equal: their places tell them apart."""
    return [len(set(text.split())) + at % 2 for at, text in enumerate(completions)]


def trainer_of(kind: str, values: dict[str, Any]) -> Any:
    """A trainer of TRL. GRPO and RLOO update on halves of what is generated, so that advantages do not cancel."""
    import trl

    names = tokenizer()
    names.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    rest: dict[str, Any] = {"train_dataset": texts(kind), "processing_class": names}
    if kind == "sft":
        return trl.SFTTrainer(llama(), trl.SFTConfig(**values, max_length=32), **rest)
    if kind in ("grpo", "rloo"):
        config, trainer = (getattr(trl, f"{kind.upper()}{part}") for part in ("Config", "Trainer"))
        halves = {"num_generations": 2, "steps_per_generation": 2, "beta": 0.0, "max_completion_length": NEW}
        return trainer(llama(), parity, config(**values, **halves, **GREEDY), **rest)
    if kind == "gkd":
        from trl.experimental.gkd import GKDConfig, GKDTrainer

        settled = GKDConfig(**values, lmbda=1.0, max_new_tokens=NEW, max_length=32)
        trainer = GKDTrainer(llama(), llama(seed=6), settled, **rest)
        trainer.generation_config.do_sample = False
        return trainer
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    # equal answers give no gradient: the weights change by decay alone, and Adam must not scale rounding errors up
    decay = {"weight_decay": 1.0, "adam_epsilon": 1e-2, "max_new_tokens": NEW, "max_length": 32}
    return OnlineDPOTrainer(
        llama(), llama(), reward_funcs=parity, args=OnlineDPOConfig(**values | decay | GREEDY), **rest
    )


def train(kind: str, stage: int, hybrid: bool) -> GeneratingRun:
    """One short run on this rank."""
    run = GeneratingRun()
    more = {"max_steps": UPDATES, "gradient_accumulation_steps": 1, "learning_rate": 5e-3, "warmup_steps": 0}
    with trainer_state(stage) as folder:
        values = settings(stage, "fp32", folder, gradient_checkpointing=False, **more)
        if hybrid:
            values["deepspeed"]["hybrid_engine"] = {"enabled": True, "max_out_tokens": 64}
        trainer = trainer_of(kind, values)
        with recorded(trainer, run):
            trainer.train()
        for name in ("loss", "grad_norm", "logps/chosen", "reward"):
            run.figures[name] = [float(entry[name]) for entry in trainer.state.log_history if name in entry]
        noted(trainer)
        for name in ("ref_model", "teacher_model"):
            if hasattr(getattr(trainer, name, None), "destroy"):
                getattr(trainer, name).destroy()
    return run


def compare(kind: str, stage: int) -> dict[str, Any]:
    """On a worker: the run with the key against the run without."""
    torch.manual_seed(0)
    wanted, found = train(kind, stage, False), train(kind, stage, True)
    assert len(wanted.figures["loss"]) == UPDATES
    assert found.tokens == wanted.tokens, (found.tokens, wanted.tokens)
    gaps = {
        name: max((abs(a - b) for a, b in zip(values, wanted.figures[name], strict=True)), default=0.0)
        for name, values in found.figures.items()
    }
    assert gaps["loss"] <= BAR and gaps["logps/chosen"] <= 1e-4, (gaps, found.figures, wanted.figures)
    calls = len(wanted.tokens)
    assert calls == wanted.by_transformers == {"sft": 0, "grpo": UPDATES / 2, "rloo": UPDATES / 2}.get(kind, UPDATES)
    assert found.by_transformers == 0, "Transformers' generate ran in place of the engine's"
    answers = {tuple(row) for rows in wanted.tokens for row in rows}
    return {"gaps": gaps, "losses": found.figures["loss"], "answers": len(answers)}
