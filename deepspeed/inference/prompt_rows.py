"""What requests want of their prompt's rows: log-probabilities of its tokens, or an embedding from hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.errors import RequestError
from deepspeed.foundation.hf_forward import accepts, without_cache
from deepspeed.inference.executors.gathered import ModuleState
from deepspeed.inference.executors.select import device_of
from deepspeed.inference.logprobs import log_probs
from deepspeed.inference.request import Logprob, Request
from deepspeed.inference.sampling_params import SamplingParams

BLOCK = 64  # rows whose log-probabilities are computed at a time
ROWS = 1024  # rows whose logits are computed in one call of a model that cannot be batched


class PromptScore:
    """Log-probabilities of a prompt's tokens, collected from logits as they are computed.

    Args:
        tokens: the prompt.
        most: number of most probable tokens per position.
        sampling: the distribution whose log-probabilities these are, which have no ranks then; None: that of the
            model's own logits.
    """

    def __init__(self, tokens: Sequence[int], most: int, sampling: SamplingParams | None = None) -> None:
        self._tokens, self._most, self._sampling = list(tokens), most, sampling
        self.entries: list[Logprob | None] = [None]  # the first token follows nothing

    @property
    def complete(self) -> bool:
        """Whether all tokens of the prompt have their entry."""
        return len(self.entries) == len(self._tokens)

    def add(self, logits: torch.Tensor) -> None:
        """Take the logits [rows, vocabulary] of the positions after those so far."""
        for part in logits.split(BLOCK):
            part = part.detach().float().cpu()
            chances = part.log_softmax(-1) if self._sampling is None else log_probs(part, self._sampling)
            following = torch.tensor(self._tokens[len(self.entries) : len(self.entries) + len(part)])
            values = chances.gather(1, following[:, None])
            ranks = (chances >= values).sum(1).tolist() if self._sampling is None else [0] * len(part)
            if self._most:
                top_values, top_tokens = (top.tolist() for top in chances.topk(min(self._most, chances.shape[1])))
            else:
                top_values = top_tokens = [[]] * len(part)
            rows = zip(following.tolist(), values[:, 0].tolist(), top_tokens, top_values, ranks, strict=True)
            for token, value, others, numbers, rank in rows:
                self.entries.append(Logprob(token, value, tuple(zip(others, numbers, strict=True)), rank))


class PooledStates:
    """Embedding of a prompt, collected from the last hidden states of its rows.

    Args:
        kind: one of `request.POOLINGS`.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._count = kind, 0
        self._state = torch.zeros(())  # sum of the rows, the last or the first one

    def add(self, states: torch.Tensor) -> None:
        """Take the states [rows, hidden size] of the positions after those so far."""
        if not len(states) or (self._kind == "cls" and self._count):
            return
        states = states.detach().cpu().double()
        self._count += len(states)
        if self._kind == "mean":
            self._state = self._state + states.sum(0)
        else:
            self._state = states[-1 if self._kind == "last" else 0]

    def embedding(self) -> list[float] | None:
        """Return the pooled state, [hidden size]; None if it is not finite."""
        pooled = (self._state / self._count if self._kind == "mean" else self._state).float()
        return pooled.tolist() if bool(pooled.isfinite().all()) else None


def own_rows(tokens: Sequence[int], scored: bool, pooling: str | None) -> int:
    """Return the number of a prompt's first rows that a request cannot take from the prefix cache."""
    if pooling is not None:
        return {"mean": len(tokens), "last": 0, "cls": 1}[pooling]
    return len(tokens) - 1 if scored else 0


def why_no_states(model: Any) -> str | None:
    """Return the reason why a model's last hidden states cannot be had; None if they can."""
    base = getattr(model, "base_model", None)
    if getattr(model.config, "is_encoder_decoder", False):
        return "it has an encoder, whose states are of another kind"
    return "it has no base model under a head" if base is None or base is model else None


def check_tokens(tokens: Sequence[int], sampling: SamplingParams, vocabulary: int | None) -> None:
    """Raise RequestError if a token of a prompt or of its options is none of the vocabulary; None: of any size."""
    for token in tokens:
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or token < 0 or (vocabulary is not None and token >= vocabulary):
            raise RequestError(f"{token!r} in the prompt is no token of a vocabulary of {vocabulary}")
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(sampling, name) if vocabulary is not None else ():
            if token >= vocabulary:
                raise RequestError(f"{token} in {name} is no token of a vocabulary of {vocabulary}")


def check_rows(request: Request, model: Any) -> None:
    """Raise RequestError if a model cannot give what the request wants of its prompt's rows."""
    if request.pooling is not None and (reason := why_no_states(model)) is not None:
        raise RequestError(f"{type(model).__name__} gives no embeddings: {reason}")
    scored = request.sampling.prompt_logprobs is not None and not request.pooling
    if scored and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise RequestError(f"{type(model).__name__} has no prompt_logprobs: its encoder reads the prompt")


def _inputs(model: Any, tokens: Sequence[int]) -> dict[str, Any]:
    ids = torch.tensor([list(tokens)], device=device_of(model))
    inputs: dict[str, Any] = {"input_ids": ids, **without_cache(model)}
    if accepts(model, "attention_mask"):
        inputs["attention_mask"] = torch.ones_like(ids)
    return inputs


@torch.no_grad()
def score_alone(model: Any, tokens: Sequence[int], score: PromptScore) -> None:
    """Fill `score` by forwards of a model that cannot be batched, which may project some rows at a time.

    Raises:
        RequestError: the logits are not finite.
    """
    inputs, count = _inputs(model, tokens), len(tokens) - 1
    size = ROWS if accepts(model, "logits_to_keep") else max(count, 1)
    for start in range(0, count, size):
        rows = torch.arange(start, min(start + size, count), device=inputs["input_ids"].device)
        keep = {"logits_to_keep": rows} if size < count else {}
        with ModuleState(model).turn():
            logits = model(**inputs, **keep).logits[0]
        logits = logits if keep else logits[:count]
        if not bool(logits.isfinite().any(-1).all()):
            raise RequestError("the model's logits for the prompt are not finite")
        score.add(logits)


@torch.no_grad()
def pool_alone(model: Any, tokens: Sequence[int], pooled: PooledStates) -> None:
    """Fill `pooled` by one forward of the base model of a model that cannot be batched."""
    with ModuleState(model).turn():
        pooled.add(model.base_model(**_inputs(model, tokens))[0][0])
