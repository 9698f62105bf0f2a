"""Rollouts by upstream's interface (`deepspeed.runtime.rollout`): padded prompts in, padded prompts and answers out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import ArgumentError, DataError, LengthError, UsageError
from deepspeed.foundation.log import log_once
from deepspeed.inference.request import length_limit
from deepspeed.inference.sampling_params import SamplingParams


@dataclass
class RolloutConfig:
    """Which rollout engine is built, and upstream's options of its generation loop.

    The other options have no effect here: the generator always computes a prompt once for its samples, batches
    requests continuously and allocates its cache by pages. A line in the log says so if one is set.

    Args:
        engine: "hybrid_engine", which generates with the weights of the training engine.
    """

    engine: str = "hybrid_engine"
    use_graph_capture: bool = False
    enable_profiling: bool = False
    use_shared_prefill: bool = False
    align_decode_fronts: bool = False
    enable_cache_trimming: bool = False
    continuous_cache_capacity: int | None = None


@dataclass
class SamplingConfig:
    """How answers are drawn.

    Args:
        max_new_tokens: largest number of tokens of an answer.
        temperature: divisor of the logits; 0 and below: greedy.
        top_p: tokens are drawn from the smallest set of most probable ones with a total of p; 1 is off.
        top_k: tokens are drawn from the k most probable; 0 and below: off.
        n_samples_per_prompt: answers to each prompt.
        continuous_batch_size: accepted for upstream's sake; the generator batches continuously in any case.

    Raises:
        ArgumentError: a value is out of range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n_samples_per_prompt: int = 1
    continuous_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "n_samples_per_prompt", "continuous_batch_size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(f"{name} is a whole number of at least 1, not {value!r}")
        if not 0 < self.top_p <= 1:
            raise ArgumentError(f"top_p is above 0 and at most 1, not {self.top_p!r}")

    def sampling_params(self, end_token: int | None) -> SamplingParams:
        """Return the same options for the generator, with an end token besides the model's own."""
        greedy = self.temperature <= 0
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy else max(self.top_k, 0),
            stop_token_ids=() if end_token is None else (end_token,),
        )


@dataclass
class RolloutRequest:
    """Prompts of different lengths in one tensor.

    Args:
        prompt_ids: int64 [B, Tp], padded on the left.
        prompt_attention_mask: [B, Tp], 1 at the tokens of the prompts and 0 at the padding before them.

    Raises:
        DataError: the mask has another shape, a prompt is not padded on the left, or one has no tokens.
    """

    prompt_ids: Tensor
    prompt_attention_mask: Tensor

    def __post_init__(self) -> None:
        ids, mask = self.prompt_ids, self.prompt_attention_mask
        if ids.dim() != 2 or mask.shape != ids.shape:
            raise DataError(
                f"prompt_ids of shape {list(ids.shape)} with a prompt_attention_mask of shape {list(mask.shape)}: both "
                "are [prompts, tokens]"
            )
        if not ((mask == 0) | (mask == 1)).all():
            raise DataError("prompt_attention_mask has values other than 0 and 1")
        empty = (~mask.bool()).all(1).nonzero().flatten().tolist()
        if empty:
            raise DataError(f"prompts {empty} have no tokens: prompt_attention_mask is 0 all along their rows")
        gaps = (mask[:, 1:] < mask[:, :-1]).any(1).nonzero().flatten().tolist()
        if gaps:
            raise DataError(f"prompts {gaps} are not padded on the left: their masks have a 0 after a 1")

    def prompts(self) -> list[list[int]]:
        """Return the tokens of each prompt without padding."""
        rows = zip(self.prompt_ids, self.prompt_attention_mask.bool(), strict=True)
        return [ids[mask].tolist() for ids, mask in rows]


@dataclass
class RolloutBatch:
    """Prompts with their answers, n rows for each prompt side by side.

    Args:
        input_ids: int64 [B * n, Tp + Tr]: prompts padded on the left, answers on the right.
        attention_mask: int64 of the same shape, 1 at tokens: it follows from the lengths, not from the padding's id.
        response_start_idx: int64 [B * n], column of the first token of the answer.
        logprobs: fp32 of the same shape as `input_ids`: log-probability of each token of an answer under the weights,
            temperature and truncation that drew it; 0 elsewhere.
        version: int64 [B * n], `engine.weights_version` of the weights that drew the answer.
    """

    input_ids: Tensor
    attention_mask: Tensor
    response_start_idx: Tensor
    logprobs: Tensor
    version: Tensor

    @property
    def batch_size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]


@dataclass(frozen=True)
class ResponseTokenBatch:
    """Tokens of answers beside the positions that predict them: all [B * n, Tp + Tr - 1].

    Args:
        targets: the token after each position.
        response_mask: true where that token belongs to an answer.
        logprobs: its log-probability in generation; 0 outside of the answers.
    """

    targets: Tensor
    response_mask: Tensor
    logprobs: Tensor

    @classmethod
    def from_rollout(cls, batch: RolloutBatch) -> ResponseTokenBatch:
        """Shift the tokens of a batch by one position."""
        columns = torch.arange(1, batch.seq_len, device=batch.input_ids.device)
        answers = columns >= batch.response_start_idx[:, None]
        return cls(batch.input_ids[:, 1:], batch.attention_mask[:, 1:].bool() & answers, batch.logprobs[:, 1:])

    def select_causal_logits(self, logits: Tensor) -> Tensor:
        """Return those of a model's logits [B * n, Tp + Tr, V] that predict a target: all but the last position's.

        Raises:
            DataError: the logits are of other positions.
        """
        rows, columns = self.targets.shape
        if logits.dim() != 3 or logits.shape[:2] != (rows, columns + 1):
            raise DataError(f"logits of shape {list(logits.shape)} for {rows} rows of {columns + 1} tokens")
        return logits[:, :-1]


class RolloutEngine(ABC):
    """What a loop of generation and training needs of a generator."""

    @abstractmethod
    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Draw answers to the prompts of this rank."""

    @abstractmethod
    def sync_weights(self, step: int) -> None:
        """Make the generator use the weights after the update `step`."""

    @abstractmethod
    def shutdown(self) -> None:
        """End generation; `generate` cannot be called any more."""


class HybridEngineRollout(RolloutEngine):
    """Rollouts of a training engine with its own weights (`engine.rollout`); each rank has its own prompts.

    Args:
        engine: engine of `deepspeed.initialize` around a causal LM.
        tokenizer: has the padding and end token; without a padding token, the end token is the padding.
        cfg: a RolloutConfig, or an object or dict with some of its fields; None: the defaults.
    """

    def __init__(self, engine: Any, tokenizer: Any, cfg: Any = None) -> None:
        if not callable(getattr(engine, "rollout", None)):
            raise ArgumentError(f"{type(engine).__name__} has no method rollout: pass the engine of initialize")
        self.engine, self.tokenizer, self._open = engine, tokenizer, True
        self.cfg = _config(cfg)
        defaults = RolloutConfig()
        for each in fields(RolloutConfig):
            if each.name != "engine" and getattr(self.cfg, each.name) != getattr(defaults, each.name):
                log_once(f"rollouts: {each.name} has no effect here")

    def generate(self, request: RolloutRequest, sampling: SamplingConfig) -> RolloutBatch:
        """Draw `n_samples_per_prompt` answers to each prompt. At stage 3 all ranks have to call it.

        Returns:
            The batch, on the device of the prompts. An answer ends with its end token, if it has one.

        Raises:
            UsageError: after `shutdown`.
            LengthError: a prompt leaves no room for an answer within the model's length limit.
        """
        if not self._open:
            raise UsageError("this rollout engine was shut down")
        prompts, limit, new = request.prompts(), length_limit(self.engine.module), sampling.max_new_tokens
        end = getattr(self.tokenizer, "eos_token_id", None)
        try:
            answers = self.engine.rollout(prompts, sampling.sampling_params(end), n=sampling.n_samples_per_prompt)
        except LengthError as error:  # of the engine, which lets all ranks know
            for row, prompt in enumerate(prompts):
                if limit is not None and len(prompt) + new > limit:
                    raise LengthError(
                        f"prompt {row} has {len(prompt)} tokens: with {new} new ones it exceeds the model's limit of "
                        f"{limit}"
                    ) from error
            raise
        pad = getattr(self.tokenizer, "pad_token_id", None)
        return _padded(request, answers, sampling.n_samples_per_prompt, pad if pad is not None else end or 0)

    def sync_weights(self, step: int) -> None:
        """Do nothing: the weights are the trained ones."""

    def shutdown(self) -> None:
        """End generation. The engine, which belongs to the caller, goes on."""
        self._open = False


def _padded(request: RolloutRequest, answers: list[Any], samples: int, pad: int) -> RolloutBatch:
    ids = request.prompt_ids.repeat_interleave(samples, 0)
    mask = request.prompt_attention_mask.long().repeat_interleave(samples, 0)
    start, longest = ids.shape[1], max((len(answer.tokens) for answer in answers), default=0)
    ids = torch.cat([ids.masked_fill(mask == 0, pad), ids.new_full((len(ids), longest), pad)], 1)
    mask = torch.cat([mask, mask.new_zeros(len(mask), longest)], 1)
    logprobs = torch.zeros(ids.shape)
    for row, answer in enumerate(answers):
        end = start + len(answer.tokens)
        ids[row, start:end] = torch.as_tensor(answer.tokens, dtype=ids.dtype)
        mask[row, start:end] = 1
        logprobs[row, start:end] = torch.as_tensor(answer.logprobs, dtype=torch.float32)
    starts = torch.full((len(ids),), start, device=ids.device)
    version = torch.tensor([answer.version for answer in answers], device=ids.device)
    return RolloutBatch(ids, mask, starts, logprobs.to(ids.device), version)


def _config(cfg: Any) -> RolloutConfig:
    if isinstance(cfg, RolloutConfig):
        return cfg
    names = [each.name for each in fields(RolloutConfig)]
    values = cfg if isinstance(cfg, dict) else {name: getattr(cfg, name) for name in names if hasattr(cfg, name)}
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ArgumentError(f"a rollout configuration has no {', '.join(unknown)}; it has {', '.join(names)}")
    return RolloutConfig(**values)


def build_rollout(cfg: Any, student_engine: Any, tokenizer: Any) -> RolloutEngine:
    """Build the rollout engine that the configuration names.

    Args:
        cfg: a RolloutConfig, or an object or dict with some of its fields.
        student_engine: the training engine.
        tokenizer: as for `HybridEngineRollout`.

    Raises:
        ArgumentError (a ValueError): the engine's name is unknown.
    """
    config = _config(cfg)
    if config.engine != "hybrid_engine":
        raise ArgumentError(f'there is no rollout engine {config.engine!r}; there is "hybrid_engine"')
    return HybridEngineRollout(student_engine, tokenizer, config)
