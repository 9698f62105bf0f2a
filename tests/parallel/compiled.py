"""What a compiled model did in a few steps: graphs, breaks, losses and weights, whatever asked for the compilation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 4
Asks = Callable[[Any, Any], Any]
Advances = Callable[[Any, Any, int], float]  # the engine, what is called in its place, the step: the loss


def forward_and_back(loss_of: Callable[[Any, int, int], torch.Tensor]) -> Advances:
    """One micro-batch, whose loss is that of a rank."""

    def advance(engine: Any, call: Any, step: int) -> float:
        loss = loss_of(call, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        return loss.item()

    return advance


@dataclass
class Seen:
    """Of one run."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    graphs: list[int]  # compiled so far, after each step
    breaks: int

    def same(self, other: Seen) -> bool:
        """Whether losses and weights are bit-equal."""
        return self.losses == other.losses and all(
            torch.equal(values, other.weights[name]) for name, values in self.weights.items()
        )

    def near(self, other: Seen, bar: float = 1e-4) -> bool:
        """Whether losses and weights differ by less; inductor rounds in another order than torch's operators."""
        gaps = [abs(ours - theirs) for ours, theirs in zip(self.losses, other.losses, strict=True)]
        gaps += [(values - other.weights[name]).abs().max().item() for name, values in self.weights.items()]
        return max(gaps) < bar


@contextlib.contextmanager
def counting(backend: str) -> Iterator[Any]:
    """A backend that counts the graphs it gets, in a compiler that has seen nothing before."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        yield CompileCounterWithBackend(backend)
    finally:
        torch._dynamo.reset()


@contextlib.contextmanager
def closing_inductor() -> Iterator[None]:
    """End the threads that inductor compiles with, which would stay."""
    from torch._inductor.async_compile import AsyncCompile

    try:
        yield
    finally:
        AsyncCompile.pool().shutdown()
        AsyncCompile.pool.cache_clear()


def breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def before(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend)
    return model


def wrapped(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def by_engine(engine: Any, backend: Any) -> Any:
    engine.compile(backend=backend)
    return engine


def around_engine(engine: Any, backend: Any) -> Any:
    return torch.compile(engine, backend=backend)


def by_module(engine: Any, backend: Any) -> Any:
    engine.module.compile(backend=backend)
    return engine


def by_regions(engine: Any, backend: Any) -> Any:
    """As Accelerate does."""
    from accelerate.utils.other import compile_regions_deepspeed

    compile_regions_deepspeed(engine.module, backend=backend)
    return engine


EARLY: dict[str, Asks] = {"before": before, "wrapped": wrapped}
LATE: dict[str, Asks] = {"engine": by_engine, "around": around_engine, "module": by_module, "regions": by_regions}
WAYS = [*EARLY, *LATE]


def run(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any, int, int], torch.Tensor] | None,
    config: dict[str, Any],
    way: str = "",
    backend: str = "eager",
    advance: Advances | None = None,
) -> Seen:
    """Steps of an engine; `way` is one of `WAYS`, or "" for no compilation; `advance` replaces `loss_of`."""
    import deepspeed
    from deepspeed.zero.api.tensor_access import safe_get_full_fp32_param

    with counting(backend) as counter:
        model = EARLY[way](make(), counter) if way in EARLY else make()
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        call = LATE[way](engine, counter) if way in LATE else engine
        losses, graphs = [], []
        if advance is None:
            assert loss_of is not None
            advance = forward_and_back(loss_of)
        for step in range(STEPS):
            losses.append(advance(engine, call, step))
            graphs.append(counter.frame_count)
        named = [(n.replace("_orig_mod.", ""), p) for n, p in engine.module.named_parameters() if p.requires_grad]
        weights = {name: safe_get_full_fp32_param(param).clone() for name, param in named}
        seen = Seen(losses, weights, graphs, breaks())
        engine.destroy()
    return seen


def run_bare(make: Callable[[], nn.Module], loss_of: Callable[[Any, int, int], torch.Tensor], backend: str) -> Seen:
    """Steps of the model alone, compiled by torch; its weights are the gradients of the last step."""
    with counting(backend) as counter:
        model = make()
        call, losses, graphs = torch.compile(model, backend=counter), [], []
        for step in range(STEPS):
            model.zero_grad()
            loss = loss_of(call, step, 0)
            loss.backward()
            losses.append(loss.item())
            graphs.append(counter.frame_count)
        return Seen(losses, {}, graphs, breaks())
