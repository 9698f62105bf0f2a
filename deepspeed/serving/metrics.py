"""Prometheus metrics of the server: its own, and others by the names that vLLM's dashboards read."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deepspeed.serving.ipc import Step, TokenChunk

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_FINE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# OpenAI's finish reasons, and those of vLLM's metric.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}


@dataclass
class TokenTimes:
    """Times of one answer, by `time.monotonic`: of the request, of its first and last token; and its tokens so far."""

    begun: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


class VLLMMetrics:
    """Metrics that vLLM's dashboards read, by vLLM's names and with its labels.

    Args:
        registry: registry of the server's metrics.
        model: name of the model, for the label `model_name`.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        labels = {"model_name": model, "engine": "0"}

        def make(kind: type, name: str, text: str, extra: tuple[str, ...] = (), **rest: Any) -> Any:
            metric = kind(f"vllm:{name}", text, labelnames=(*labels, *extra), registry=registry, **rest)
            return metric if extra else metric.labels(**labels)

        self.running = make(Gauge, "num_requests_running", "requests in the batch")
        self.waiting = make(Gauge, "num_requests_waiting", "requests in the queue")
        self.usage = make(Gauge, "kv_cache_usage_perc", "part of the cache's pages in use; 1 is all")
        self.queries = make(Counter, "prefix_cache_queries", "tokens looked up in the prefix cache")
        self.hits = make(Counter, "prefix_cache_hits", "tokens found in the prefix cache")
        self.preemptions = make(Counter, "num_preemptions", "requests that gave their pages back for a while")
        self.prompt_tokens = make(Counter, "prompt_tokens", "tokens of prompts")
        self.new_tokens = make(Counter, "generation_tokens", "generated tokens")
        success = make(Counter, "request_success", "finished requests", ("finished_reason",))
        self.success = {reason: success.labels(**labels, finished_reason=name) for reason, name in _REASONS.items()}
        fine: dict[str, Any] = {"buckets": _FINE}
        self.first_token = make(
            Histogram, "time_to_first_token_seconds", "from request to first token", buckets=_SECONDS
        )
        self.between = [  # the newer and the older name
            make(Histogram, name, "between two outputs of a request", **fine)
            for name in ("inter_token_latency_seconds", "time_per_output_token_seconds")
        ]
        self.mean = make(Histogram, "request_time_per_output_token_seconds", "mean of a request", **fine)
        self.whole = make(Histogram, "e2e_request_latency_seconds", "from request to last token", buckets=_SECONDS)
        self.read = make(Histogram, "request_prompt_tokens", "tokens of a prompt", buckets=_TOKENS)
        self.written = make(Histogram, "request_generation_tokens", "tokens of an answer", buckets=_TOKENS)


class Metrics:
    """Prometheus metrics of one server, in a registry of their own.

    Args:
        model: name of the model, for the metrics by vLLM's names.
    """

    def __init__(self, model: str = "") -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._maker(Counter), self._maker(Gauge), self._maker(Histogram)
        self.answers = counter("answers", "requests by endpoint and status", labelnames=("endpoint", "status"))
        self.cancelled = counter("cancelled", "requests that ended before their answers: client gone, or time over")
        self.prompt_tokens = counter("prompt_tokens", "tokens read")
        self.new_tokens = counter("generated_tokens", "tokens written")
        self.steps = counter("steps", "passes of the engine")
        self.preemptions = counter("preemptions", "sequences that gave their pages back for a while")
        self.running = gauge("running", "sequences that run")
        self.waiting = gauge("waiting", "sequences that wait")
        self.pages = gauge("pages", "pages of the cache")
        self.free_pages = gauge("free_pages", "pages that can be taken")
        self.up = gauge("engine_up", "1 while the engine's process lives")
        self.first_token = histogram("first_token_seconds", "from request to first token", buckets=_SECONDS)
        self.whole = histogram("request_seconds", "from request to last token", buckets=_SECONDS)
        self.vllm: VLLMMetrics = VLLMMetrics(self.registry, model)
        self._seen = Step(0)

    def _maker(self, kind: type) -> type:
        registry = self.registry

        def make(name: str, text: str, **rest: object) -> object:
            return kind(f"ds_serve_{name}", text, registry=registry, **rest)

        return make  # type: ignore[return-value]

    def submitted(self, tokens: int) -> None:
        """Count the tokens of a request's prompts."""
        self.prompt_tokens.inc(tokens)
        self.vllm.prompt_tokens.inc(tokens)

    def step(self, step: Step) -> None:
        """Update the metrics from a step's report."""
        vllm, new = self.vllm, sum(len(part.tokens) for part in step.parts)
        self.steps.inc(step.number - self._seen.number)
        for counter, name in (
            (self.preemptions, "preemptions"), (vllm.preemptions, "preemptions"), (vllm.queries, "looked_up"),
            (vllm.hits, "reused"),
        ):  # fmt: skip
            counter.inc(max(getattr(step, name) - getattr(self._seen, name), 0))
        self.new_tokens.inc(new)
        vllm.new_tokens.inc(new)
        for name in ("running", "waiting", "pages", "free_pages"):
            getattr(self, name).set(getattr(step, name))
        vllm.running.set(step.running)
        vllm.waiting.set(step.waiting)
        vllm.usage.set(1 - step.free_pages / step.pages if step.pages else 0)
        self._seen = step

    def chunk(self, times: TokenTimes, chunk: TokenChunk, prompt: int) -> None:
        """Record when an output of an answer to a prompt of `prompt` tokens has arrived."""
        now, vllm = time.monotonic(), self.vllm
        if chunk.tokens:
            if times.tokens:
                for histogram in vllm.between:
                    histogram.observe(now - times.last)
            else:
                times.first = now
                vllm.first_token.observe(now - times.begun)
            times.last, times.tokens = now, times.tokens + len(chunk.tokens)
        if chunk.finish_reason is None:
            return
        vllm.success[chunk.finish_reason].inc()
        vllm.whole.observe(now - times.begun)
        vllm.read.observe(prompt)
        vllm.written.observe(times.tokens)
        if times.tokens > 1:
            vllm.mean.observe((times.last - times.first) / (times.tokens - 1))

    def aborted(self, answers: int) -> None:
        """Count a request that ended before so many of its answers: its client left, or its time was over."""
        self.cancelled.inc()
        self.vllm.success["cancelled"].inc(answers)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
