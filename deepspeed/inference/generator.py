"""Generator: continuous batching of many requests on one model, by `submit` and `step`."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psutil
import torch
from torch import nn

from deepspeed.errors import LengthError, RequestError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.foundation.transformers_model import vocabulary_size
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.executors.hf_generate import Thread
from deepspeed.inference.executors.native_tensors import largest
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.executors.select import (
    device_of,
    exclusive_pass,
    packable,
    select_executor,
    warn_of,
    why_not_batchable,
)
from deepspeed.inference.kv_cache import BlockPool
from deepspeed.inference.request import Logprob, Output, Request, length_limit, packed_limit
from deepspeed.inference.sampler import Sampler
from deepspeed.inference.sampling_params import SamplingParams
from deepspeed.inference.scheduler import Scheduler, TokenSequence
from deepspeed.inference.structured_output import ConstraintCompiler, Matcher

__all__ = ["Generator", "EngineStats", "Load", "why_not_batchable", "packable"]

SHARE_OF_MEMORY, LARGEST_CACHE = 0.25, 4 << 30  # default limit of the cache in bytes
_NO_NUMBERS = (
    "after {} new tokens the model's logits are not finite, so no token can be chosen: its weights hold NaN, or this "
    "text overflows its dtype; try bf16 or fp32"
)
CHUNK = (16, 32)  # prompt rows beside decoding ones: a pass with few sequences may take at most three times as long
# Speculative decoding.
LONGEST, SHORTEST = 3, 2  # lengths of the matched n-grams
TRIAL, PAYS = 12, 0.3  # drafts before the first decision, and the acceptance rate that is needed
REST = 64  # tokens without drafts after a negative decision
DRAFTING_STREAMS = 8  # more sequences make a pass compute-bound, and a draft as expensive as a token


@dataclass(frozen=True)
class EngineStats:
    """Load of a generator: numbers of requests, of pages of the KV cache, and of preemptions so far.

    Args:
        running: requests in the batch.
        waiting: requests in the queue.
        free_pages: pages that can be allocated now (free ones, and evictable ones of the prefix cache).
        pages: all pages.
        preemptions: running requests that returned to the queue because the cache was full.
    """

    running: int
    waiting: int
    free_pages: int
    pages: int
    preemptions: int = 0


Load = EngineStats  # former name, still importable


class NgramProposer:
    """Draft proposer for one sequence: n-gram lookup in its tokens (prompt lookup decoding).

    Drafts begin with two tokens, get twice as long when all are accepted, and half as long when few are. The proposer
    pauses for `REST` tokens when too few drafts were accepted.

    Args:
        most: maximum number of draft tokens at a time.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._length = min(2, most)
        self._places: dict[tuple[int, ...], int] = {}
        self._seen = 0
        self._judged = self._held = self._resting = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return draft tokens to follow `tokens`, at most `most`; an empty list without a match, and in a pause."""
        self._learn(tokens)
        if self._resting > 0:
            self._resting -= 1
            return []
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._places.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if place is not None:
                return list(tokens[place : place + min(self._length, most)])
        return []

    def judge(self, guessed: int, held: int) -> None:
        """Record that `held` of the last `guessed` draft tokens were accepted, to decide on a pause."""
        if guessed and held == guessed:
            self._length = min(2 * self._length, self.most)
        elif 2 * held < guessed:
            self._length = max(self._length // 2, 1)
        self._judged, self._held = self._judged + guessed, self._held + held
        if self._judged >= TRIAL:
            if self._held < PAYS * self._judged:
                self._resting = REST
            self._judged = self._held = 0

    def _learn(self, tokens: Sequence[int]) -> None:
        """Index the n-grams of `tokens` that have a next token."""
        for end in range(max(self._seen, SHORTEST), len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                self._places[tuple(tokens[end - length : end])] = end
        self._seen = max(self._seen, len(tokens))


class _LiveSequence(TokenSequence):
    """State of an unfinished request: tokens, sampler, text stream, new output; `ends`: the model's end tokens."""

    def __init__(
        self,
        request: Request,
        tokens: list[int],
        arrival: int,
        ends: frozenset[int],
        stream: TextStream | None,
        matcher: Matcher | None,
    ) -> None:
        super().__init__(request.ident, tokens, arrival)
        self.sampling, self.stream = request.sampling, stream
        self.sampler = Sampler(request.sampling, self.tokens, ends, matcher)
        self.proposer: NgramProposer | None = None
        self.thread: Thread | None = None
        self.new: list[int] = []
        self.logprobs: list[Logprob] = []
        self.reason: str | None = None
        self.matched: int | str | None = None
        self.failure: Exception | None = None

    def take(self, logits: torch.Tensor | None, token: int | None = None) -> int:
        """Record and return `token`, or one sampled from `logits` [vocabulary]; set `reason` if the request ends."""
        if token is None:
            token, logprob = self.sampler.next(logits)  # type: ignore[arg-type]
            if logprob is not None:
                self.logprobs.append(logprob)
        else:
            self.sampler.note(token)
        self.new.append(token)
        if self.stream is not None:
            self.stream.push([token])
        if token in self.sampler.stops and self.sampler.count > self.sampling.min_new_tokens:
            self.reason, self.matched = "stop", token
        elif self.stream is not None and self.stream.matched is not None:
            self.reason, self.matched = "stop", self.stream.matched
        elif self.sampler.complete:
            self.reason = "stop"
        elif self.sampler.count >= self.sampling.max_new_tokens:
            self.reason = "length"
        return token

    @staticmethod
    def take_in_thread(reference: weakref.ref[_LiveSequence], row: torch.Tensor) -> int | None:
        """Call `take` in the thread of `generate`; return the token, or None if the request ends.

        Args:
            reference: the sequence, by a weak reference: a strong one would keep request and thread alive.
            row: logits [vocabulary].
        """
        sequence = reference()
        if sequence is None:
            return None
        if not row.amax().isfinite():
            sequence.reason = "error"
            return None
        token = sequence.take(row)
        return None if sequence.reason is not None else token

    def fail(self, error: Exception) -> None:
        """End this request with an error; other requests continue."""
        self.reason, self.failure = "error", error

    def output(self) -> Output:
        """Return the tokens since the last output, as an `Output`."""
        logprobs = self.logprobs if self.sampling.logprobs is not None else None
        error = None
        if self.failure is not None:
            error = f"{type(self.failure).__name__}: {self.failure}"
        elif self.reason == "error":
            error = _NO_NUMBERS.format(self.sampler.count)
        new, self.new, self.logprobs = self.new, [], []
        return Output(self.ident, new, logprobs, self.reason, self.matched, error)


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
        speculation: maximum number of draft tokens per sequence and pass (n-gram lookup); 0: no speculative decoding.
            The output does not change.
        prompt_chunk: maximum number of prompt tokens in a pass with decoding sequences; None: twice the number of
            those, but at least 16 and at most 32.
        lossless_weights: pack bf16 matrices in 12 bits, **in the model**, if it has a native form: a quarter less
            memory and faster; weights, logits and `state_dict` keep every bit. Only for weights that are not trained.

    Raises:
        RequestError: a size is below 1, max_length is below 2 or above the model's limit, or cache_bytes is less than
            one page.
        ArgumentError: lossless_weights with a model that is being trained.
        NotAvailableError: the model's experts are divided among ranks.
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
        prompt_chunk: int | None = None,
        lossless_weights: bool = False,
    ) -> None:
        sizes = {"page_size": page_size, "max_batch_tokens": max_batch_tokens, "max_sequences": max_sequences}
        for name, size in (sizes if prompt_chunk is None else sizes | {"prompt_chunk": prompt_chunk}).items():
            if type(size) is not int or size < 1:
                raise RequestError(f"{name} has to be at least 1, not {size!r}")
        say_untested()
        self.model, self.tokenizer, self._speculation = model, tokenizer, speculation
        own = length_limit(model)
        if max_length is not None and (max_length < 2 or (own is not None and max_length > own)):
            raise RequestError(f"max_length {max_length} has to be from 2 to the model's own limit of {own} tokens")
        self.limit = own if max_length is None else max_length
        self.vocabulary, self._packed_limit = vocabulary_size(model, decoder=True), packed_limit(model)
        self._ends = self._end_tokens(model)
        self.constraints = ConstraintCompiler(tokenizer, self.vocabulary)
        self._executor, self.why = select_executor(model, packed=lossless_weights)
        self.kind = "generate" if self._executor is None else self._executor.kind
        warn_of(model, self._executor, self.why)
        self.pages = BlockPool(self._make_store(page_size, cache_bytes, max_sequences), page_size, prefix_cache)
        self._scheduler = Scheduler(self.pages, self._copy, max_batch_tokens, max_sequences, prompt_chunk or CHUNK)
        self._live: dict[Hashable, _LiveSequence] = {}
        self._fallback_requests: dict[Hashable, _LiveSequence] = {}  # requests that run `generate`
        # Their threads wait and hold the model; a finalizer ends them with the generator.
        weakref.finalize(self, self._end_threads, self._fallback_requests).atexit = False
        self._ready: list[Output] = []
        self._arrivals = 0
        self._lock = threading.RLock()
        self._closed = False

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
        self._executor.store = probed.resized(pages, page_size)
        return pages

    @staticmethod
    def _end_tokens(model: Any) -> frozenset[int]:
        """Return the end tokens of the model's generation config or, if it has none, of its config."""
        for source in (getattr(model, "generation_config", None), getattr(model, "config", None)):
            ends = getattr(source, "eos_token_id", None)
            if ends is not None:
                return frozenset(ends) if isinstance(ends, (list, tuple)) else frozenset([ends])
        return frozenset()

    @staticmethod
    def _end_threads(fallback_requests: dict[Hashable, _LiveSequence]) -> None:
        for sequence in fallback_requests.values():
            if sequence.thread is not None:
                sequence.thread.let_go()

    def submit(self, request: Request) -> None:
        """Queue a request; later calls of `step` return its tokens.

        Raises:
            RequestError: the prompt is empty, a token of the prompt or of the options is outside of the vocabulary, the
                ident is in use, stop strings have no tokenizer, or a constraint cannot be compiled.
            LengthError: prompt and answer exceed the limit of the generator or of the cache; also a RequestError.
            UsageError: the generator is closed.
        """
        tokens, sampling = list(request.tokens), request.sampling
        matcher = None
        if sampling.structured is not None:  # before the lock: other requests go on while it is compiled
            matcher = self.constraints.matcher(sampling.structured, tokens)
        with self._lock:
            if self._closed:
                raise UsageError("the generator is closed")
            self._check(request, tokens)
            length = len(tokens) + sampling.max_new_tokens
            alone = self._executor is None or (self._packed_limit is not None and length > self._packed_limit)
            if not alone and not self._scheduler.fits(length):
                room = self.pages.count * self.pages.size
                raise LengthError(
                    f"prompt and new tokens are {length}, over the {room} tokens that the cache has room for; raise "
                    "cache_bytes or ask for fewer"
                )
            stream = None
            if sampling.stop:
                stream = TextStream(self.tokenizer, sampling.stop, tokens, min_tokens=sampling.min_new_tokens)
            sequence = _LiveSequence(request, tokens, self._arrivals, self._ends, stream, matcher)
            self._arrivals += 1
            self._live[request.ident] = sequence
            if alone:
                if self._executor is not None:
                    warn_once(
                        f"{type(self.model).__name__}: over {self._packed_limit} tokens a request changes how all "
                        f"positions are rotated, so such requests are not batched but go through its own generate"
                    )
                choose = functools.partial(_LiveSequence.take_in_thread, weakref.ref(sequence))
                sequence.thread = Thread(self.model, sequence.tokens, sampling.max_new_tokens, choose)
                self._fallback_requests[request.ident] = sequence
            else:
                sequence.proposer = NgramProposer(self._speculation) if self._speculation else None
                self._scheduler.add(sequence)

    def step(self) -> list[Output]:
        """Admit waiting requests and run a forward pass; up to `max_sequences` requests on `generate` run for a token.

        Returns:
            New tokens of each request that has any, and the last outputs of finished, failed or cancelled requests.
        """
        with self._lock:
            outputs, self._ready = self._ready, []
            try:
                with exclusive_pass(self.model):
                    if not self._scheduler.idle:
                        outputs += self._packed_step()
                    for sequence in list(islice(self._fallback_requests.values(), self._scheduler.max_sequences)):
                        outputs.append(self._generate_step(sequence))
            except BaseException:
                self._ready = outputs  # outputs of other requests, for the next step
                raise
            return outputs

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
            self._forget(sequence)
            self._ready.append(sequence.output())
            return True

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
            return EngineStats(running, waiting, self.pages.available, self.pages.count, self._scheduler.preemptions)

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
        idents = [object() for _ in prompts]
        tokens: dict[Hashable, list[int]] = {ident: [] for ident in idents}
        others: list[Output] = []
        with self._lock:
            try:
                for ident, prompt in zip(idents, prompts, strict=True):
                    self.submit(Request(ident, prompt, sampling or SamplingParams()))
                sequences = {ident: self._live[ident] for ident in idents}
                while any(ident in self._live for ident in idents):
                    for output in self.step():
                        if output.ident not in tokens:
                            others.append(output)
                            continue
                        tokens[output.ident] += output.tokens
                        if output.error is not None:
                            raise sequences[output.ident].failure or RequestError(output.error)
            finally:
                for ident in idents:
                    self.cancel(ident)
                self._ready = others + [output for output in self._ready if output.ident not in tokens]
        return [tokens[ident] for ident in idents]

    def refresh(self) -> None:
        """Empty the prefix cache; necessary after a change of the model's weights.

        Raises:
            UsageError: requests are unfinished.
        """
        with self._lock:
            if self._live:
                raise UsageError(f"{len(self._live)} requests are under way; weights change between them")
            self.pages.forget_all()

    def close(self) -> None:
        """Cancel the unfinished requests and free the KV cache; later calls of `submit` raise UsageError."""
        with self._lock:
            for ident in list(self._live):
                self.cancel(ident)
            self._closed = True
            if self._executor is not None:
                self._executor.store.layers.clear()

    def _copy(self, source: int, target: int) -> None:
        self._executor.store.copy(source, target)

    def _check(self, request: Request, tokens: list[int]) -> None:
        new = request.sampling.max_new_tokens
        if request.ident in self._live:
            raise RequestError(f"request {request.ident!r} is not finished; names have to be unique")
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if self.limit is not None and len(tokens) + new > self.limit:
            raise LengthError(
                f"a prompt of {len(tokens)} tokens and {new} new ones are {len(tokens) + new}, over the limit of "
                f"{self.limit} tokens; shorten the prompt or ask for fewer"
            )
        for token in tokens:
            whole = isinstance(token, int) and not isinstance(token, bool)
            if not whole or token < 0 or (self.vocabulary is not None and token >= self.vocabulary):
                raise RequestError(f"{token!r} in the prompt is no token of a vocabulary of {self.vocabulary}")
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(request.sampling, name) if self.vocabulary is not None else ():
                if token >= self.vocabulary:
                    raise RequestError(f"{token} in {name} is no token of a vocabulary of {self.vocabulary}")
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer; hand it to the generator")

    def _packed_step(self) -> list[Output]:
        streams = sum(sequence.decodes for sequence in self._scheduler.running)
        drafting = self._speculation and streams <= DRAFTING_STREAMS
        slices = self._scheduler.plan(self._guess if drafting else None)
        even = getattr(self._executor, "even", False)
        logits = self._executor.run(RaggedBatch(slices, self.pages.size, device_of(self.model), even))
        chosen = largest(logits) if len(logits) else []
        outputs, first = [], 0
        for rows in slices:
            span = slice(first, first + rows.wanted)
            outputs += self._accept(rows, logits[span], chosen[span])
            first += rows.wanted
        return outputs

    def _guess(self, sequence: Any, most: int) -> list[int]:
        most = min(most, sequence.sampling.max_new_tokens - sequence.sampler.count - 1)
        drafts = sequence.proposer.guess(sequence.tokens, most) if sequence.proposer is not None and most > 0 else []
        return sequence.sampler.valid(drafts)

    def _accept(self, rows: BatchSlice, logits: torch.Tensor, chosen: list[int]) -> list[Output]:
        """Accept the next token of a sequence, and one more after each correct draft; return its output, if any.

        Args:
            rows: slice of the sequence in the last pass.
            logits: [rows with logits, vocabulary].
            chosen: argmax of each row; negative if the row is not finite.
        """
        sequence, drafts = rows.sequence, rows.drafts
        accepted: list[int] = []
        for place, token in enumerate(chosen):
            if token < 0:
                sequence.reason = "error"
                break
            plain = sequence.sampler.plain
            try:
                accepted.append(sequence.take(None if plain else logits[place], token if plain else None))
            except Exception as error:  # errors of the tokenizer or the options
                sequence.fail(error)
                break
            if sequence.reason is not None or place == len(drafts) or drafts[place] != accepted[-1]:
                break
        self._scheduler.advance(rows, accepted)
        if sequence.proposer is not None and drafts:
            sequence.proposer.judge(len(drafts), len(accepted) - 1)
        if sequence.reason is not None:
            self._forget(sequence)
        return [sequence.output()] if accepted or sequence.reason is not None else []

    def _generate_step(self, sequence: _LiveSequence) -> Output:
        """Generate one token of a request that runs the model's own `generate`, and return its output."""
        try:
            sequence.thread.step()  # type: ignore[union-attr]
        except Exception as error:  # any error of the model's own generate concerns only this request
            sequence.fail(error)
        except BaseException:
            self._forget(sequence)
            raise
        if sequence.reason is not None:
            self._forget(sequence)
        return sequence.output()

    def _forget(self, sequence: _LiveSequence) -> None:
        del self._live[sequence.ident]
        if sequence.thread is not None:
            sequence.thread.cancel()
            del self._fallback_requests[sequence.ident]
        else:
            self._scheduler.remove(sequence)
