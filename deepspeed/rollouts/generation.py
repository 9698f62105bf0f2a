"""Rollouts of a generator: answers to prompts with their log-probabilities, and scores of sequences."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch

from deepspeed.comm.collectives.same_error import alarmed
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.errors import RequestError, UsageError
from deepspeed.foundation.log import describe_error
from deepspeed.inference.generator import Generator
from deepspeed.inference.logprobs import truncates
from deepspeed.inference.request import Output, Request
from deepspeed.inference.sampling_params import SamplingParams

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """Answer to a prompt.

    Args:
        prompt: tokens of the prompt.
        tokens: tokens of the answer, with the end token if there is one.
        logprobs: log-probability of each of them, after temperature and truncation, without penalties, biases and
            constraints; at temperature 0 those of temperature 1.
        finish_reason: "stop" (an end token, or a stop string of a generator with a tokenizer) or "length".
        version: number of the weights that it was drawn from (`engine.weights_version`).
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int


def check_scores_kept(sampling: SamplingParams) -> None:
    """Raise RequestError for options that let a token be drawn which truncation leaves out of the log-probabilities."""
    names = ("min_new_tokens", "presence_penalty", "frequency_penalty", "logit_bias", "structured")
    others = [name for name in names if getattr(sampling, name)]
    others += ["repetition_penalty"] if sampling.repetition_penalty != 1 else []
    if others and sampling.temperature and truncates(sampling):
        raise RequestError(f"rollouts with top_k, top_p or min_p have no log-probabilities under {', '.join(others)}")


@dataclass(frozen=True)
class GenerationTask(Generic[T]):
    """Requests to a generator, and what is made of their outputs.

    Args:
        requests: the requests.
        finish: function from the outputs of each request, and the version of the weights, to the result.
    """

    requests: list[Request]
    finish: Callable[[Sequence[Sequence[Output]], int], T]

    def run(self, generator: Generator) -> T:
        """Run the requests and return the result. Errors are those of `Generator.run`."""
        version = generator.weights_version
        return self.finish(generator.run(self.requests), version)

    def run_shared(self, generator: Generator, axis: Axis) -> T:
        """As `run`, on ranks that share the generator's model: each answers the requests of all and keeps its own.

        Raises:
            RequestError: a request of this rank is not possible.
            UsageError: a request of another rank is not possible.
        """
        version, by_rank = generator.weights_version, all_gather_objects(axis, self.requests)
        for rank, requests in zip(axis.ranks, by_rank, strict=True):  # every rank finds the same errors
            try:
                _check(generator, requests)
            except RequestError as error:
                if rank == axis.ranks[axis.rank]:
                    raise
                raise failed_elsewhere(rank, describe_error(error)) from None
        with alarmed(lambda: "generation by several ranks", alike=(RequestError,)):
            outputs = generator.run(list(itertools.chain(*by_rank)))
        first = sum(map(len, by_rank[: axis.rank]))
        return self.finish(outputs[first : first + len(self.requests)], version)


def failed_elsewhere(rank: int, text: str) -> UsageError:
    """Return the error of the other ranks when `rank` failed with the error `text`."""
    return UsageError(f"generation ended, since rank {rank} failed: {text}")


def check_sent(requests: Sequence[Request]) -> None:
    """Raise RequestError if requests cannot be sent to other ranks."""
    try:
        pickle.dumps(requests)
    except Exception as error:
        raise RequestError(f"a request cannot be sent to the ranks that answer it together: {error}") from error


def _check(generator: Generator, requests: Sequence[Request]) -> None:
    """Raise RequestError for a request that cannot be answered; computes nothing."""
    try:
        for request in requests:
            generator.submit(request)
    finally:
        generator.cancel_all()


def rollout_task(
    prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None, n: int = 1, logprobs: bool = True
) -> GenerationTask[list[Rollout]]:
    """Return the task of `generate_rollouts`, with its arguments.

    Raises:
        RequestError: `n` is below 1.
    """
    if type(n) is not int or n < 1:
        raise RequestError(f"n, the number of answers to a prompt, has to be at least 1, not {n!r}")
    sampling = replace(sampling or SamplingParams(), logprobs=0 if logprobs else None, logprobs_mode="processed")
    copies = Counter(map(tuple, prompts))
    groups = {prompt: object() for prompt, count in copies.items() if n * count > 1}
    requests = []
    for number, prompt in enumerate(prompts):
        for sample in range(n):
            options = replace(sampling, index=sampling.index + number * n + sample)
            requests.append(Request(object(), list(prompt), options, group=groups.get(tuple(prompt))))

    def finish(outputs: Sequence[Sequence[Output]], version: int) -> list[Rollout]:
        return [
            Rollout(
                list(request.tokens),
                [token for part in parts for token in part.tokens],
                [entry.logprob for part in parts for entry in part.logprobs or ()],
                str(parts[-1].finish_reason),
                version,
            )
            for request, parts in zip(requests, outputs, strict=True)
        ]

    return GenerationTask(requests, finish)


def score_task(
    sequences: Sequence[Sequence[int]], sampling: SamplingParams | None = None
) -> GenerationTask[list[torch.Tensor]]:
    """Return the task of `score_sequences`, with its arguments."""
    own = sampling or SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p")
    options = SamplingParams(
        max_new_tokens=0, prompt_logprobs=0, logprobs_mode="processed", **{name: getattr(own, name) for name in names}
    )
    requests = [Request(object(), list(tokens), options) for tokens in sequences if len(tokens) > 1]

    def finish(outputs: Sequence[Sequence[Output]], _version: int) -> list[torch.Tensor]:
        scored, scores = iter(outputs), []
        for tokens in sequences:
            entries: Any = []  # one token follows nothing
            if len(tokens) > 1:
                entries = next(part.prompt_logprobs for part in next(scored) if part.prompt_logprobs is not None)
            scores.append(torch.tensor([entry.logprob for entry in entries[1:]], dtype=torch.float32))
        return scores

    return GenerationTask(requests, finish)


def generate_rollouts(
    generator: Generator,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | None = None,
    n: int = 1,
    logprobs: bool = True,
) -> list[Rollout]:
    """Return `n` rollouts for each prompt, those of one prompt one after the other.

    Args:
        generator: generator over the weights.
        prompts: tokens of each prompt.
        sampling: options of all of them; with `seed`, every answer gets other random numbers; None: greedy, at most 128
            tokens.
        n: number of answers to each prompt; equal prompts are computed once.
        logprobs: whether log-probabilities are computed; they are empty otherwise.

    Raises:
        RequestError: a prompt or an option is not possible, or logits are not finite; no request stays behind.
    """
    return rollout_task(prompts, sampling, n, logprobs).run(generator)


def score_sequences(
    generator: Generator, sequences: Sequence[Sequence[int]], sampling: SamplingParams | None = None
) -> list[torch.Tensor]:
    """Return the log-probability of each token of the sequences but the first, fp32 [length - 1] each.

    A token has the same bits as when it was drawn from the same weights with the same sampling.

    Args:
        generator: generator over the weights.
        sequences: tokens of each sequence.
        sampling: its temperature and truncation count; None: the model's own probabilities.
    """
    return score_task(sequences, sampling).run(generator)
