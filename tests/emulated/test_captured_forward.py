"""`enable_cuda_graph` of `init_inference` on the emulated device: forwards are replayed where they can be."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

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


class Lora(nn.Module):
    """A layer with the switches of PEFT's LoRA layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base_layer = nn.Linear(8, 4)
        self.lora_A = nn.ModuleDict({"one": nn.Linear(8, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"one": nn.Linear(2, 4, bias=False)})
        self.dropout = nn.Dropout(1.0)
        self.disable_adapters, self.merged_adapters, self.active_adapters = False, [], ["one"]
        self.scaling = {"one": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.dropout(self.base_layer(x))
        if self.disable_adapters or self.merged_adapters:
            return out
        return out + self.scaling["one"] * self.lora_B["one"](self.lora_A["one"](x))


def switched() -> tuple[list[str], dict[str, int]]:
    engine, x = engine_of(Lora()), torch.ones(2, 8, device="cuda")
    layer, wrong = engine.module, []

    def compare(name: str) -> None:
        for _ in range(2):  # the first call of a kind runs eagerly
            if not torch.allclose(engine(x).cpu(), layer(x).cpu()):
                wrong.append(name)

    with observed() as seen, torch.no_grad():
        compare("as made")
        layer.disable_adapters = True
        compare("disabled")
        layer.disable_adapters = False
        compare("enabled")
        layer.merged_adapters = ["one"]
        compare("merged")
        layer.merged_adapters, layer.scaling = [], {"one": 3.0}
        compare("scaled")
        layer.dropout.train()
        compare("a part trains")
        layer.dropout.eval()
        compare("no part trains")
    assert seen.reports == []
    engine.destroy()
    return wrong, seen.counters


def test_switches_of_adapters_and_parts_are_followed(emulated):
    wrong, counters = emulated(1).run(switched, timeout=LIMIT)[0]
    assert wrong == [] and counters["graph.replays"] == 5 + 4  # five states, two of which came again


def in_threads() -> list[bool]:
    """Two threads replay one graph; each waits, between its inputs' copy and the replay, for the other one."""
    from deepspeed.inference import captured_forward

    engine = engine_of(Encoder())
    inputs = [torch.full((2, 8), float(i + 1)).cuda() for i in range(2)]
    with torch.no_grad():
        wanted = [engine.module(x)["out"].cpu() for x in inputs]
        engine(inputs[0])
    real, both, results = captured_forward.get_accelerator(), threading.Barrier(2), [torch.zeros(0)] * 2

    class Waiting:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def replay_graph(self, graph: Any) -> None:
            try:
                both.wait(timeout=1)
            except threading.BrokenBarrierError:
                pass  # the other one waits for its turn
            real.replay_graph(graph)

    def call(i: int) -> None:
        with torch.no_grad():
            results[i] = engine(inputs[i])["out"].cpu()

    with mock.patch.object(captured_forward, "get_accelerator", Waiting):
        threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    engine.destroy()
    return [torch.equal(x, y) for x, y in zip(results, wanted, strict=True)]


def test_threads_take_turns(emulated):
    assert emulated(1).run(in_threads, timeout=LIMIT) == [[True, True]]


def on_streams() -> tuple[list[bool], list[str]]:
    engine = engine_of(Encoder())
    inputs = [torch.full((2, 8), float(i + 1)).cuda() for i in range(4)]
    with torch.no_grad():
        wanted = [engine.module(x)["out"].cpu() for x in inputs]
    torch.cuda.synchronize()
    with observed() as seen, torch.no_grad():
        streams, results = [torch.cuda.Stream() for _ in range(2)], []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for i, x in enumerate(inputs):
            with torch.cuda.stream(streams[i % 2]):
                results.append(engine(x)["out"])
        torch.cuda.synchronize()
    engine.destroy()
    return [torch.equal(x.cpu(), y) for x, y in zip(results, wanted, strict=True)], seen.reports


def test_calls_on_two_streams_come_one_after_another(emulated):
    assert emulated(1).run(on_streams, timeout=LIMIT) == [([True] * 4, [])]


def under_autocast() -> tuple[list[str], dict[str, int], list[str], list[str]]:
    engine, x, dtypes = engine_of(Encoder()), torch.randn(2, 8).cuda(), []

    def run() -> None:
        for on in (True, True, False, False, True):
            with torch.autocast("cuda", torch.bfloat16, enabled=on):
                dtypes.append(str(engine(x)["out"].dtype))

    with observed() as seen, torch.no_grad():
        _, lines = lines_of(run)
    engine.destroy()
    return dtypes, seen.counters, seen.reports, lines


def test_autocast_is_obeyed(emulated):
    dtypes, counters, reports, lines = emulated(1).run(under_autocast, timeout=LIMIT)[0]
    low, high = "torch.bfloat16", "torch.float32"
    assert dtypes == [low, low, high, high, low] and counters["graph.replays"] == 1 and reports == []
    (line,) = lines
    assert "is called as it is: autocast is on" in line


def beyond_the_last_kind() -> tuple[list[bool], list[str]]:
    from deepspeed.inference import captured_forward

    engine, x = engine_of(Encoder()), torch.ones(2, 8, device="cuda")
    with mock.patch.object(captured_forward, "MOST_KINDS", 1):
        graded, lines = lines_of(lambda: [engine(x, factor=f)["out"].requires_grad for f in (1.0, 2.0, 2.0, 1.0)])
    engine.destroy()
    return graded, lines


def test_kinds_beyond_the_last_run_as_they_are(emulated):
    graded, lines = emulated(1).run(beyond_the_last_kind, timeout=LIMIT)[0]
    assert graded == [False, True, True, False]
    assert len(lines) == 1 and "1 kinds of calls" in lines[0]


def modes() -> list[bool]:
    """Whether a call is right: first in inference mode, then without gradients, then in inference mode again."""
    engine, plain, right = engine_of(Encoder()), Encoder().cuda().eval(), []
    x = calls()[0][0].cuda()
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        for _ in range(2):
            with mode():
                right.append(torch.equal(engine(x)["out"], plain(x)["out"]))
    return right


def test_inference_mode_has_graphs_of_its_own(emulated: Any) -> None:
    assert emulated(1).run(modes, timeout=LIMIT)[0] == [True] * 6
