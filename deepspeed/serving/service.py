"""Request handling: admission, tokenization, streaming of answers, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from deepspeed.foundation.log import logger
from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.token_bytes import decode_function, spelling
from deepspeed.serving.adapters import ServedAdapters
from deepspeed.serving.arguments import ServeOptions
from deepspeed.serving.chat_format import ChatFormat
from deepspeed.serving.embeddings import DetokenizeRequest, EmbeddingRequest, TokenizeRequest, embedding_body
from deepspeed.serving.engine import EngineGone, EngineProcess
from deepspeed.serving.ipc import Accepted, Refused, TokenChunk
from deepspeed.serving.metrics import Metrics, TokenTimes
from deepspeed.serving.prompt_logprobs import attach, prompt_infos
from deepspeed.serving.protocol import APIError, ChatCompletionRequest, CompletionRequest, answer_error, check_tokens
from deepspeed.serving.responses import DONE, ResponseChoice, ResponseFormatter, event
from deepspeed.serving.weight_updates import WeightUpdateEndpoint

_group_numbers = itertools.count()
_LONG = 20_000  # characters or tokens from which something is computed in a thread


async def _computed(size: int, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, in a thread if its `size` would hold up the event loop."""
    return await asyncio.to_thread(compute) if size > _LONG else compute()


class PendingRequest:
    """Request in progress: its choices, and the queue of their chunks.

    Args:
        service: state of the server.
        request: the parsed request.
        prompts: token ids of each prompt.
        leads: for each prompt, the text before its answers.
        ident: id of the request.

    Raises:
        APIError: status 400: a prompt is too long, or a field is invalid.
    """

    def __init__(
        self,
        service: Service,
        request: CompletionRequest | ChatCompletionRequest | EmbeddingRequest,
        prompts: list[list[int]],
        leads: list[str],
        ident: str = "",
    ) -> None:
        self._service, self.request = service, request
        self.begun = time.monotonic()
        self.pooling: str | None = None
        self.choices: list[ResponseChoice] = []
        self._idents: dict[int, int] = {}
        self._arrived: list[tuple[int, TokenChunk | Refused | None]] = []
        self._accepted: set[int] = set()
        self._waiting: asyncio.Future[None] | None = None  # future of the waiting reader
        self._timer: asyncio.TimerHandle | None = None
        self._failure: APIError | None = None
        self._sampling: list[dict[str, Any]] = []
        self._times: list[TokenTimes] = []
        self._beams, self._copies = False, 1
        self._adapter = service.adapters.of(request.model)
        self.model = self._adapter or service.options.name  # in answers
        if isinstance(request, EmbeddingRequest):
            self._embed(prompts)
        else:
            self._generate(request, prompts, leads, ident)
        self._times = [TokenTimes(self.begun) for _ in self.choices]

    def _generate(
        self, request: CompletionRequest | ChatCompletionRequest, prompts: list[list[int]], leads: list[str], ident: str
    ) -> None:
        """Make the choices of a request for text."""
        service, stops, copies = self._service, request.stops(), request.n or 1
        self._beams = request.beams() > 1  # then one request of the engine has all answers to a prompt
        self._copies = copies
        chat, logprobs = isinstance(request, ChatCompletionRequest), request.wanted_logprobs()
        self.form = ResponseFormatter(self.model, service.tokenizer, chat, logprobs is not None, ident)
        for number, prompt in enumerate(prompts):
            sampling = request.sampling(service.room(prompt, request), service.defaults)
            if (structured := service.chat.structured(request, prompt)) is not None:
                sampling["structured"] = structured
            for copy in range(copies):
                stream = TextStream(
                    service.tokenizer, stops, prompt, skip_special_tokens=True, min_tokens=request.min_tokens or 0,
                    keep=service.chat.keep(request),
                )  # fmt: skip
                parser = service.chat.parser(request, prompt)
                choice = ResponseChoice(number * copies + copy, prompt, stream, leads[number], parser)
                if isinstance(request, CompletionRequest) and request.echoes_logprobs():
                    choice.prompt_infos = functools.partial(
                        prompt_infos, service.tokenizer, prompt, leads[number], logprobs or 0
                    )
                self.choices.append(choice)
                self._sampling.append({**sampling, "index": copy})

    def _embed(self, prompts: list[list[int]]) -> None:
        """Make the choices of a request for embeddings."""
        self.pooling = self._service.options.pooling
        for number, prompt in enumerate(prompts):
            self._service.room(prompt, self.request)
            self.choices.append(ResponseChoice(number, prompt, TextStream(self._service.tokenizer)))
            self._sampling.append({})

    def summary(self) -> str:
        """Describe the answers so far, for the log."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}
        cached = {id(choice.prompt): choice.cached for choice in reversed(self.choices)}
        reasons = sorted({choice.reason or "unfinished" for choice in self.choices})
        read = f"{sum(prompts.values())} prompt tokens ({sum(cached.values())} cached)"
        return f"{read}, {sum(choice.tokens for choice in self.choices)} new, {'/'.join(reasons)}"

    def start(self) -> None:
        """Submit every choice to the engine; raises `EngineGone` if the engine has ended."""
        late = f"not finished within {self._service.options.timeout:g} s"
        self._timer = asyncio.get_running_loop().call_later(
            self._service.options.timeout, self.fail, APIError(504, late, code="deadline_exceeded")
        )
        self._service.pending.add(self)
        copies, group = self._copies, None
        for choice, sampling in zip(self.choices, self._sampling, strict=True):
            first = choice.index % copies == 0
            if self._beams and not first:
                continue
            if first and copies > 1 and not self._beams:
                group = next(_group_numbers)
            fields = {"priority": self.request.priority or 0, "pooling": self.pooling}
            fields |= {"group": group, "adapter": self._adapter}
            put, answers = self._put(choice.index, copies if self._beams else 1), sampling.get("beams", 1)
            ident = self._service.engine.submit(choice.prompt, sampling, put, answers, **fields)
            self._idents[choice.index] = ident
        self._service.metrics.submitted(sum({id(c.prompt): len(c.prompt) for c in self.choices}.values()))

    def _put(self, index: int, answers: int = 1) -> Any:
        """Return the function that takes the messages of a request with `answers` choices, of which `index` is one."""

        def put(message: Accepted | TokenChunk | Refused | None) -> None:
            if isinstance(message, TokenChunk):
                prompt = len(self.choices[index].prompt)
                self._service.metrics.chunk(self._times[index], message, prompt)
            if isinstance(message, Accepted):
                self._accepted.update(range(index, index + answers))
                if self._service.options.engine.weight_updates and self.pooling is None:
                    self.form.say_version(message.version)
            elif isinstance(message, TokenChunk) and message.beams:
                self._arrived += zip(range(index, index + answers), message.beams, strict=False)
            else:
                self._arrived.append((index, message))
            self._wake()

        return put

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def fail(self, error: APIError) -> None:
        """End the request with an error, which the reader raises."""
        self._failure = self._failure or error
        self._wake()

    def close(self) -> None:
        """Cancel unfinished choices."""
        if self._timer is not None:
            self._timer.cancel()
        self._service.pending.discard(self)
        gone = [ident for index, ident in self._idents.items() if self.choices[index].reason is None]
        self._idents.clear()
        if cancelled := sum(self._service.engine.cancel(ident) for ident in gone):
            self._service.metrics.aborted(cancelled)

    async def accepted(self) -> bool:
        """Wait until the engine has accepted every choice; returns True.

        Raises:
            APIError: as in `parts`.
        """
        while len(self._accepted) < len(self.choices):
            for _, message in self._arrived:
                self._checked(message)
            await self._news()
        return True

    async def _news(self) -> None:
        """Wait for the next message. One future for all waits: `asyncio.wait_for` would create a task per token."""
        if self._failure is None:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
            self._waiting = None
        if self._failure is not None:
            raise self._failure

    async def parts(self) -> AsyncIterator[list[tuple[ResponseChoice, TokenChunk]]]:
        """Yield lists of (choice, chunk) as they arrive; chunks that arrived since the last read are in one list.

        Raises:
            APIError: status 504 after the time limit, 503 if the server ends before, 400 for an invalid request, 500
                after an error of the engine.
        """
        open_choices, first = len(self.choices), True
        while open_choices:
            while not self._arrived or self._failure is not None:
                await self._news()
            messages, self._arrived = self._arrived, []
            parts = [(self.choices[index], self._checked(message)) for index, message in messages]
            open_choices -= sum(part.finish_reason is not None for _, part in parts)
            if first:
                self._service.metrics.first_token.observe(time.monotonic() - self.begun)
                first = False
            yield parts
        self._service.metrics.whole.observe(time.monotonic() - self.begun)

    @staticmethod
    def _checked(message: TokenChunk | Refused | None) -> TokenChunk:
        if message is None:
            raise APIError(500, "the engine has ended", code="engine_ended")
        if isinstance(message, Refused):
            status = {"model_error": 500, "weights_updated": 503}.get(message.code, 400)
            raise APIError(status, message.reason, code=message.code)
        if message.error is not None:
            raise APIError(500, message.error, code="model_error")
        return message


class Service:
    """State shared by the endpoints.

    Args:
        options: options of the web process.
        engine: the engine process, after `start`.
        tokenizer: the model's tokenizer.
        metrics: the server's metrics.
    """

    def __init__(self, options: ServeOptions, engine: EngineProcess, tokenizer: Any, metrics: Metrics) -> None:
        self.options, self.engine, self.tokenizer, self.metrics = options, engine, tokenizer, metrics
        self.weights = WeightUpdateEndpoint(engine)
        self.adapters = ServedAdapters(options.engine.lora_modules, options.names, engine)
        parsers = options.tool_call_parser, options.reasoning_parser
        self.chat = ChatFormat(tokenizer, options.chat_template, *parsers)
        self.started = int(time.time())
        self.draining = False
        self.pending: set[PendingRequest] = set()

    @property
    def defaults(self) -> dict[str, Any]:
        """Values for sampling options that requests leave out."""
        return {} if self.engine.ready is None else self.engine.ready.defaults.sampling

    @property
    def vocabulary(self) -> int | None:
        """Number of the model's tokens; None: unknown."""
        return None if self.engine.ready is None else self.engine.ready.vocabulary

    def end_all(self) -> None:
        """End all requests with an error, since the server ends."""
        for request in list(self.pending):
            text = f"the server is ending, and this request was not finished within {self.options.drain:g} s"
            request.fail(APIError(503, text, code="draining"))

    # -- before ---------------------------------------------------------------------------------------------------

    def admit(self, choices: int) -> None:
        """Raise `APIError` if the server cannot accept this number of choices.

        The status is 503 during shutdown or after the engine's end, and 429 if too many answers are in progress.
        """
        if self.draining:
            raise APIError(503, "the server is ending", code="draining", retry_after=5)
        if not self.engine.alive:
            raise APIError(503, self.engine.failure or "the engine has ended", code="engine_ended")
        most = self.options.engine.max_sequences + self.options.max_waiting
        under_way = self.engine.answers
        if under_way + choices > most:
            raise APIError(
                429, f"{under_way} answers are under way, and {most} are the most: try again later",
                code="overloaded", kind="rate_limit_error",
                retry_after=1 + under_way // max(self.options.engine.max_sequences, 1) // 4,
            )  # fmt: skip

    def check_model(self, name: str) -> None:
        """Raise `APIError` (404) if neither the model nor an adapter has this name."""
        if name not in self.options.names and self.adapters.of(name) is None:
            text = f"The model {name!r} does not exist; there is {', '.join(map(repr, self.options.names))}"
            raise APIError(404, text, "model", "model_not_found")

    async def call(self, request: CompletionRequest | ChatCompletionRequest, ident: str = "") -> PendingRequest:
        """Tokenize a request's prompts and submit them to the engine.

        Raises:
            APIError: the request is invalid (status 400 or 404), or the server cannot accept it (429 or 503).
        """
        self.check_model(request.model)
        prompt_count = 1 if isinstance(request, ChatCompletionRequest) else len(request.prompts())
        choices = prompt_count * max(request.n or 1, request.beams())
        self._check_choices(choices, "n")
        if request.stream_options is not None and not request.stream:
            raise APIError(400, "stream_options: only with stream: true", "stream_options", "invalid_value")
        request.check_tokens(self.vocabulary)
        self.admit(choices)
        prompts, leads = await self._prompts(request)
        self.admit(choices)  # other requests may have arrived,
        self.check_model(request.model)  # or its adapter may have been unloaded
        return self._started(PendingRequest(self, request, prompts, leads, ident))

    def _check_choices(self, choices: int, field: str) -> None:
        if choices > self.options.max_choices:
            text = f"{choices} answers to one request; {self.options.max_choices} are the most"
            raise APIError(400, text, field, "invalid_value")

    @staticmethod
    def _started(call: PendingRequest) -> PendingRequest:
        try:
            call.start()  # without interruption after the check, so that simultaneous requests are counted
        except EngineGone as error:
            call.close()
            raise APIError(503, str(error), code="engine_ended") from None
        return call

    async def embed(self, request: EmbeddingRequest, ident: str = "") -> PendingRequest:
        """Tokenize texts and submit them to the engine; errors as in `call`."""
        self.check_model(request.model)
        texts = request.prompts()
        self._check_choices(len(texts), "input")
        self.admit(len(texts))
        prompts = [await self._prompt(text, "input") for text in texts]
        self.admit(len(texts))
        self.check_model(request.model)
        return self._started(PendingRequest(self, request, prompts, [], ident))

    async def _prompt(self, prompt: str | list[int], field: str = "prompt") -> list[int]:
        """Return the tokens of a prompt; raises `APIError` (400) if they are none of the model's."""
        if isinstance(prompt, str):
            return await self._tokens(prompt, True, field)
        check_tokens(field, prompt, self.vocabulary)
        return prompt

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a prompt or a chat in vLLM's form; raises `APIError` (400 or 404)."""
        request.check()
        if request.model is not None:
            self.check_model(request.model)
        chat = request.messages is not None
        text = self.chat.text(request, bool(request.add_generation_prompt)) if chat else request.prompt or ""
        special = request.add_special_tokens
        tokens = await self._tokens(text, not chat if special is None else special, empty=True)
        names = None
        if request.return_token_strs:
            names = await _computed(len(tokens), lambda: [spelling(self.tokenizer, token) for token in tokens])
        limit = None if self.engine.ready is None else self.engine.ready.max_length
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": names}

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens in vLLM's form; raises `APIError` (400 or 404)."""
        if request.model is not None:
            self.check_model(request.model)
        check_tokens("tokens", request.tokens, self.vocabulary)

        def decode() -> str:
            known = [token for token in request.tokens if spelling(self.tokenizer, token) is not None]
            return decode_function(self.tokenizer, False)(known)

        return {"prompt": await _computed(len(request.tokens), decode)}

    async def _prompts(self, request: CompletionRequest | ChatCompletionRequest) -> tuple[list[list[int]], list[str]]:
        if isinstance(request, ChatCompletionRequest):
            text, special = self.chat.text(request), False
            return [await self._tokens(text, special)], [""]
        prompts, leads = [], []
        for prompt in request.prompts():
            prompts.append(await self._prompt(prompt))
            shown = ""
            if request.echo:
                shown = prompt if isinstance(prompt, str) else decode_function(self.tokenizer, False)(prompt)
            leads.append(shown)
        return prompts, leads

    async def _tokens(self, text: str, special: bool, field: str = "prompt", empty: bool = False) -> list[int]:
        def cut() -> list[int]:
            return self.tokenizer(text, add_special_tokens=special)["input_ids"]

        try:
            tokens = await _computed(len(text), cut)
        except (TypeError, ValueError, UnicodeError) as error:  # lone surrogates are valid JSON but invalid text
            raise APIError(400, f"the {field} is no valid text: {error}", field, "invalid_value") from None
        if not tokens and not empty:
            raise APIError(400, f"the {field} is empty: there is nothing to go on from", field, "invalid_value")
        return tokens

    def room(self, prompt: list[int], request: CompletionRequest | ChatCompletionRequest | EmbeddingRequest) -> int:
        """Return the maximum number of tokens of the answer; raises `APIError` (400) above the context length."""
        limit = self.engine.ready.max_length if self.engine.ready is not None else None
        wanted = 0 if isinstance(request, EmbeddingRequest) else request.wanted_tokens()
        default = self.defaults.get("max_new_tokens")
        if limit is None:
            return (default or 1024) if wanted is None else wanted
        least = 1 if wanted is None else wanted
        whole = len(prompt) + least
        if whole > limit:
            where = {ChatCompletionRequest: "messages", EmbeddingRequest: "input"}.get(type(request), "prompt")
            text = (
                f"This model's maximum context length is {limit} tokens. However, you requested {whole} tokens "
                f"({len(prompt)} in the {where}, {least} in the completion). "
                f"Please reduce the length of the {where} or completion."
            )
            raise APIError(400, text, where, "context_length_exceeded")
        packed = self.engine.ready.packed_length if self.engine.ready is not None else None
        if wanted is not None:
            return wanted
        if packed is not None and packed > len(prompt):  # an answer that alone would leave shared passes
            limit = min(limit, packed)
        return min(limit - len(prompt), default or limit)

    # -- answers --------------------------------------------------------------------------------------------------

    async def answer(self, call: PendingRequest) -> dict[str, Any]:
        """Wait for all chunks and return the whole response; errors as in `PendingRequest.parts`."""
        try:
            async for parts in call.parts():
                for choice, part in parts:
                    text, logprobs = choice.take(part)
                    choice.text.append(text)
                    choice.logprobs += logprobs
            request = call.request
            if isinstance(request, EmbeddingRequest):
                return embedding_body(request, call.model, call.choices, self.options.normalize)
            body = call.form.whole(call.choices)
            if request.prompt_logprobs is not None:
                most = request.prompt_logprobs
                size = len(call.choices) * len(call.choices[0].prompt) * (1 + most)
                body = await _computed(size, lambda: attach(body, call.choices, self.tokenizer, most))
            return body
        finally:
            call.close()

    async def stream(self, call: PendingRequest) -> AsyncIterator[str]:
        """Yield server-sent events; an `APIError` becomes the last event, since the HTTP status is sent before."""
        options = call.request.stream_options  # type: ignore[union-attr]  # embeddings are not streamed
        try:
            async with contextlib.aclosing(call.parts()) as arriving:  # type: ignore[type-var]
                async for parts in arriving:
                    yield "".join(self._events(call, parts))
            if options is not None and options.include_usage:
                yield event(call.form.last(call.choices))
            yield DONE
        except Exception as error:  # the stream has begun, so every error is an event
            if not isinstance(error, APIError):
                logger.exception("ds_serve: an answer could not be formed")
            yield event(answer_error(error).body())
        finally:
            call.close()

    def _events(self, call: PendingRequest, parts: list[tuple[ResponseChoice, TokenChunk]]) -> list[str]:
        """Create events from chunks of tokens; chunks of the same choice in `parts` form one event."""
        new: dict[int, tuple[str, list[Any]]] = {}
        events = []
        for choice, part in parts:
            if choice.tokens == 0 and isinstance(call.request, ChatCompletionRequest):
                events.append(event(call.form.first(choice)))
            text, logprobs = choice.take(part)
            before = new.get(choice.index, ("", []))
            new[choice.index] = (before[0] + text, before[1] + logprobs)
        for index, (text, logprobs) in new.items():
            choice = call.choices[index]
            if text or logprobs or choice.reason is not None:
                body = call.form.chunk(choice, text, logprobs)
                events += [] if body is None else [event(body)]
        return events

    # -- health ---------------------------------------------------------------------------------------------------

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status (200 or 503) and the body: state of the server, and the engine's last report."""
        engine, age = self.engine, time.monotonic() - self.engine.last_step
        stuck = bool(engine.live) and age > self.options.step_timeout
        if not engine.alive:
            status = "engine ended"
        elif self.draining:
            status = "draining"
        else:
            status = "stuck" if stuck else "ok"
        last = engine.last
        body = {
            "status": status,
            "reason": engine.failure,
            "last_step": last.number,
            "seconds_since_last_step": round(age, 3),
            "running": last.running,
            "waiting": last.waiting,
            "free_pages": last.free_pages,
            "pages": last.pages,
        }
        return (200 if status == "ok" else 503), body
