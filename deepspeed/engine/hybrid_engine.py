"""Generation by an engine in training over its own weights: rollouts, scores, `generate` (block `hybrid_engine`)."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import LengthError, UsageError
from deepspeed.foundation.log import log_once, log_rank0, warn_once

if TYPE_CHECKING:  # Transformers is an optional dependency, imported at first use
    from deepspeed.inference.generator import Generator
    from deepspeed.inference.sampling_params import SamplingParams
    from deepspeed.rollouts.generation import Rollout


class Generation:
    """Generation over the weights of an engine: at stages 0 to 2 where they lie, at stage 3 gathered.

    With `hybrid_engine.pin_parameters` (the default of an enabled block) stage 3 gathers the whole model once for a
    call, else layer by layer. Ranks generate by themselves and may end apart; all ranks make the same calls.

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
        """Generator over the engine's model, made at the first call. All ranks call this."""
        from deepspeed.inference.generator import Generator

        if self._generator is None:
            keys = self._state.ds_config.top.hybrid_engine
            limit = keys.max_out_tokens if "max_out_tokens" in keys.model_fields_set else None
            self._generator = Generator(self._state.module)
            own = self._generator.limit
            self._generator.limit = own if limit is None else limit if own is None else min(own, limit)
        return self._generator

    @property
    def weights_version(self) -> int:
        """Number of changes of the weights so far, as far as a call has seen them; equal numbers mean equal weights."""
        return self.generator.weights_version

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
        """
        from dataclasses import replace

        from deepspeed.inference.sampling_params import SamplingParams
        from deepspeed.rollouts.generation import generate_rollouts

        sampling = sampling or SamplingParams()
        if sampling.temperature and sampling.seed is None:
            sampling = replace(sampling, seed=int(torch.randint(2**62, ())))
        with self._turn() as generator:
            answers = generate_rollouts(generator, prompts, sampling, n)
        self.sequences += len(answers)
        return answers

    def score(self, sequences: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[torch.Tensor]:
        """Return the log-probability of each token of the sequences but the first, fp32 [length - 1] each.

        All ranks call this. For the weights that have drawn a token with the same sampling, the bits are the same.

        Args:
            sequences: tokens of each sequence.
            sampling: its temperature and truncation count; None: the model's own probabilities.

        Raises:
            RequestError: a token is outside of the vocabulary.
            LengthError: a sequence exceeds the model's context.
        """
        from deepspeed.rollouts.generation import score_sequences

        with self._turn() as generator:
            return score_sequences(generator, sequences, sampling)

    def generate(self, own: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        """Answer a call of `generate`; `own` is the module's method, for calls that a generator cannot answer."""
        from deepspeed.inference.native_generate import CallReader

        with torch.no_grad():
            generator = self.generator
            call = CallReader(generator.model, generator.vocabulary, draws=True).read(inputs, kwargs)
            if generator.kind == "generate":
                call = generator.why
            if isinstance(call, str):
                warn_once(f"generate goes through {type(self._state.module).__name__}'s own: {call}")
                return own(*inputs, **kwargs)
            longest = call.ids.shape[1] + call.sampling.max_new_tokens
            if generator.limit is not None and longest > generator.limit:
                raise LengthError(
                    f"prompts of {call.ids.shape[1]} tokens and {call.sampling.max_new_tokens} new ones are {longest}, "
                    f"over the limit of {generator.limit} (of the model, or hybrid_engine.max_out_tokens)"
                )
            answers = self.rollout(call.prompts, call.sampling, call.samples)
        return call.result([answer.tokens for answer in answers])

    def close(self) -> None:
        """Free the cache of the generator."""
        if self._generator is not None:
            self._generator.close()
            self._generator = None


class GenerateMethod:
    """`generate` of a module that an engine trains; a copy or pickle of the module has its class's own method.

    Args:
        module: the module.
        generation: generation of its engine.
    """

    def __init__(self, module: nn.Module, generation: Generation) -> None:
        self._module, self._generation = module, generation

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._generation.generate(_own_generate(self._module), *inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own_generate(memo.get(id(self._module), self._module))

    def __reduce__(self) -> Any:
        return _own_generate, (self._module,)


def _own_generate(module: Any) -> Any:
    return types.MethodType(type(module).generate, module)


class HybridMethods:
    """Methods of an engine with the block `hybrid_engine` enabled; see `DeepSpeedHybridEngine`."""

    _generation: Generation
    module: Any

    def _begin_hybrid(self) -> None:
        if not callable(getattr(type(self.module), "generate", None)):
            raise UsageError(f"hybrid_engine: {type(self.module).__name__} has no generate; leave the block out")
        vars(self.module)["generate"] = GenerateMethod(self.module, self._generation)
        self._evaluations, self._trained_since = 0, time.perf_counter()

    def _end_hybrid(self) -> None:
        vars(self.module).pop("generate", None)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Generate tokens with the engine's weights; arguments and result as those of Transformers' `generate`.

        All ranks call this. Greedy and drawn calls are answered by a generator, whose random numbers are not those that
        Transformers would draw; other calls (such as beam search) go through the model's own `generate`, said once.

        Raises:
            LengthError: prompt and answer exceed the model's context or `max_out_tokens`.
        """
        return self.module.generate(*inputs, **kwargs)

    def note_evaluation(self) -> None:
        """Log where the time since the last call of `eval` went, from the second call on."""
        now = time.perf_counter()
        if self._evaluations:
            total, times = now - self._trained_since, self._generation.seconds
            other = max(total - times["generate"] - times["gather"], 0.0)
            rate = self._generation.sequences / total if total else 0.0
            log_rank0(
                f"|E2E latency={total:.2f}s |Gather latency={times['gather']:.2f}s "
                f"|Generate time={times['generate']:.2f}s |Training time and others={other:.2f}s "
                f"|CurSamplesPerSec={rate:.2f}"
            )
        self._evaluations += 1
        self._trained_since = now
        self._generation.seconds = {"generate": 0.0, "gather": 0.0}
        self._generation.sequences = 0

    def fuse_lora_weight(self) -> None:
        """Accepted without effect: LoRA's changes are added on the fly, and the weights keep every bit."""
        log_once("fuse_lora_weight has no effect: LoRA is added on the fly, so weights keep every bit")

    unfuse_lora_weight = unfuse_lora_weight_non_pinned = fuse_lora_weight
