"""Prometheus metrics of the server."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from deepspeed.serving.ipc import Step

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Prometheus metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._maker(Counter), self._maker(Gauge), self._maker(Histogram)
        self.answers = counter("answers", "requests by endpoint and status", labelnames=("endpoint", "status"))
        self.cancelled = counter("cancelled", "requests whose client went away")
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
        self._seen = Step(0)

    def _maker(self, kind: type) -> type:
        registry = self.registry

        def make(name: str, text: str, **rest: object) -> object:
            return kind(f"ds_serve_{name}", text, registry=registry, **rest)

        return make  # type: ignore[return-value]

    def step(self, step: Step) -> None:
        """Update the metrics from a step's report."""
        self.steps.inc(step.number - self._seen.number)
        self.preemptions.inc(max(step.preemptions - self._seen.preemptions, 0))
        self.new_tokens.inc(sum(len(part.tokens) for part in step.parts))
        for name in ("running", "waiting", "pages", "free_pages"):
            getattr(self, name).set(getattr(step, name))
        self._seen = step

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
