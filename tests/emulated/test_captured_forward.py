"""`enable_cuda_graph` of `init_inference` on the emulated device: forwards are replayed where they can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.foundation.pytree import map_tensors
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import emulates, observed
from tests.emulated.test_captured import lines_of

need_compiler()


class Encoder(nn.Module):
    """Two layers; one looks at values if told so."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.looks = nn.Linear(8, 16), nn.Linear(16, 4), looks
        self.calls = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, factor: float = 1.0) -> dict[str, Any]:
        self.calls += 1
        hidden = self.first(x).relu() * factor
        if mask is not None:
            hidden = hidden * mask[..., None]
        if self.looks and hidden.isnan().any():
            raise ValueError("not finite")
        return {"out": self.second(hidden), "none": None}


def engine_of(model: nn.Module, **keys: Any) -> Any:
    import deepspeed

    return deepspeed.init_inference(model, {"dtype": "fp32", "enable_cuda_graph": True, **keys})


def calls() -> list[tuple[torch.Tensor, dict[str, Any]]]:
    draw = torch.Generator().manual_seed(1)
    made = []
    for size in (3, 3, 5, 3, 5, 3):
        mask = torch.randint(0, 2, (size,), generator=draw).float()
        made.append((torch.randn(size, 8, generator=draw), {"mask": mask} if size == 5 else {"factor": 2.0}))
    return made


def results(looks: bool) -> tuple[list[Any], int, dict[str, int], list[str], list[str]]:
    engine, plain, said = engine_of(Encoder(looks)), Encoder(), []
    with observed() as seen, torch.no_grad():
        native = emulates()
        native.clear()

        def run() -> None:
            for x, options in calls():
                there = map_tensors(torch.Tensor.cuda, options)
                said.append(engine(x.cuda(), **there))  # no later call overwrites it
            engine.module.second.weight.data = engine.module.second.weight.data * 2  # moves
            said.append(engine(calls()[0][0].cuda(), factor=2.0))

        _, lines = lines_of(run)
        pairs = [(each["out"].cpu(), plain(x, **o)["out"]) for each, (x, o) in zip(said, calls(), strict=False)]
        doubled = said[-1]["out"].cpu() - plain.second.bias, 2 * (pairs[0][1] - plain.second.bias)
    for ours, theirs in (*pairs, doubled):
        torch.testing.assert_close(ours, theirs)
    assert all(each["none"] is None and not each["out"].requires_grad for each in said)
    count = engine.module.calls
    engine.destroy()
    return [len(said)], count, seen.counters, seen.reports, lines


def test_forwards_are_replayed_and_their_results_stay(emulated):
    (number,), count, counters, reports, lines = emulated(1).run(results, False, timeout=LIMIT)[0]
    assert number == 7 and counters["graph.replays"] == 4  # two kinds ran and were captured, one of them twice
    assert count == 2 * 3 and reports == [] and lines == []


def test_a_forward_that_looks_at_values_is_called_as_it_is(emulated):
    _, count, counters, reports, lines = emulated(1).run(results, True, timeout=LIMIT)[0]
    assert "graph.replays" not in counters and count == 7 + 1
    assert len(lines) == 1 and "cannot be captured" in lines[0] and len(reports) == 1, (lines, reports)


def hooked() -> int:
    engine = engine_of(Encoder())
    engine.profile_model_time()
    with observed() as seen:
        for _ in range(3):
            engine(torch.ones(2, 8, device="cuda"))
        times = engine.model_times()
    engine.destroy()
    assert seen.reports == [] and "graph.replays" not in seen.counters
    return len(times)


def test_hooks_are_called(emulated):
    assert emulated(1).run(hooked, timeout=LIMIT) == [3]


def test_a_cpu_says_that_there_are_no_graphs():
    (line,) = lines_of(lambda: engine_of(Encoder()))[1]
    assert line.endswith("enable_cuda_graph has no effect: there are graphs on CUDA only")
