"""Engine process: a model, its generator, and a pipe. The process ends when the pipe closes."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from deepspeed.errors import ArgumentError, DeepSpeedError, LengthError, RequestError, UsageError
from deepspeed.serving.arguments import EngineOptions
from deepspeed.serving.generation_defaults import ENDS, read_defaults
from deepspeed.serving.ipc import (
    Accepted,
    Cancel,
    ChangeWeights,
    Failed,
    LoadAdapter,
    Ready,
    Refused,
    ScoredToken,
    Step,
    Stop,
    Submit,
    TokenChunk,
    UnloadAdapter,
)

ABORTED = "weights_updated"  # code of requests that an update of the weights has ended
BEAT = 0.5  # seconds between heartbeats without work
SLOTS = 2  # constraints compiled at the same time: a slow one does not stop all others


def load(options: EngineOptions) -> tuple[Any, Any]:
    """Load a model in evaluation mode and its tokenizer; returns (model, tokenizer)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from deepspeed.inference.gguf_files import is_gguf, load_gguf
    from deepspeed.inference.quantization.compressed_tensors import unread

    if options.threads:
        torch.set_num_threads(options.threads)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    wanted: Any = dtypes.get(options.dtype, "auto")
    if is_gguf(options.model):
        model, tokenizer = load_gguf(options.model, None if wanted == "auto" else wanted)
        return _engine_of(model, wanted, options, "").module, tokenizer
    tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=False)
    config = AutoConfig.from_pretrained(options.model, trust_remote_code=False)
    packed = getattr(config, "quantization_config", None)
    readable = packed and Path(options.model).is_dir() and not unread(packed)  # Transformers loads other formats
    checkpoint = options.checkpoint or (options.model if readable else "")
    if checkpoint:
        dtype_argument = {} if wanted == "auto" else {"dtype": wanted}  # default: that of the folder
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **dtype_argument)
        if (Path(options.model) / "generation_config.json").is_file():  # it may name further end tokens
            model.generation_config = GenerationConfig.from_pretrained(options.model)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=wanted, trust_remote_code=False)
    return _engine_of(model, wanted, options, checkpoint).module, tokenizer


def _engine_of(model: Any, wanted: Any, options: EngineOptions, checkpoint: str) -> Any:
    import torch

    from deepspeed.inference.engine import init_inference

    dtype = wanted if wanted != "auto" else next(p.dtype for p in model.parameters() if p.is_floating_point())
    keys: dict[str, Any] = {"checkpoint": checkpoint} if checkpoint else {}
    if options.quantize:
        keys |= {"quant": {"weight": {"num_bits": int(options.quantize.removeprefix("int"))}}}
        dtype = torch.int8
    return init_inference(model, dtype=dtype, **keys)


def main(options: EngineOptions, pipe: Connection) -> None:
    """Load the model, then process messages from `pipe` until `Stop`; exits with code 1 after an error.

    SIGINT and SIGTERM are ignored, since the web process handles them.
    """
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    try:
        engine = _Engine(options, pipe)
        pipe.send(engine.ready())
        engine.run()
    except (EOFError, BrokenPipeError):  # the web process has ended
        sys.exit(1)
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(EOFError, OSError):
            pipe.send(Failed(f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _plain(logprobs: list[Any] | None) -> list[tuple[int, float, tuple[tuple[int, float], ...]]] | None:
    """Return a list of `Logprob` in the form of `TokenChunk`."""
    return None if logprobs is None else [(each.token, each.logprob, tuple(each.top)) for each in logprobs]


def load_draft(options: EngineOptions, tokenizer: Any) -> Any:
    """Load the draft model in evaluation mode; None if the options name none.

    Raises:
        ArgumentError: its folder has a tokenizer with other tokens than `tokenizer`.
    """
    if not options.speculative_model:
        return None
    own = {"checkpoint": "", "model": options.speculative_model, "quantize": options.speculative_quantize}
    model, drafts = load(replace(options, **own))
    if drafts.get_vocab() != tokenizer.get_vocab():
        raise ArgumentError(
            f"the tokenizer of --speculative-model {options.speculative_model} has other tokens than that of "
            f"{options.model}; they have to be the same"
        )
    return model


class _Compiling:
    """Requests whose constraints are compiled in threads, while the engine goes on with others.

    Attributes:
        waiting: requests under way, by number.
        news: connection that is readable when one is ready.
    """

    def __init__(self) -> None:
        self.news, self._sender = multiprocessing.Pipe(duplex=False)
        self.waiting: dict[int, Submit] = {}
        self._results: dict[int, Any] = {}
        self._idents: dict[Any, list[int]] = {}  # requests by constraint, which is compiled once for all of them
        self._queue: deque[tuple[Any, Callable[[], Any]]] = deque()
        self._lock, self._sending, self._threads = threading.Lock(), threading.Lock(), 0

    def start(self, message: Submit, compile_: Callable[[], Any]) -> None:
        """Compile in a thread; errors come again when the request is submitted."""
        self.waiting[message.ident] = message
        key = message.sampling.get("structured", message.ident)
        with self._lock:
            self._idents.setdefault(key, []).append(message.ident)
            if len(self._idents[key]) == 1:
                self._queue.append((key, compile_))
            if self._threads < SLOTS:
                self._threads += 1
                threading.Thread(target=self._work, name="deepspeed constraint", daemon=True).start()

    def _next(self) -> tuple[Any, Callable[[], Any]] | None:
        """Return the next constraint that a request still waits for, and its function; None: this thread ends."""
        with self._lock:
            while self._queue:
                key, compile_ = self._queue.popleft()
                if any(ident in self.waiting for ident in self._idents[key]):
                    return key, compile_
                del self._idents[key]
            self._threads -= 1
            return None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            key, compile_ = job
            result = None
            try:
                result = compile_()
            except BaseException:  # a panic of llguidance is no Exception
                traceback.print_exc()
            finally:
                with self._lock:
                    idents = self._idents.pop(key)
                    self._results |= dict.fromkeys(idents, result)
                del result
                with contextlib.suppress(OSError), self._sending:  # the engine has ended
                    for ident in idents:
                        self._sender.send(ident)

    def finished(self) -> list[tuple[Submit, Any]]:
        """Return the requests that are ready with what was compiled for them, without those cancelled."""
        ready = []
        while self.news.poll():
            ident = self.news.recv()
            with self._lock:
                result = self._results.pop(ident)
            if (message := self.waiting.pop(ident, None)) is not None:
                ready.append((message, result))
        return ready

    def cancel(self, ident: int) -> bool:
        """Drop a request that is not ready; returns False if there is none of this number."""
        return self.waiting.pop(ident, None) is not None


class _Engine:
    def __init__(self, options: EngineOptions, pipe: Connection) -> None:
        from deepspeed.foundation.transformers_model import vocabulary_size
        from deepspeed.inference.generator import Generator
        from deepspeed.inference.weight_update import WeightUpdate

        model, tokenizer = load(options)
        size, of_class = vocabulary_size(model, decoder=True), getattr(model.config, ENDS, None)
        self.defaults = read_defaults(
            options.model, options.generation_config, options.override_generation_config, tokenizer, size, of_class
        )
        if getattr(model, "generation_config", None) is not None:
            setattr(model.generation_config, ENDS, list(self.defaults.ends))
        self.pipe, self.steps, self.ending = pipe, 0, False
        self.compiling = _Compiling()
        self.generator = Generator(
            model,
            tokenizer=tokenizer,
            cache_bytes=options.cache_bytes or None,
            max_batch_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
            max_length=options.max_length or None,
            prefix_cache=options.prefix_cache,
            speculation=options.speculation,
            draft_model=load_draft(options, tokenizer),
            lossless_weights=options.lossless_weights and not options.weight_updates,
        )
        self.updates = WeightUpdate(self.generator)
        self._held: list[Submit] = []  # requests that came during an update of the weights
        self._beginning: ChangeWeights | None = None
        self.max_rank = options.max_lora_rank or None
        for module in options.lora_modules:
            self.generator.add_adapter(module.name, module.path, self.max_rank)

    def ready(self) -> Ready:
        """Return the report that the model is loaded."""
        generator = self.generator
        lengths = generator.vocabulary, generator.packed_length
        return Ready(generator.limit, generator.kind, generator.why or "", *lengths, self.defaults)

    def run(self) -> None:
        """Read messages, run a step and report the step, until `Stop` arrived and all requests have ended."""
        while True:
            self._take()
            self._follow_update()
            if not self.generator.idle:
                outputs = self.generator.step()
                self.steps += 1
                self._report(outputs, idle=False)
            elif self.ending and not self.compiling.waiting and not self._held:
                self.generator.close()
                return
            else:
                self._report([], idle=True)

    def _take(self) -> None:
        """Read all available messages; without work, wait for one until the next heartbeat."""
        wait = BEAT if self.generator.idle and (self.compiling.waiting or not self.ending) else 0
        while ready := connection.wait([self.pipe, self.compiling.news], wait):
            wait = 0
            if self.compiling.news in ready:
                for compiled, _ in self.compiling.finished():  # remembered as long as this list has the results
                    self._submit(compiled)
            if self.pipe not in ready:
                continue
            message = self.pipe.recv()
            if isinstance(message, Submit):
                structured, constraints = message.sampling.get("structured"), self.generator.constraints
                result = None if structured is None else constraints.remembered(structured)
                if structured is None or result is not None:
                    self._submit(message)  # remembered until `result` changes
                else:
                    self.compiling.start(message, functools.partial(constraints.prepare, structured))
            elif isinstance(message, Cancel):
                self._held = [held for held in self._held if held.ident != message.ident]
                if not self.compiling.cancel(message.ident):
                    self.generator.cancel(message.ident)
            elif isinstance(message, LoadAdapter | UnloadAdapter):
                self._change_adapters(message)
            elif isinstance(message, ChangeWeights):
                self._change_weights(message)
            elif isinstance(message, Stop):
                self.ending = True

    def _submit(self, message: Submit) -> None:
        from deepspeed.inference.request import Request
        from deepspeed.inference.sampling_params import SamplingParams

        if self.updates.active:
            self._held.append(message)
            return
        try:
            sampling = SamplingParams(**message.sampling)
            how = {name: getattr(message, name) for name in ("group", "adapter", "priority", "pooling")}
            request = Request(message.ident, message.tokens, sampling, **how)
            self.generator.submit(request)
        except LengthError as error:
            self.pipe.send(Refused(message.ident, str(error), "context_length_exceeded"))
        except RequestError as error:
            self.pipe.send(Refused(message.ident, str(error)))
        except Exception as error:  # errors of the tokenizer or the model must not affect other requests
            self.pipe.send(Refused(message.ident, f"{type(error).__name__}: {error}", "model_error"))
        else:
            self.pipe.send(Accepted(message.ident, self.updates.version))

    def _change_weights(self, message: ChangeWeights) -> None:
        """Carry out a message of an update; the answer to "begin" comes when no request runs (`_follow_update`)."""
        try:
            if message.action == "begin":
                self.updates.begin()
                self._beginning = message
                live: list[Any] = self.generator.cancel_all() if message.mode == "abort" else []
                for ident in live:
                    self.pipe.send(Refused(ident, "ended for an update of the server's weights", ABORTED))
                return
            if message.action == "tensors":
                self.updates.copy(message.shared_memory, message.tensors)
            else:
                self.updates.end()
                self._resubmit()
        except DeepSpeedError as error:
            self.pipe.send(Refused(message.ident, str(error)))
        else:
            self.pipe.send(Accepted(message.ident, self.updates.version))

    def _follow_update(self) -> None:
        """Answer "begin" once no request runs; go on if the sender of an update is silent."""
        if self._beginning is not None and self.updates.ready:
            self.pipe.send(Accepted(self._beginning.ident, self.updates.version))
            self.updates.answered()
            self._beginning = None
        try:
            if self._beginning is None and self.updates.given_up():
                self._resubmit()
        except UsageError as error:  # a mixture of weights answers nothing
            for held in self._held:
                self.pipe.send(Refused(held.ident, str(error), ABORTED))
            self._held = []

    def _resubmit(self) -> None:
        held, self._held = self._held, []
        for message in held:
            self._submit(message)

    def _change_adapters(self, message: LoadAdapter | UnloadAdapter) -> None:
        try:
            if isinstance(message, LoadAdapter):
                self.generator.add_adapter(message.name, message.folder, self.max_rank)
            else:
                self.generator.remove_adapter(message.name)
        except Exception as error:  # a damaged folder must not affect requests
            known = isinstance(error, DeepSpeedError)
            self.pipe.send(Refused(message.ident, str(error) if known else f"{type(error).__name__}: {error}"))
        else:
            self.pipe.send(Accepted(message.ident))

    def _report(self, outputs: list[Any], idle: bool) -> None:
        chunks = []
        for o in outputs:
            beams = tuple(
                TokenChunk(o.ident, each.tokens, _plain(each.logprobs), each.finish_reason, each.matched)
                for each in o.beams or ()
            )
            logprobs = _plain(o.logprobs)
            scored = o.prompt_logprobs and [
                p and ScoredToken(p.token, p.logprob, p.top, p.rank) for p in o.prompt_logprobs
            ]
            chunks.append(
                TokenChunk(
                    o.ident, list(o.tokens), logprobs, o.finish_reason, o.matched, o.error, beams, scored,
                    o.cached_tokens, o.embedding,
                )
            )  # fmt: skip
        stats = self.generator.load()
        self.pipe.send(
            Step(
                self.steps, chunks, stats.running, stats.waiting, stats.free_pages, stats.pages, stats.preemptions,
                idle, stats.looked_up, stats.reused,
            )
        )  # fmt: skip
