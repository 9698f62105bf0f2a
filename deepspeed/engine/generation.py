"""Generation by an engine in training over its own weights: rollouts, scores, and calls of `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.same_error import run_collectively
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import NotAvailableError, UsageError
from deepspeed.foundation.log import log_once, warn_once

if TYPE_CHECKING:  # Transformers is an optional dependency, imported at first use
    from deepspeed.inference.generator import Generator
    from deepspeed.inference.sampling_params import SamplingParams
    from deepspeed.rollouts.generation import Rollout

T = TypeVar("T")


class Generation:
    """Generation over the weights of an engine: at stages 0 to 2 where they lie, at stage 3 gathered.

    With `hybrid_engine.pin_parameters` (the default of an enabled block) stage 3 gathers the whole model once for a
    call, else layer by layer. All ranks make the same calls; on CPUs none waits for another.

    Args:
        state: state of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._generator: Generator | None = None
        self.seconds = {"generate": 0.0, "gather": 0.0}  # since the last call of `eval`
        self.sequences = 0  # answers since then

    @property
    def generator(self) -> Generator:
        """Generator over the engine's model, made at the first call. All ranks call this.

        Raises:
            NotAvailableError: ranks have pipeline stages, parts of a sequence, or experts of their own.
        """
        from deepspeed.inference.executors.engine_weights import trained_model
        from deepspeed.inference.generator import Generator
        from deepspeed.inference.request import length_limit

        if self._generator is None:
            divided = [dim for dim in ("pp", "sp") if self._state.axes.mesh.sizes[dim] > 1]
            if divided:
                raise NotAvailableError(f"generation by an engine whose ranks share a model by {', '.join(divided)}")
            module, keys = self._state.module, self._state.ds_config.top.hybrid_engine
            set_by_user = keys.enabled and "max_out_tokens" in keys.model_fields_set
            limits = [length_limit(trained_model(module)), keys.max_out_tokens if set_by_user else None]
            limit = min((each for each in limits if each is not None), default=None)
            self._generator = Generator(module, max_length=limit, cuda_graphs=keys.enabled and keys.enable_cuda_graph)
        return self._generator

    @property
    def weights_version(self) -> int:
        """Number of changes of the weights that were noticed; several between two calls count once. All ranks call."""
        return self.generator.weights_version

    def _together(self, action: Callable[[], T]) -> T:
        """Return what `action` does; where ranks gather weights together, all of them raise if one does.

        The rank that failed raises its own error, the others UsageError with its text.
        """
        if self.generator.weights.read_alone():
            return action()
        axis = self._state.axes.everyone
        outcome = run_collectively(axis, action)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result_or_raise(lambda texts: UsageError(f"generation ended, since {_first(axis.ranks, texts)}"))

    @contextmanager
    def _turn(self) -> Iterator[Generator]:
        """Context of one call of all ranks: weights are gathered once, and pages given back, if the JSON says so."""
        if self._state.window.seen:
            log_once("generation between two micro-batches of an update: weights are those of the last update")
        generator, keys = self.generator, self._state.ds_config.top.hybrid_engine
        begun = gathered = time.perf_counter()
        try:
            if (keys.enabled and keys.pin_parameters) or not generator.weights.read_alone():
                generator.weights.pin()
            gathered = time.perf_counter()
            yield generator
        finally:
            generator.weights.unpin()
            if keys.enabled and keys.release_inference_cache:
                generator.release_cache()
            self.seconds["gather"] += gathered - begun
            self.seconds["generate"] += time.perf_counter() - gathered

    def rollout(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None, n: int = 1
    ) -> list[Rollout]:
        """Generate `n` answers to each prompt, with their log-probabilities and the version of the weights.

        All ranks call this, each with prompts of its own; a rank may have none.

        Args:
            prompts: tokens of each prompt.
            sampling: options of all of them; without `seed`, a seed is drawn from torch's generator. None: greedy, at
                most 128 tokens.
            n: number of answers to each prompt.

        Returns:
            Answers, those of one prompt one after the other.

        Raises:
            RequestError: a prompt or an option is not possible.
            LengthError: a prompt and its answer exceed the model's context.
            UsageError: another rank failed, and ranks gather weights together.
        """
        from deepspeed.inference.sampling_params import SamplingParams
        from deepspeed.rollouts.generation import check_scores_kept

        options = sampling or SamplingParams()

        def answers() -> list[Rollout]:
            check_scores_kept(options)
            return self._answers(prompts, options, n)

        return self._together(answers)

    def _answers(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, n: int, logprobs: bool = True
    ) -> list[Rollout]:
        from dataclasses import replace

        from deepspeed.rollouts.generation import generate_rollouts

        if sampling.temperature and sampling.seed is None:
            sampling = replace(sampling, seed=self._seed())
        with self._turn() as generator:
            answers = generate_rollouts(generator, prompts, sampling, n, logprobs)
        self.sequences += len(answers)
        return answers

    def _seed(self) -> int:
        """Return a seed from torch's generator, the same on all ranks that run one model together."""
        seed, mesh = torch.randint(2**62, ()), self._state.axes.mesh
        if mesh.sizes["tp"] > 1:
            seed = seed.to(self._state.device)
            broadcast_tensors(mesh.axis("tp"), [seed], "seed of rollouts")
        return int(seed)

    def score(self, sequences: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[torch.Tensor]:
        """Return the log-probability of each token of the sequences but the first, fp32 [length - 1] each.

        All ranks call this. For the weights that have drawn a token with the same sampling, the bits are the same.

        Args:
            sequences: tokens of each sequence.
            sampling: its temperature and truncation count; None: the model's own probabilities.

        Raises:
            RequestError: a token is outside of the vocabulary.
            LengthError: a sequence exceeds the model's context.
            UsageError: another rank failed, and ranks gather weights together.
        """
        from deepspeed.rollouts.generation import score_sequences

        def scores() -> list[torch.Tensor]:
            with self._turn() as generator:
                return score_sequences(generator, sequences, sampling)

        return self._together(scores)

    def generate(self, own: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        """Answer a call of `generate`; `own` is the module's method, for calls that a generator cannot answer."""
        with torch.no_grad():
            if self._state.sliced:
                result: Any = "its layers or experts are divided among ranks"
            else:
                result = self._together(lambda: self._answered(inputs, kwargs))
            if isinstance(result, str):
                warn_once(f"generate goes through {type(self._state.module).__name__}'s own: {result}")
                return own(*inputs, **kwargs)
        return result

    def _answered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of `generate`, or the reason why it is left to the module's own method."""
        from deepspeed.inference.native_generate import CallReader

        if (generator := self.generator).kind == "generate":
            return generator.why
        call = CallReader(generator.model, draws=True).read(inputs, kwargs)
        if isinstance(call, str):
            return call
        answers = self._answers(call.prompts, call.sampling, call.samples, logprobs=False)
        return call.result([answer.tokens for answer in answers])

    def close(self) -> None:
        """Free the cache of the generator."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None


def _first(ranks: Sequence[int], texts: Sequence[str]) -> str:
    return next(f"rank {rank} failed: {text}" for rank, text in zip(ranks, texts, strict=True) if text)
