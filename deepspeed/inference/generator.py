"""Many requests, one model: submit, step, outputs."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import psutil
import torch
from torch import nn

from deepspeed.errors import RequestError, UsageError
from deepspeed.foundation.log import warn_once
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.foundation.transformers_model import vocabulary_size
from deepspeed.inference.detokenizer import StopStrings
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
from deepspeed.inference.request import Logprob, Output, Request, SamplingParams, length_limit, packed_limit
from deepspeed.inference.sampler import Sampler
from deepspeed.inference.scheduler import ScheduledTokens, Scheduler, TokenSequence
from deepspeed.inference.speculative import NgramProposer

__all__ = ["Generator", "EngineStats", "Load", "why_not_batchable", "packable"]

SHARE_OF_MEMORY, LARGEST_CACHE = 0.25, 4 << 30  # bytes of the cache where none are given
_NO_NUMBERS = (
    "after {} new tokens the model's logits are not finite, so no token can be chosen: its weights hold NaN, or this "
    "text overflows its dtype; try bf16 or fp32"
)
CHUNK = (16, 32)  # rows of prompts beside others' tokens: a pass of some streams is to take three times theirs at most
DRAFTING_STREAMS = 8  # with more of them a pass is bound by arithmetic, and a guess costs what a token costs


@dataclass(frozen=True)
class EngineStats:
    """Requests that run and wait, pages that can be taken, all pages, and preemptions so far."""

    running: int
    waiting: int
    free_pages: int
    pages: int
    preemptions: int = 0


Load = EngineStats  # the former name, still importable


@dataclass(eq=False)
class _Live:
    """A request that is not finished."""

    request: Request
    sampler: Sampler
    track: TokenSequence
    watch: StopStrings | None = None
    drafter: NgramProposer | None = None
    thread: Thread | None = None
    new: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reason: str | None = None
    matched: int | str | None = None
    failure: Exception | None = None

    def take(self, logits: torch.Tensor | None, token: int | None = None) -> int:
        """Choose a token (or note the one chosen by its plain rule), and see whether it ends the request."""
        if token is None:
            token, logprob = self.sampler.next(logits)  # type: ignore[arg-type]
            if logprob is not None:
                self.logprobs.append(logprob)
        else:
            self.sampler.note(token)
        self.new.append(token)
        found = self.watch.push(token) if self.watch is not None else None
        early = self.sampler.made <= self.request.sampling.min_new_tokens
        if token in self.sampler.stops and not early:
            self.reason, self.matched = "stop", token
        elif found is not None:
            self.reason, self.matched = "stop", found
        elif self.sampler.made >= self.request.sampling.max_new_tokens:
            self.reason = "length"
        return token

    def fail(self, error: Exception) -> None:
        """End it with what went wrong in its own part; the others go on."""
        self.reason, self.failure = "error", error

    def output(self) -> Output:
        """What is new."""
        logprobs = self.logprobs if self.request.sampling.logprobs is not None else None
        error = None
        if self.failure is not None:
            error = f"{type(self.failure).__name__}: {self.failure}"
        elif self.reason == "error":
            error = _NO_NUMBERS.format(self.sampler.made)
        found = Output(self.request.ident, self.new, logprobs, self.reason, self.matched, error)
        self.new, self.logprobs = [], []
        return found


class Generator:
    """Generates for many requests at once, in packed passes over pages of one cache.

    The model stays as it is for other callers, and several generators of one model may live beside each other. A model
    that no pass can batch goes through its own `generate`; `kind` and `why` tell.

    Args:
        model: a causal LM of Transformers (or anything with `generate`, then one by one).
        tokenizer: needed for stop strings only.
        cache_bytes: of keys and values; None takes what all sequences could need, at most a quarter of the memory that
            is free and 4 GiB. On a CPU, pages take memory when they are first written.
        page_size: tokens of a page.
        max_batch_tokens: rows of a pass.
        max_sequences: sequences that run at once.
        max_length: tokens of prompt and answer together; None takes the model's own limit.
        prefix_cache: tokens that an earlier request had at its beginning are not computed again.
        speculation: tokens guessed at a time from the text itself; tokens stay what they are without.
        prompt_chunk: rows of prompts in a pass while others generate; None: twice as many as these are, from 16 to 32.
        lossless_weights: pack bf16 matrices in 12 bits, **in the model**, where its native form reads them: a quarter
            less memory and faster, every bit of weights, logits and `state_dict` kept. For weights that nobody trains.

    Raises:
        RequestError: max_length over the model's own, or a cache without room for a page.
        ArgumentError: lossless_weights of a model that is trained.
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
        for name, given in (sizes if prompt_chunk is None else sizes | {"prompt_chunk": prompt_chunk}).items():
            if type(given) is not int or given < 1:
                raise RequestError(f"{name} has to be at least 1, not {given!r}")
        say_untested()
        self.model, self.tokenizer, self._speculation = model, tokenizer, speculation
        self.limit = _limit(model, max_length)
        self._vocabulary = vocabulary_size(model, decoder=True)
        self._ends = _ends(model)
        self._executor, self.why = select_executor(model, packed=lossless_weights)
        self.kind = "generate" if self._executor is None else self._executor.kind
        warn_of(model, self._executor, self.why)
        pages = 1
        if self._executor is not None:
            probed = self._executor.store
            pages = _pages(
                probed.bytes_per_page() // probed.size * page_size, page_size, cache_bytes, self, max_sequences
            )
            self._executor.store = probed.resized(pages, page_size)
        self.pages = BlockPool(pages, page_size, prefix_cache)
        self._scheduler = Scheduler(self.pages, self._copy, max_batch_tokens, max_sequences, prompt_chunk or CHUNK)
        self._packed_limit = packed_limit(model)
        self._live: dict[Hashable, _Live] = {}
        self._fallback_requests: dict[Hashable, _Live] = {}  # through `generate`
        # Their threads stand still and hold the model: who drops the generator lets them end.
        weakref.finalize(self, _let_go, self._fallback_requests).atexit = False
        self._ready: list[Output] = []
        self._arrivals = 0
        self._lock = threading.RLock()
        self._closed = False

    def submit(self, request: Request) -> None:
        """Take a request; its first tokens come from a later `step`.

        Raises:
            RequestError: prompt and answer over the limit of the model or of the cache (with both numbers), an empty
                prompt, tokens outside the vocabulary, an ident in use, stop strings without tokenizer.
        """
        tokens, sampling = list(request.tokens), request.sampling
        with self._lock:
            if self._closed:
                raise UsageError("the generator is closed")
            self._check(request, tokens)
            alone = self._executor is None or self._exceeds_rope_limit(len(tokens) + sampling.max_new_tokens)
            if not alone:
                self._check_room(len(tokens) + sampling.max_new_tokens)
            sampler = Sampler(sampling, tokens, self._ends)
            watch = StopStrings(self.tokenizer, sampling.stop) if sampling.stop else None
            live = _Live(request, sampler, TokenSequence(request.ident, tokens, self._arrivals), watch)
            self._arrivals += 1
            self._live[request.ident] = live
            if alone:
                if self._executor is not None:
                    warn_once(
                        f"{type(self.model).__name__}: over {self._packed_limit} tokens a request changes how all "
                        f"positions are rotated, so such requests are not batched but go through its own generate"
                    )
                choose = functools.partial(_alone_takes, weakref.ref(live))
                live.thread = Thread(self.model, tokens, sampling.max_new_tokens, choose)
                self._fallback_requests[request.ident] = live
            else:
                live.drafter = NgramProposer(self._speculation) if self._speculation else None
                self._scheduler.add(live.track)

    def step(self) -> list[Output]:
        """One pass; what is new of every request it served, and of those cancelled. With requests that are not
        finished, some row is always computed."""
        with self._lock:
            outputs, self._ready = self._ready, []
            try:
                with exclusive_pass(self.model):
                    if not self._scheduler.idle:
                        outputs += self._packed_step()
                    for live in list(islice(self._fallback_requests.values(), self._scheduler.max_sequences)):
                        outputs += self._alone_step(live)
            except BaseException:
                self._ready = outputs  # what others got is told by the next step
                raise
            return outputs

    def cancel(self, ident: Hashable) -> bool:
        """End a request; its pages are free at once, the next `step` says "cancelled". False if there is none."""
        with self._lock:
            live = self._live.get(ident)
            if live is None:
                return False
            live.reason = "cancelled"
            self._forget(live)
            self._ready.append(live.output())
            return True

    @property
    def idle(self) -> bool:
        """No request is left, and nothing to report."""
        return not self._live and not self._ready

    def load(self) -> EngineStats:
        """How busy it is."""
        with self._lock:
            alone = min(len(self._fallback_requests), self._scheduler.max_sequences)
            running = len(self._scheduler.running) + alone
            waiting = len(self._scheduler.waiting) + len(self._fallback_requests) - alone
            return EngineStats(running, waiting, self.pages.available, self.pages.count, self._scheduler.preemptions)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams | None = None) -> list[list[int]]:
        """New tokens for each prompt, all with the same options. Requests under way go on beside it.

        Raises:
            RequestError: as `submit`, or a prompt's logits are not finite.
            Exception: what the model's own `generate` raises, where prompts go through it.
        """
        idents = [object() for _ in prompts]
        found: dict[Hashable, list[int]] = {ident: [] for ident in idents}
        others: list[Output] = []
        with self._lock:
            try:
                for ident, prompt in zip(idents, prompts, strict=True):
                    self.submit(Request(ident, prompt, sampling or SamplingParams()))
                lives = {ident: self._live[ident] for ident in idents}
                while any(ident in self._live for ident in idents):
                    for output in self.step():
                        if output.ident not in found:
                            others.append(output)
                            continue
                        found[output.ident] += output.tokens
                        if output.error is not None:
                            raise lives[output.ident].failure or RequestError(output.error)
            finally:
                for ident in idents:
                    self.cancel(ident)
                self._ready = others + [output for output in self._ready if output.ident not in found]
        return [found[ident] for ident in idents]

    def refresh(self) -> None:
        """Forget what prompts left in the cache: the weights have changed.

        Raises:
            UsageError: requests are under way.
        """
        with self._lock:
            if self._live:
                raise UsageError(f"{len(self._live)} requests are under way; weights change between them")
            self.pages.forget_all()

    def close(self) -> None:
        """Cancel what is left and free the cache."""
        with self._lock:
            for ident in list(self._live):
                self.cancel(ident)
            self._closed = True
            if self._executor is not None:
                self._executor.store.layers.clear()

    def _copy(self, source: int, target: int) -> None:
        self._executor.store.copy(source, target)

    def _exceeds_rope_limit(self, length: int) -> bool:
        return self._packed_limit is not None and length > self._packed_limit

    def _check(self, request: Request, tokens: list[int]) -> None:
        new = request.sampling.max_new_tokens
        if request.ident in self._live:
            raise RequestError(f"request {request.ident!r} is not finished; names have to be unique")
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if self.limit is not None and len(tokens) + new > self.limit:
            raise RequestError(
                f"a prompt of {len(tokens)} tokens and {new} new ones are {len(tokens) + new}, over the limit of "
                f"{self.limit} tokens; shorten the prompt or ask for fewer"
            )
        for token in tokens:
            whole = isinstance(token, int) and not isinstance(token, bool)
            if not whole or token < 0 or (self._vocabulary is not None and token >= self._vocabulary):
                raise RequestError(f"{token!r} in the prompt is no token of a vocabulary of {self._vocabulary}")
        if request.sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need the tokenizer; hand it to the generator")

    def _check_room(self, length: int) -> None:
        if not self._scheduler.fits(length):
            room = self.pages.count * self.pages.size
            raise RequestError(
                f"prompt and new tokens are {length}, over the {room} tokens that the cache has room for; raise "
                "cache_bytes or ask for fewer"
            )

    def _packed_step(self) -> list[Output]:
        streams = sum(track.pending == 1 for track in self._scheduler.running)
        drafting = self._speculation and streams <= DRAFTING_STREAMS
        shares = self._scheduler.plan(self._guess if drafting else None)
        wanted = [1 + len(share.drafts) if share.complete else 0 for share in shares]
        spans = []
        for share, count in zip(shares, wanted, strict=True):
            tokens = [*share.track.tokens[share.start : share.start + share.count], *share.drafts]
            spans.append(BatchSlice(tokens, share.start, share.track.pages, count))
        even = getattr(self._executor, "even", False)
        logits = self._executor.run(RaggedBatch(spans, self.pages.size, device_of(self.model), even))
        chosen = largest(logits) if len(logits) else []
        outputs, at = [], 0
        for share, count in zip(shares, wanted, strict=True):
            rows = slice(at, at + count)
            outputs += self._accept(share, logits[rows], chosen[rows])
            at += count
        return outputs

    def _guess(self, track: TokenSequence, most: int) -> list[int]:
        live = self._live[track.ident]
        most = min(most, live.request.sampling.max_new_tokens - live.sampler.made - 1)
        return live.drafter.guess(track.tokens, most) if live.drafter is not None and most > 0 else []

    def _accept(self, share: ScheduledTokens, logits: torch.Tensor, chosen: list[int]) -> list[Output]:
        """Tokens from a share's logits: the next one, and more as long as drafts are what was chosen."""
        live = self._live[share.track.ident]
        accepted: list[int] = []
        for at in range(len(chosen)):
            if chosen[at] < 0:
                live.reason = "error"
                break
            plain = live.sampler.plain
            try:
                accepted.append(live.take(None if plain else logits[at], chosen[at] if plain else None))
            except Exception as error:  # its tokenizer or its options
                live.fail(error)
                break
            if live.reason is not None or at == len(share.drafts) or share.drafts[at] != accepted[-1]:
                break
        self._scheduler.advance(share, accepted)
        if live.drafter is not None and share.drafts:
            live.drafter.judge(len(share.drafts), len(accepted) - 1)
        if live.reason is not None:
            self._forget(live)
        return [live.output()] if accepted or live.reason is not None else []

    def _alone_step(self, live: _Live) -> list[Output]:
        thread = live.thread
        try:
            thread.step()  # type: ignore[union-attr]
        except Exception as error:  # whatever the model's own generate raises is this request's alone
            live.fail(error)
        except BaseException:
            self._forget(live)
            raise
        if live.reason is not None:
            self._forget(live)
        return [live.output()]

    def _forget(self, live: _Live) -> None:
        del self._live[live.request.ident]
        if live.thread is not None:
            live.thread.cancel()
            del self._fallback_requests[live.request.ident]
        else:
            self._scheduler.remove(live.track)


def _alone_takes(asked: weakref.ref[_Live], row: torch.Tensor) -> int | None:
    """Choose for a thread, which must not hold its request: it would hold the generator's part of it for ever."""
    live = asked()
    if live is None:
        return None
    if not row.amax().isfinite():
        live.reason = "error"
        return None
    token = live.take(row)
    return None if live.reason is not None else token


def _let_go(alone: dict[Hashable, _Live]) -> None:
    for live in alone.values():
        if live.thread is not None:
            live.thread.let_go()


def _limit(model: nn.Module, asked: int | None) -> int | None:
    own = length_limit(model)
    if asked is None:
        return own
    if asked < 2 or (own is not None and asked > own):
        raise RequestError(f"max_length {asked} has to be from 2 to the model's own limit of {own} tokens")
    return asked


def _ends(model: nn.Module) -> frozenset[int]:
    """End tokens: of the generation config, else of the config."""
    for source in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            return frozenset(value) if isinstance(value, (list, tuple)) else frozenset([value])
    return frozenset()


def _pages(each: int, size: int, asked: int | None, generator: Generator, sequences: int) -> int:
    """How many pages of `each` bytes the cache has."""
    if asked is not None:
        if asked < each:
            raise RequestError(f"cache_bytes {asked} are less than one page of {size} tokens, {each} bytes")
        return asked // each
    room = min(LARGEST_CACHE, int(psutil.virtual_memory().available * SHARE_OF_MEMORY))
    length = generator.limit if generator.limit is not None else room
    return max(1, min(room // each, sequences * -(-length // size)))
