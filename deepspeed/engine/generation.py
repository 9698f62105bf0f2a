"""Generation by an engine in training over its own weights: rollouts, scores, and calls of `generate`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.same_error import raise_together, run_collectively
from deepspeed.comm.process_groups.mesh import Mesh, resolve
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import MeshError, NotAvailableError, UsageError
from deepspeed.foundation.log import log_once, warn_once

if TYPE_CHECKING:  # Transformers is an optional dependency, imported at first use
    from deepspeed.inference.generator import Generator
    from deepspeed.inference.sampling_params import SamplingParams
    from deepspeed.inference.sliced_copy import SlicedCopy
    from deepspeed.rollouts.generation import GenerationTask, Rollout

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
        self._copy: SlicedCopy | None = None  # with `inference_tp_size` above 1
        self.seconds = {"generate": 0.0, "gather": 0.0}  # since the last call of `eval`
        self.sequences = 0  # answers since then

    @property
    def generator(self) -> Generator:
        """Generator over the engine's model, made at the first call. All ranks call this.

        Raises:
            NotAvailableError: ranks have pipeline stages, parts of a sequence, or experts of their own, or Transformers
                is missing or too old.
            MeshError: `inference_tp_size` does not divide the ranks, or the engine's ranks share a model already.
            TensorParallelError: the model cannot be split over `inference_tp_size` ranks.
        """
        _need_generators()
        from deepspeed.inference.executors.engine_weights import trained_model
        from deepspeed.inference.generator import Generator
        from deepspeed.inference.request import length_limit

        if self._copy is not None and not self._copy.fits():
            self.close()
        if self._generator is None:
            divided = [dim for dim in ("pp", "sp") if self._state.axes.mesh.sizes[dim] > 1]
            if divided:
                raise NotAvailableError(f"generation by an engine whose ranks share a model by {', '.join(divided)}")
            module, keys = self._state.module, self._state.ds_config.top.hybrid_engine
            set_by_user = keys.enabled and "max_out_tokens" in keys.model_fields_set
            limits = [length_limit(trained_model(module)), keys.max_out_tokens if set_by_user else None]
            limit = min((each for each in limits if each is not None), default=None)
            graphs = keys.enabled and keys.enable_cuda_graph
            with torch.inference_mode(False):  # pages and slices are used outside of it too
                if not keys.enabled or keys.inference_tp_size == 1:
                    self._generator = Generator(module, max_length=limit, cuda_graphs=graphs)
                else:
                    self._copy = copy = self._sliced_copy(trained_model(module))
                    with copy.attached():
                        self._generator = Generator(copy.model, max_length=limit, cuda_graphs=graphs)
        return self._generator

    def check_keys(self) -> None:
        """Raise MeshError if the engine's ranks cannot generate in groups of `inference_tp_size`."""
        keys, mesh = self._state.ds_config.top.hybrid_engine, self._state.axes.mesh
        if keys.inference_tp_size == 1:
            return
        if self._state.sliced or any(mesh.sizes[dim] > 1 for dim in ("tp", "pp", "sp")):
            raise MeshError(
                "hybrid_engine.inference_tp_size is for an engine whose ranks have whole layers: this engine's ranks "
                "share layers or experts already; leave the key out"
            )
        inference_mesh_sizes(mesh.world, keys.inference_tp_size)

    def _sliced_copy(self, model: Any) -> SlicedCopy:
        """Return a copy of the model, sliced over the ranks that generate together."""
        from deepspeed.inference.sliced_copy import SlicedCopy

        keys, mesh = self._state.ds_config.top.hybrid_engine, self._state.axes.mesh
        sizes = inference_mesh_sizes(mesh.world, keys.inference_tp_size)
        return SlicedCopy(model, Mesh(sizes, mesh.ranks, mesh.device), keys.tp_gather_partition_size)

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
        return outcome.result_or_raise(lambda texts: _ended(axis.ranks, texts))

    @contextmanager
    def _turn(self) -> Iterator[Generator]:
        """Context of one call of all ranks: weights are gathered once, and pages given back, if the JSON says so."""
        if self._state.window.seen:
            log_once("generation between two micro-batches of an update: weights are those of the last update")
        generator, keys = self.generator, self._state.ds_config.top.hybrid_engine
        begun = gathered = time.perf_counter()
        try:
            if self._copy is not None:
                self._attach(self._copy)
            elif (keys.enabled and keys.pin_parameters) or not generator.weights.read_alone():
                generator.weights.pin()
            gathered = time.perf_counter()
            yield generator
        finally:
            if self._copy is not None:
                self._copy.detach()
            generator.weights.unpin()
            if keys.enabled and keys.release_inference_cache:
                generator.release_cache()
            self.seconds["gather"] += gathered - begun
            self.seconds["generate"] += time.perf_counter() - gathered

    def _attach(self, copy: SlicedCopy) -> None:
        """Give the sliced copy its weights; an error of one rank is raised on all that gather them together."""
        from deepspeed.rollouts.generation import failed_elsewhere

        if copy.weights.read_alone():
            raise_together(copy.axis, copy.attach, failed_elsewhere)
        else:
            axis = self._state.axes.everyone
            run_collectively(axis, copy.attach).result_or_raise(lambda texts: _ended(axis.ranks, texts))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _result(self, make: Callable[[], GenerationTask[T]]) -> T:
        """Return the result of the task that `make` returns; ranks that share a sliced copy run the tasks of all."""

        generator = self.generator

        def alone() -> T:
            task = make()
            if not task.requests and generator.weights.read_alone():
                return task.finish([], generator.weights_version)
            with self._turn() as ready:
                return task.run(ready)

        if (copy := self._copy) is None:
            return self._together(alone)
        from deepspeed.rollouts.generation import check_sent, failed_elsewhere

        def made() -> GenerationTask[T]:
            task = make()
            check_sent(task.requests)
            return task

        # where weights are gathered by all ranks, an error of one group is one of all
        axis = copy.axis if copy.weights.read_alone() else self._state.axes.everyone
        task = raise_together(axis, made, failed_elsewhere)
        with self._turn():
            return task.run_shared(generator, copy.axis)

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
            UsageError: another rank failed, and ranks gather weights, or generate, together.
        """
        _need_generators()
        from deepspeed.inference.sampling_params import SamplingParams
        from deepspeed.rollouts.generation import check_scores_kept, rollout_task

        options = sampling or SamplingParams()

        def task() -> GenerationTask[list[Rollout]]:
            check_scores_kept(options)
            return rollout_task(prompts, self._seeded(options), n)

        answers = self._result(task)
        self.sequences += len(answers)
        return answers

    def _seeded(self, sampling: SamplingParams) -> SamplingParams:
        """Return sampling with a seed where tokens are drawn."""
        if sampling.temperature and sampling.seed is None:
            return replace(sampling, seed=self._seed())
        return sampling

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
        _need_generators()
        from deepspeed.rollouts.generation import score_task

        return self._result(lambda: score_task(sequences, sampling))

    def generate(self, own: Callable[..., Any], *inputs: Any, **kwargs: Any) -> Any:
        """Answer a call of `generate`; `own` is the module's method, for calls that a generator cannot answer."""
        with torch.no_grad():
            if self._state.sliced:
                result: Any = "its layers or experts are divided among ranks"
            elif (missing := _missing_for_generators()) is not None:
                result = missing
            else:
                result = self._answered(inputs, kwargs)
            if isinstance(result, str):
                warn_once(f"generate goes through {type(self._state.module).__name__}'s own: {result}")
                return own(*inputs, **kwargs)
        return result

    def _answered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a call of `generate`, or the reason why it is left to the module's own method."""
        from deepspeed.inference.executors.engine_weights import trained_model
        from deepspeed.inference.native_generate import CallReader
        from deepspeed.rollouts.generation import GenerationTask, rollout_task

        if (generator := self.generator).kind == "generate":
            return generator.why

        def task() -> GenerationTask[Any]:
            call = CallReader(trained_model(self._state.module), draws=True).read(inputs, kwargs)
            if isinstance(call, str):  # the other ranks' requests may be answered all the same
                return GenerationTask([], lambda *_: call)
            rollouts = rollout_task(call.prompts, self._seeded(call.sampling), call.samples, logprobs=False)

            def finish(outputs: Any, version: int) -> Any:
                self.sequences += len(outputs)
                return call.result([answer.tokens for answer in rollouts.finish(outputs, version)])

            return GenerationTask(rollouts.requests, finish)

        return self._result(task)

    def close(self) -> None:
        """Free the cache of the generator, and slices of the weights."""
        if self._generator is not None:
            self._generator.close()
        if self._copy is not None:
            self._copy.detach()
        self._generator = self._copy = None


def _missing_for_generators() -> str | None:
    """Return what a generator cannot import here, such as modules that an old release of Transformers lacks."""
    try:
        import deepspeed.inference.generator  # noqa: F401
    except ImportError as error:
        return f"generators need Transformers, from 4.57.2 on ({error})"
    return None


def _need_generators() -> None:
    if (missing := _missing_for_generators()) is not None:
        raise NotAvailableError(f"generation by an engine in training: {missing}")


def inference_mesh_sizes(world: int, together: int) -> dict[str, int]:
    """Return the sizes of the mesh of generation by `together` neighbouring ranks.

    Raises:
        MeshError: `together` does not divide the ranks.
    """
    return resolve(world, [("tp", together, "hybrid_engine.inference_tp_size")])


def _ended(ranks: Sequence[int], texts: Sequence[str]) -> UsageError:
    from deepspeed.rollouts.generation import failed_elsewhere

    return failed_elsewhere(*next((rank, text) for rank, text in zip(ranks, texts, strict=True) if text))
