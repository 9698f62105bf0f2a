"""Generator: continuous batching of many requests on one model, by `submit` and `step`."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import psutil
import torch
from torch import nn

from deepspeed.errors import LengthError, RequestError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.foundation.transformers_model import vocabulary_size
from deepspeed.inference.adapters import AdapterRegistry, LoraAdapter, by_adapter
from deepspeed.inference.async_scheduling import LaunchedPass, PassAhead, holds
from deepspeed.inference.beam_search import BeamGroup, BeamSearch
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.device_sampling import launch_pass
from deepspeed.inference.draft_model import DraftModel, NgramProposer, Proposer, drafting
from deepspeed.inference.executors.captured import capture_passes, drop_graphs, graph_counts
from deepspeed.inference.executors.engine_weights import trained_model
from deepspeed.inference.executors.hf_generate import Thread
from deepspeed.inference.executors.native_tensors import largest
from deepspeed.inference.executors.ragged_batch import BatchSlice
from deepspeed.inference.executors.select import (
    device_of,
    exclusive_pass,
    packable,
    resize_cache,
    select_executor,
    settle_attention,
    warn_of,
    why_not_adapted,
    why_not_batchable,
)
from deepspeed.inference.kv_cache import BlockPool
from deepspeed.inference.live_sequence import LiveSequence
from deepspeed.inference.prompt_rows import check_rows, check_tokens, pool_alone, score_alone
from deepspeed.inference.request import EngineStats, Output, Request, end_tokens, length_limit, packed_limit
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.inference.scheduler import Scheduler, SequenceGroup
from deepspeed.inference.structured_output import ConstraintCompiler
from deepspeed.inference.trained_lora import watched_weights

__all__ = ["Generator", "EngineStats", "Load", "why_not_batchable", "packable"]

SHARE_OF_MEMORY, LARGEST_CACHE = 0.25, 4 << 30  # default limit of the cache in bytes
CHUNK = (16, 128)  # prompt rows beside decoding ones, for each prompt and of all: a pass takes three times as long
DEVICE_CHUNK = (512, 2048)  # the same on a GPU, which computes some hundred rows while it reads the weights
DRAFTING_STREAMS = 8  # with drafts: more sequences make a pass compute-bound, and a draft as expensive as a token

Load = EngineStats  # former name, still importable


class Generator:
    """Generator of tokens for many requests at once, in batched passes over a paged KV cache; methods are thread-safe.

    A model may have several generators, and other code may use it between passes. If no executor can batch the model,
    requests run the model's own `generate`; then `kind` is "generate" and `why` is the reason. Single requests above
    `packed_limit` tokens do the same.

    Args:
        model: a causal LM of Transformers, or another `nn.Module` with `config` and `generate`.
        tokenizer: only needed for stop strings and structured output.
        cache_bytes: size of the KV cache; None: enough for all sequences, but at most 4 GiB and a quarter of the free
            memory. On a CPU, pages use memory only once they are written.
        page_size: tokens per page.
        max_batch_tokens: maximum number of tokens in a pass, over all sequences.
        max_sequences: maximum number of running sequences.
        max_length: maximum number of tokens of prompt and answer together; None: the model's own limit.
        prefix_cache: reuse the KV cache of earlier requests with the same first tokens.
        speculation: maximum number of draft tokens per sequence and pass; 0: no speculative decoding. The output does
            not change.
        draft_model: causal LM with the same vocabulary that proposes the draft tokens, with a KV cache of as many
            pages; None: n-gram lookup.
        prompt_chunk: maximum number of prompt tokens in a pass with decoding sequences; None: 16 for each sequence that
            waits for its first token, at least twice the decoding ones, at most 128 (on a GPU 512 each, at most 2,048).
        lossless_weights: pack bf16 matrices in 12 bits, **in the model**, if it has a native form: a quarter less
            memory and faster; weights, logits and `state_dict` keep every bit. Only for weights that are not trained.
        adapters: folders of LoRA adapters by name, as for `add_adapter`.
        batch_invariant: on a GPU, multiply rows in blocks of one size, so that other requests of a pass do not change a
            bit of a request's logits, as in native passes on a CPU; prompts take longer.
        cuda_graphs: on a GPU, capture passes of next tokens as CUDA graphs where they run by kernels alone: at the
            start, by padded number of sequences, at most 12. Other passes, and all passes on a CPU, run eagerly.

    Raises:
        RequestError: a size is below 1, max_length is below 2 or above the model's limit, cache_bytes is less than
            one page, or draft_model has another vocabulary or no speculation to serve.
        ArgumentError: lossless_weights with a model that is being trained.
        CheckpointError: files of an adapter are missing or damaged, or do not fit the model.
        NotAvailableError: the model's experts are divided among ranks, draft_model cannot be batched, or an adapter is
            not supported.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tokenizer: Any = None,
        cache_bytes: int | None = None,
        page_size: int = 16,
        max_batch_tokens: int = 768,
        max_sequences: int = 512,
        max_length: int | None = None,
        prefix_cache: bool = True,
        speculation: int = 0,
        draft_model: nn.Module | None = None,
        prompt_chunk: int | None = None,
        lossless_weights: bool = False,
        adapters: Mapping[str, str | Path] | None = None,
        batch_invariant: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        sizes = {"page_size": page_size, "max_batch_tokens": max_batch_tokens, "max_sequences": max_sequences}
        for name, size in (sizes if prompt_chunk is None else sizes | {"prompt_chunk": prompt_chunk}).items():
            if type(size) is not int or size < 1:
                raise RequestError(f"{name} has to be at least 1, not {size!r}")
        say_untested()
        model = trained_model(model)
        self.model, self.tokenizer, self._speculation = model, tokenizer, speculation
        own = length_limit(model)
        if max_length is not None and (max_length < 2 or (own is not None and max_length > own)):
            raise RequestError(f"max_length {max_length} has to be from 2 to the model's own limit of {own} tokens")
        self.limit = own if max_length is None else max_length
        self.vocabulary, self._packed_limit = vocabulary_size(model, decoder=True), packed_limit(model)
        self._ends = end_tokens(model)
        self.constraints = ConstraintCompiler(tokenizer, self.vocabulary)
        self._lossless, self._invariant, self._cuda_graphs = lossless_weights, batch_invariant, cuda_graphs
        self._sizes = page_size, cache_bytes, max_batch_tokens, max_sequences, prefix_cache, prompt_chunk
        self._choose_executor()
        self._draft = self._make_draft(draft_model, lossless_weights)
        self._drafts = self._accepted_drafts = 0
        self._groups: WeakValueDictionary[Hashable, SequenceGroup] = WeakValueDictionary()
        self._draft_groups: WeakKeyDictionary[SequenceGroup, SequenceGroup] = WeakKeyDictionary()
        self._live: dict[Hashable, LiveSequence] = {}
        self._fallback_requests: dict[Hashable, LiveSequence] = {}  # requests that run `generate`
        # Their threads wait and hold the model; a finalizer ends them with the generator.
        weakref.finalize(self, self._end_threads, self._fallback_requests).atexit = False
        self._ready: list[Output] = []
        self._arrivals = 0
        self._lock = threading.RLock()
        self._closed = False
        self.weights = watched_weights(model)
        self._weights_seen = self.weights.version, self.weights.switches
        self._adapters = AdapterRegistry(model, functools.partial(why_not_adapted, self._executor))
        for name, folder in (adapters or {}).items():
            self.add_adapter(name, folder)

    def _choose_executor(self) -> None:
        """Select the executor, allocate its cache, and create the scheduler."""
        page_size, cache_bytes, max_batch_tokens, max_sequences, prefix_cache, chunk = self._sizes
        chunk = chunk or (CHUNK if device_of(self.model).type == "cpu" else DEVICE_CHUNK)
        self._executor, self.why = select_executor(self.model, packed=self._lossless)
        self.kind = "generate" if self._executor is None else self._executor.kind
        warn_of(self.model, self._executor, self.why)
        self._dtype = next((param.dtype for param in self.model.parameters() if param.is_floating_point()), None)
        self.pages = BlockPool(self._make_store(page_size, cache_bytes, max_sequences), page_size, prefix_cache)
        self._executor = settle_attention(self._executor, page_size, self._invariant)
        self._scheduler = Scheduler(
            self.pages, lambda old, new: self._executor.store.copy(old, new), max_batch_tokens, max_sequences, chunk
        )
        self._ahead = PassAhead(self._scheduler)
        if self._cuda_graphs:
            most, length = min(max_sequences, max_batch_tokens), self.packed_length or 0
            capture_passes(self._executor, most, length, self._speculation, DRAFTING_STREAMS)

    def _make_store(self, page_size: int, cache_bytes: int | None, sequences: int) -> int:
        """Allocate the executor's KV cache, RequestError if too small; return its pages (1 without executor)."""
        if self._executor is None:
            return 1
        probed = self._executor.store
        each = probed.bytes_per_page() // probed.size * page_size
        if cache_bytes is None:
            room = min(LARGEST_CACHE, int(psutil.virtual_memory().available * SHARE_OF_MEMORY))
            length = self.limit if self.limit is not None else room
            pages = max(1, min(room // each, sequences * -(-length // page_size)))
        elif cache_bytes < each:
            raise RequestError(f"cache_bytes {cache_bytes} are less than one page of {page_size} tokens, {each} bytes")
        else:
            pages = cache_bytes // each
        return resize_cache(self._executor, pages, page_size)

    def _make_draft(self, model: nn.Module | None, lossless_weights: bool) -> DraftModel | None:
        if model is None:
            return None
        if not self._speculation:
            raise RequestError("draft_model needs speculation, the number of tokens that it proposes, at least 1")
        sizes = self._scheduler.max_tokens, self._scheduler.max_sequences
        return DraftModel(model, self.model, self.pages, *sizes, lossless_weights)

    @staticmethod
    def _end_threads(fallback_requests: dict[Hashable, LiveSequence]) -> None:
        for sequence in fallback_requests.values():
            if sequence.thread is not None:
                sequence.thread.let_go()

    def submit(self, request: Request) -> None:
        """Queue a request; later calls of `step` return its tokens.

        Raises:
            RequestError: the prompt is empty, a token of the prompt or of the options is outside of the vocabulary, the
                ident is in use, stop strings have no tokenizer, the group has another prompt or adapter, there are
                more beams than sequences may run, beams or an adapter of a request that runs the model's own
                `generate`, the adapter is unknown, a constraint cannot be compiled, or the model gives no
                embeddings or scores of prompts.
            LengthError: prompt and answer exceed the limit of the generator or of the cache; also a RequestError.
            UsageError: the generator is closed.
        """
        tokens, sampling = list(request.tokens), request.sampling
        matcher = None  # made before the lock: other requests go on while it is compiled
        if sampling.structured is not None and not request.pooling:
            matcher = self.constraints.matcher(sampling.structured, tokens)
        with self._lock:
            if self._closed:
                raise UsageError("the generator is closed")
            if not self._live:
                self._prepare()
            self._check(request, tokens)
            length = len(tokens) + (0 if request.pooling else sampling.max_new_tokens)
            alone = self._executor is None or (self._packed_limit is not None and length > self._packed_limit)
            if alone and sampling.beams > 1:
                raise RequestError("beams are not available for this request, which runs the model's own generate")
            if not alone and not self._scheduler.fits(length, sampling.beams, len(tokens)):
                room, beams = self.pages.count * self.pages.size, f" in {sampling.beams} beams"
                raise LengthError(
                    f"prompt and new tokens are {length}{beams if sampling.beams > 1 else ''}, over the {room} tokens "
                    "that the cache has room for; raise cache_bytes or ask for fewer"
                )
            if alone and request.adapter is not None:
                raise RequestError(
                    f"adapter {request.adapter!r}: over {self._packed_limit} tokens a request goes through the model's "
                    "own generate, which has no adapters"
                )
            stream = None
            if sampling.stop and not request.pooling:
                stream = TextStream(self.tokenizer, sampling.stop, tokens, min_tokens=sampling.min_new_tokens)
            sequence = LiveSequence(request, tokens, self._arrivals, self._ends, stream, matcher)
            if (adapter := self._adapters.get(request.adapter)) is not None:
                sequence.adapter, sequence.root = adapter, adapter.root
            self._join_group(sequence, request.group)
            self._arrivals += 1
            self._live[request.ident] = sequence
            if alone:
                if self._executor is not None:
                    warn_once(
                        f"{type(self.model).__name__}: over {self._packed_limit} tokens a request changes how all "
                        f"positions are rotated, so such requests are not batched but go through its own generate"
                    )
                choose = functools.partial(LiveSequence.take_in_thread, weakref.ref(sequence))
                sequence.thread = Thread(self.model, sequence.tokens, sampling.max_new_tokens, choose)
                self._fallback_requests[request.ident] = sequence
            else:
                sequence.proposer = None if request.pooling else self._proposer(sequence)
                self._scheduler.add(sequence)

    def _join_group(self, sequence: LiveSequence, name: Hashable | None) -> None:
        """Set the group of a new sequence; RequestError if its other requests have another prompt or adapter."""
        if sequence.sampling.beams > 1:
            stops = frozenset(sequence.sampler.stops)
            search = BeamSearch(sequence.sampling, stops, sequence.stream)
            sequence.group = sequence.beams = BeamGroup(search, sequence)
        elif name is not None:
            group = self._groups.get(name)
            if group is None or not group.members:
                group = self._groups[name] = SequenceGroup(len(sequence.tokens))
            else:
                other = group.members[0]
                if other.tokens[: group.common] != sequence.tokens or other.adapter is not sequence.adapter:
                    raise RequestError(f"the requests of the group {name!r} have to have the same prompt and adapter")
            sequence.group = group

    def _proposer(self, sequence: LiveSequence) -> Proposer | None:
        if not self._speculation or sequence.beams is not None:
            return None
        if self._draft is None:
            return NgramProposer(self._speculation)
        group = None
        if sequence.group is not None:
            group = self._draft_groups.setdefault(sequence.group, SequenceGroup(sequence.group.common))
        return self._draft.proposer(sequence, self._speculation, group)

    def step(self) -> list[Output]:
        """Admit waiting requests and run a forward pass; up to `max_sequences` requests on `generate` run for a token.

        Returns:
            New tokens of each request that has any, and the last outputs of finished, failed or cancelled requests.
        """
        with self._lock:
            weights = self.weights
            if self._live and (weights.changed() or (weights.known_version, weights.switches) != self._weights_seen):
                raise UsageError(
                    f"the weights, or the adapters in use, have changed while {len(self._live)} requests are under "
                    "way, so their answers would mix two versions: finish or cancel requests before the next update"
                )
            outputs, self._ready = self._ready, []
            try:
                with exclusive_pass(self.model):
                    if not self._scheduler.idle:
                        outputs += self._packed_step()
                    for sequence in self._alone():
                        outputs.append(self._generate_step(sequence))
            except BaseException:
                self._ready = outputs  # outputs of other requests, for the next step
                raise
            return outputs

    def _alone(self) -> list[LiveSequence]:
        """Return the requests on `generate` that run in this step, the first ones by rank."""
        most, live = self._scheduler.max_sequences, self._fallback_requests.values()
        return sorted(live, key=lambda sequence: sequence.rank)[:most] if live else []

    def cancel(self, ident: Hashable) -> bool:
        """End a request and free its pages; the next `step` returns its last output, with the reason "cancelled".

        Returns:
            False if no unfinished request has this id.
        """
        with self._lock:
            sequence = self._live.get(ident)
            if sequence is None:
                return False
            sequence.reason = "cancelled"
            self._ready.append(sequence.output())
            self._forget(sequence)
            return True

    def cancel_all(self) -> list[Hashable]:
        """Cancel all unfinished requests and drop their outputs; returns their ids."""
        with self._lock:
            idents = list(self._live)
            for ident in idents:
                self.cancel(ident)
            self._ready = [output for output in self._ready if output.ident not in idents]
            return idents

    @property
    def packed_length(self) -> int | None:
        """Maximum number of tokens of a request in shared passes, by its rotation and the cache.

        None if requests go through the model's own `generate`.
        """
        if self._executor is None:
            return None
        lengths = (self.limit, self._packed_limit, self.pages.count * self.pages.size)
        return min(length for length in lengths if length is not None)

    @property
    def idle(self) -> bool:
        """Whether no request is unfinished and no output is pending."""
        return not self._live and not self._ready

    def load(self) -> EngineStats:
        with self._lock:
            alone = min(len(self._fallback_requests), self._scheduler.max_sequences)
            running = len(self._scheduler.running) + alone
            waiting = len(self._scheduler.waiting) + len(self._fallback_requests) - alone
            scheduler, pages = self._scheduler, self.pages
            counts = scheduler.preemptions, scheduler.looked_up, scheduler.reused, self._drafts, self._accepted_drafts
            return EngineStats(running, waiting, pages.available, pages.count, *counts, *graph_counts(self._executor))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[list[int]]:
        """Generate an answer to each prompt. Other running requests continue; their outputs come from the next `step`.

        Args:
            prompts: token ids of each prompt.
            sampling: options for all prompts; None: greedy, at most 128 new tokens.

        Returns:
            New tokens for each prompt, including the end token.

        Raises:
            RequestError: as in `submit`, or the logits of a prompt are not finite.
            UsageError: the generator is closed.
            Exception: an error of the tokenizer, or of the model's own `generate`.
        """
        requests = [Request(object(), prompt, sampling or SamplingParams()) for prompt in prompts]
        return [[token for output in outputs for token in output.tokens] for outputs in self.run(requests)]

    def run(self, requests: Sequence[Request]) -> list[list[Output]]:
        """Run requests to their end and return the outputs of each. Other requests and errors as in `generate`."""
        outputs: dict[Hashable, list[Output]] = {request.ident: [] for request in requests}
        others: list[Output] = []
        with self._lock:
            try:
                for request in requests:
                    self.submit(request)
                sequences = {ident: self._live[ident] for ident in outputs}
                while any(ident in self._live for ident in outputs):
                    for output in self.step():
                        outputs.get(output.ident, others).append(output)
                        if output.ident in outputs and output.error is not None:
                            raise sequences[output.ident].failure or RequestError(output.error)
            finally:
                for ident in outputs:
                    self.cancel(ident)
                self._ready = others + [output for output in self._ready if output.ident not in outputs]
        return list(outputs.values())

    @property
    def weights_version(self) -> int:
        """Number of changes of the weights that were noticed; several between two calls count once."""
        with self._lock:
            return self._follow_weights()

    def _prepare(self) -> None:
        """Before the first of several requests: follow changes of the weights, and take the cache's memory again."""
        self._follow_weights()
        if self._executor is not None and self._executor.store.pages < self.pages.count:
            self._executor.store = self._executor.store.resized(self.pages.count, self.pages.size)

    def _follow_weights(self) -> int:
        """Return the version of the weights; drop what the cache holds of earlier ones."""
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)
        if hasattr(self._executor, "look") and not self._live and dtype == self._dtype:
            with exclusive_pass(self.model):  # replaced forwards that change training alone count by the mode
                self._executor.look()  # it may move weights in memory, which counts as a change
        version, switches = self.weights.version, self.weights.switches
        if (version, switches) != self._weights_seen and not self._live:
            self._weights_seen = version, switches
            if (size := vocabulary_size(self.model, decoder=True)) != self.vocabulary:  # by resize_token_embeddings
                self.vocabulary, self.constraints = size, ConstraintCompiler(self.tokenizer, size)
            if dtype != self._dtype and self._executor is not None and self._draft is None:
                self._choose_executor()  # an engine has cast the model, whose cache gets its dtype
                self._adapters = AdapterRegistry(self.model, functools.partial(why_not_adapted, self._executor))
            self.refresh()
        return version

    def refresh(self) -> None:
        """Empty the prefix cache. Changes of the model's weights empty it by themselves.

        Raises:
            UsageError: requests are unfinished.
        """
        with self._lock:
            if self._live:
                raise UsageError(f"{len(self._live)} requests are under way; weights change between them")
            self.pages.forget_all()
            if self._draft is not None:
                self._draft.pages.forget_all()

    @property
    def adapters(self) -> dict[str, LoraAdapter]:
        """Loaded adapters by name."""
        return dict(self._adapters.loaded)

    def add_adapter(self, name: str, folder: str | Path, max_rank: int | None = None) -> LoraAdapter:
        """Load a LoRA adapter from a folder of PEFT, for requests with `adapter=name`; other requests go on after it.

        Args:
            name: its name in requests.
            folder: folder of `adapter_config.json` and `adapter_model.safetensors`.
            max_rank: largest rank that is accepted; None: any.

        Raises:
            RequestError: the name is in use.
            CheckpointError: the files are missing or damaged, or do not fit the model.
            NotAvailableError: the adapter, or the model with it, needs something that is not supported.
            UsageError: the generator is closed.
        """
        with self._lock:
            if self._closed:
                raise UsageError("the generator is closed")
            return self._adapters.add(name, folder, max_rank)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter: later requests cannot use it, current ones finish with it. RequestError if unknown."""
        with self._lock:
            self.pages.forget_tree(self._adapters.remove(name).root)

    def release_cache(self) -> None:
        """Give the memory of the KV cache back; the next request takes it again. UsageError while requests run."""
        with self._lock:
            self.refresh()
            if self._executor is not None:
                self._executor.store = self._executor.store.resized(0, self.pages.size)
                drop_graphs(self._executor)

    def close(self) -> None:
        """Cancel the unfinished requests and free the KV cache; later calls of `submit` raise UsageError."""
        with self._lock:
            for ident in list(self._live):
                self.cancel(ident)
            self._closed = True
            if self._executor is not None:
                self._executor.store.layers.clear()
                drop_graphs(self._executor)
            if self._draft is not None:
                self._draft.close()

    def _check(self, request: Request, tokens: list[int]) -> None:
        new = 0 if request.pooling else request.sampling.max_new_tokens
        if request.ident in self._live:
            raise RequestError(f"request {request.ident!r} is not finished; names have to be unique")
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if self.limit is not None and len(tokens) + new > self.limit:
            raise LengthError(
                f"a prompt of {len(tokens)} tokens and {new} new ones are {len(tokens) + new}, over the limit of "
                f"{self.limit} tokens; shorten the prompt or ask for fewer"
            )
        check_tokens(tokens, request.sampling, self.vocabulary)
        if request.sampling.beams > self._scheduler.max_sequences:
            most = self._scheduler.max_sequences
            raise RequestError(f"{request.sampling.beams} beams are more than the {most} sequences that may run")
        self._adapters.get(request.adapter)
        check_rows(request, self.model)
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer; hand it to the generator")

    def _packed_step(self) -> list[Output]:
        drafts = self._speculation and sum(each.decodes for each in self._scheduler.running) <= DRAFTING_STREAMS
        if drafts and self._draft is not None:
            self._prepare_drafts(self._draft)
        if (current := self._ahead.take()) is None:
            if not (slices := by_adapter(self._scheduler.plan(self._guess if drafts else None))):
                return []
            current = LaunchedPass(slices, *launch_pass(self._executor, slices, self.pages.size))
        if not self._speculation:
            self._ahead.launch(self._executor, current)
        logits, hidden, chosen = current.logits, current.batch.hidden, current.read()
        outputs, first, row = [], 0, 0
        for rows in current.slices:
            span = slice(first, first + rows.wanted)
            if rows.hidden:
                states = None if hidden is None else hidden[row : row + len(rows.tokens)]
                outputs += self._pool(rows, states)
            elif isinstance(rows.sequence.group, BeamGroup):
                outputs += self._accept_beam(rows, logits[span], chosen[span])
            elif holds(rows):
                outputs += self._accept(rows, logits[span], chosen[span])
            first, row = first + rows.wanted, row + len(rows.tokens)
        return outputs

    def _pool(self, rows: BatchSlice, states: torch.Tensor | None) -> list[Output]:
        """Take the last hidden states of a sequence's rows, [rows, hidden size]; return its output at the end."""
        sequence = rows.sequence
        if states is None:
            sequence.fail(RequestError(f"{type(self.model).__name__} does not run its base model as a module"))
        else:
            sequence.pooled.add(states[max(sequence.own_done - rows.start, 0) :])
            self._scheduler.advance(rows, [])
            if rows.end < len(sequence.tokens):
                return []
            sequence.pool()
        self._forget(sequence)
        return [sequence.output()]

    def _prepare_drafts(self, draft: DraftModel) -> None:
        decoding = (sequence for sequence in self._scheduler.running if sequence.decodes)
        try:
            draft.prepare(drafting(decoding, self._most_drafts))
        except Exception as error:  # answers need no drafts
            reason = f"{type(error).__name__}: {error}"
            warn_once(f"the draft model failed and is not used any more, drafts come from the text itself: {reason}")
            self._draft = None
            draft.close()
            for sequence in self._live.values():
                sequence.proposer = None

    @staticmethod
    def _most_drafts(sequence: Any) -> int:
        return sequence.sampling.max_new_tokens - sequence.sampler.count - 1

    def _guess(self, sequence: Any, most: int) -> list[int]:
        proposer = getattr(sequence, "proposer", None)
        if proposer is None or (most := min(most, self._most_drafts(sequence))) <= 0:
            return []
        return sequence.sampler.valid(proposer.guess(sequence.tokens, most))

    def _accept(self, rows: BatchSlice, logits: torch.Tensor, chosen: list[int]) -> list[Output]:
        """Accept the next token of a sequence, and one more after each correct draft; return its output, if any.

        Waiting sequences of its group get their first token from the same logits.

        Args:
            rows: slice of the sequence in the last pass.
            logits: [rows with logits, vocabulary].
            chosen: token of each row, as `device_sampling.chosen_tokens`; negative if the row is not finite.
        """
        sequence, drafts = rows.sequence, rows.drafts
        begins = sequence.sampler.count == 0
        if rows.scored:
            sequence.read(logits[: rows.scored], chosen[: rows.scored])
            logits, chosen = logits[rows.scored :], chosen[rows.scored :]
        if sequence.reason is None and chosen and not sequence.sampling.max_new_tokens:
            sequence.reason = "length"
        if sequence.reason is not None:
            chosen = []
        accepted = self._take(sequence, drafts, logits, chosen)
        self._scheduler.advance(rows, accepted)
        if drafts:
            self._drafts += len(drafts)
            self._accepted_drafts += max(len(accepted) - 1, 0)
            if sequence.proposer is not None:
                sequence.proposer.judge(len(drafts), len(accepted) - 1)
        outputs = sequence.outputs(accepted)
        if begins and accepted and sequence.group is not None:
            outputs += self._begin_others(sequence, logits[:1])
        if sequence.reason is not None:
            self._forget(sequence)
        return outputs

    @staticmethod
    def _take(sequence: LiveSequence, drafts: Sequence[int], logits: torch.Tensor, chosen: list[int]) -> list[int]:
        """Return the next tokens of a sequence: one, and one more after each correct draft."""
        accepted: list[int] = []
        for place, token in enumerate(chosen):
            if token < 0:
                sequence.reason = "error"
                break
            plain, drawn = sequence.sampler.plain, sequence.sampler.drawn
            try:
                accepted.append(sequence.take(None if plain or drawn else logits[place], token if plain else None))
            except Exception as error:  # errors of the tokenizer or the options
                sequence.fail(error)
                break
            if sequence.reason is not None or place == len(drafts) or drafts[place] != accepted[-1]:
                break
        sequence.sampler.drawn = []  # those after a wrong draft
        return accepted

    def _begin_others(self, source: LiveSequence, logits: torch.Tensor) -> list[Output]:
        """Begin the waiting sequences of a group on the pages of `source`, whose prompt is computed.

        Args:
            source: running sequence of the group.
            logits: logits after the prompt, [1, vocabulary].
        """
        outputs: list[Output] = []
        most: list[int] = []  # not the token of `source`, whose options may be others
        for other in [each for each in source.group.members if each in self._scheduler.waiting]:  # type: ignore[union-attr]
            if not isinstance(other, LiveSequence) or other.sampler.count or other.own_rows:
                continue  # it was preempted and needs another row, or it computes its rows itself
            if self._scheduler.fork(source, other, source.group.common):  # type: ignore[union-attr]
                most = most or largest(logits)
                accepted = self._take(other, (), logits, most)
                other.tokens += accepted
                outputs += other.outputs(accepted)
                if other.reason is not None:
                    self._forget(other)
        return outputs

    def _accept_beam(self, rows: BatchSlice, logits: torch.Tensor, chosen: list[int]) -> list[Output]:
        """Accept the logits of a beam; return the output of the request if that ends it. Arguments as in `_accept`."""
        group = rows.sequence.group
        lead = group.lead
        if lead.reason is not None:  # ended by another beam of this pass
            return []
        try:
            if any(token < 0 for token in chosen):
                lead.reason = "error"
            elif not group.take(rows, logits, self._scheduler):
                lead.take_beams()
        except Exception as error:  # errors of the tokenizer
            lead.fail(error)
        if lead.reason is None:
            return []
        self._forget(lead)
        return [lead.output()]

    def _generate_step(self, sequence: LiveSequence) -> Output:
        """Generate one token of a request that runs the model's own `generate`, and return its output."""
        try:
            if sequence.pooled is not None:
                pool_alone(self.model, sequence.tokens, sequence.pooled)
                sequence.pool()
            elif sequence.score is not None:
                score_alone(self.model, sequence.tokens, sequence.score)
            if sequence.reason is None and not sequence.sampling.max_new_tokens:
                sequence.reason = "length"
            if sequence.reason is None:
                sequence.thread.step()  # type: ignore[union-attr]
        except Exception as error:  # any error of the model's own generate concerns only this request
            sequence.fail(error)
        except BaseException:
            self._forget(sequence)
            raise
        if sequence.reason is not None:
            self._forget(sequence)
        return sequence.output()

    def _forget(self, sequence: LiveSequence) -> None:
        del self._live[sequence.ident]
        if sequence.proposer is not None:
            sequence.proposer.close()
        if sequence.thread is not None:
            sequence.thread.cancel()
            del self._fallback_requests[sequence.ident]
        else:
            for member in [sequence] if sequence.beams is None else list(sequence.beams.members):
                self._scheduler.remove(member)
        if not self._live:
            self._ahead.drop()
