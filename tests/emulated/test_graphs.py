"""CUDA graphs on the emulated device: what is captured is done by replays alone, and what CUDA refuses is refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import Seen, emulates, observed

need_compiler()

LINE = re.compile(r"tests/emulated/test_graphs\.py:(\d+)")


def captured(function: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """A graph of `function`, and what it returned while it was captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = function()
    return graph, result


def device_ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cuda")


# -- programs that are right -----------------------------------------------------------------------------------------


def a_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).cuda()
    source, static = torch.zeros(3, 8).pin_memory(), device_ones(3, 8)
    with torch.no_grad():
        graph, out = captured(lambda: model(static))
        assert out.isnan().all()
        for seed in range(3):
            source.copy_(torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)))
            static.copy_(source, non_blocking=True)
            graph.replay()
            torch.testing.assert_close(out.cpu(), model(static).cpu(), rtol=0, atol=0)


def values_in_place() -> None:
    x, lists = device_ones(4), [device_ones(2), device_ones(3)]

    def add() -> None:
        x.add_(1).mul_(2)
        torch._foreach_add_(lists, 5.0)

    graph, _ = captured(add)
    assert x.eq(1).all() and lists[0].eq(1).all()  # nothing has happened yet
    graph.replay()
    graph.replay()
    assert x.eq(10).all() and lists[1].eq(11).all()


def views_and_outputs_that_grow() -> None:
    x, out = torch.arange(6.0, device="cuda").view(2, 3), torch.empty(0, device="cuda")

    def run() -> torch.Tensor:
        torch.add(x, 1, out=out)
        return torch.cat([part.t().contiguous().view(-1) for part in out.split(1)]).view(3, 2)[:, 0]

    graph, column = captured(run)
    x.mul_(2)
    graph.replay()
    assert column.tolist() == [1.0, 5.0, 9.0] and out.tolist() == [[1, 3, 5], [7, 9, 11]]


def a_fork_that_is_joined() -> None:
    x, side = device_ones(4), torch.cuda.Stream()

    def run() -> torch.Tensor:
        main = torch.cuda.current_stream()
        y = x + 1
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y * 3
        main.wait_stream(side)
        z.record_stream(main)
        return y + z

    graph, out = captured(run)
    graph.replay()
    assert out.eq(8).all()


def random_numbers() -> None:
    x = device_ones(1000)
    torch.cuda.manual_seed(3)
    first = torch.rand(4, device="cuda").tolist()
    torch.cuda.manual_seed(3)
    graph, out = captured(lambda: nn.functional.dropout(x))
    assert torch.rand(4, device="cuda").tolist() == first  # a capture draws nothing
    graph.replay()
    one = out.cpu()
    graph.replay()
    assert not torch.equal(one, out.cpu()) and set(one.tolist()) == {0.0, 2.0}


def a_copy_out() -> None:
    x, host = device_ones(4), torch.zeros(4).pin_memory()
    graph, _ = captured(lambda: host.copy_(x * 2, non_blocking=True))
    assert host.tolist() == [0] * 4
    graph.replay()
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [2] * 4


def callables_of_a_model() -> None:
    def losses(graphed: bool) -> list[float]:
        torch.manual_seed(1)
        model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if graphed:
            model = torch.cuda.make_graphed_callables(model, (torch.zeros(5, 4, device="cuda"),))
        result = []
        for step in range(4):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).cuda()
            loss = model(x).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            result.append(loss.item())
        return result

    assert losses(True) == losses(False)


def kernels_of_the_host() -> None:
    from tests.emulated import device

    x, y = device_ones(4), torch.zeros(4, device="cuda")
    graph, _ = captured(lambda: device.launch_kernel("double", [x, y], [False, True], lambda t: t[1].copy_(t[0] * 2)))
    assert y.eq(0).all()
    x.fill_(4)
    graph.replay()
    assert y.eq(8).all()


def launches_of_a_replay() -> None:
    x = device_ones(4)
    graph, _ = captured(lambda: (x + 1) * 2 - 3)
    native = emulates()
    native.clear()
    graph.replay()
    counters = native.counters()
    assert counters["launch"] == 1 and counters["graph.nodes"] == 3, counters


def memory_of_pools() -> None:
    native, device = emulates(), torch.cuda
    device.synchronize()
    device.empty_cache()
    before, x = device.memory_reserved(), device_ones(1 << 16)
    kept, pool = before + x.nbytes, device.graph_pool_handle()
    one, y = captured(lambda: (x + 1) * 2 - 1, pool=pool)  # a result and two more on the way, which use each other's
    size = native.bytes_of_pool(pool)
    assert device.memory_reserved() == kept + size and 2 * x.nbytes <= size < 3 * x.nbytes + 4096
    two, z = captured(lambda: (x - 1) * 4, pool=pool)  # takes what the first has no use for when it has ended
    assert native.bytes_of_pool(pool) <= size + x.nbytes and device.memory_reserved() == kept + native.bytes_of_pool(
        pool
    )
    one.replay()
    two.replay()
    assert y.eq(3).all() and z.eq(0).all()
    one.reset()
    del two
    device.empty_cache()
    assert device.memory_reserved() == kept + y.nbytes + z.nbytes  # tensors outlive their graphs
    del y, z
    device.empty_cache()
    assert device.memory_reserved() == kept


def an_empty_pool_and_its_limit() -> None:
    native, x = emulates(), device_ones(1 << 10)
    graph, _ = captured(lambda: x.expand(64, -1) + 1)
    del graph, _
    native.set("limit", 1 << 16)
    try:
        captured(lambda: x.expand(64, -1) + 1)
    except RuntimeError as error:
        assert str(error).startswith("CUDA out of memory"), error
    else:
        raise AssertionError("memory of graphs is not counted")
    finally:
        native.set("limit", 1 << 34)


RIGHT = [
    *(a_model, values_in_place, views_and_outputs_that_grow, a_fork_that_is_joined, random_numbers, a_copy_out),
    *(callables_of_a_model, kernels_of_the_host, launches_of_a_replay, memory_of_pools, an_empty_pool_and_its_limit),
]


def watched(run: Callable[[], None]) -> Seen:
    with observed() as seen:
        try:
            run()
        except RuntimeError as error:
            seen.extra = str(error)
        assert not torch.cuda.is_current_stream_capturing()
    return seen


def all_right() -> list[tuple[str, list[str], Any]]:
    return [(run.__name__, seen.reports, seen.extra) for run in RIGHT for seen in [watched(run)]]


def test_replays_do_what_was_captured(emulated):
    for name, reports, error in emulated(1).run(all_right, timeout=LIMIT)[0]:
        assert reports == [] and error is None, (name, reports, error)


# -- faults ----------------------------------------------------------------------------------------------------------


def a_wait_for_the_device() -> None:
    captured(torch.cuda.synchronize)


def a_wait_for_the_stream() -> None:
    x = device_ones(4)
    captured(lambda: (x + 1, torch.cuda.current_stream().synchronize()))


def a_number_read() -> None:
    x = device_ones(4)
    captured(lambda: (x + 1).sum().item())


def a_shape_that_values_tell() -> None:
    x = device_ones(4)
    captured(lambda: x[x > 0])


def another_shape_that_values_tell() -> None:
    x = device_ones(4)
    captured(x.nonzero)


def a_copy_to_the_host() -> None:
    x = device_ones(4)
    captured((x + 1).cpu)


def a_copy_from_pageable_memory() -> None:
    x = device_ones(4)
    captured(lambda: x.copy_(torch.zeros(4), non_blocking=True))


def a_copy_that_waits() -> None:
    x, host = device_ones(4), torch.zeros(4).pin_memory()
    captured(lambda: x.copy_(host))


def an_index_of_the_host() -> None:
    x = device_ones(4)
    captured(lambda: x[torch.tensor([0, 1])])


def a_stream_that_did_not_join() -> None:
    x, side = device_ones(4), torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(side):
            x.add_(1)

    captured(run)


def memory_of_another_stream() -> None:
    side = torch.cuda.Stream()

    def run() -> None:
        with torch.cuda.stream(side):
            torch.empty(4, device="cuda")

    captured(run)


def a_stream_that_is_not_joined_again() -> None:
    x, side = device_ones(4), torch.cuda.Stream()

    def run() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    captured(run)


def an_event_from_before() -> None:
    event = torch.cuda.Event()
    event.record()
    captured(lambda: event.wait())


def an_event_of_the_capture() -> None:
    event, x = torch.cuda.Event(), device_ones(4)
    graph, _ = captured(lambda: (x.add_(1), event.record()))
    graph.replay()
    event.synchronize()


def a_question_from_another_thread() -> None:
    event, x, said = torch.cuda.Event(), device_ones(4), []
    event.record()

    def ask() -> None:
        try:
            event.query()
        except RuntimeError as error:
            said.append(str(error))

    def run() -> None:
        x.add_(1)
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    captured(run, capture_error_mode="thread_local")  # nobody else's business
    assert said == []
    captured(run)


def a_race_within() -> None:
    x, side = device_ones(4), torch.cuda.Stream()

    def run() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x.mul_(2)
        x.add_(1)
        main.wait_stream(side)

    captured(run)


def an_input_that_is_freed() -> None:
    inputs = [device_ones(4)]
    graph, _ = captured(lambda: inputs[0] + 1)
    inputs.clear()
    graph.replay()


def a_pinned_input_that_is_freed() -> None:
    x, sources = device_ones(4), [torch.ones(4).pin_memory()]
    graph, _ = captured(lambda: x.copy_(sources[0], non_blocking=True))
    graph.replay()
    torch.cuda.synchronize()
    sources.clear()
    graph.replay()


def an_output_that_is_read_too_late() -> None:
    x, side = device_ones(4), torch.cuda.Stream()
    graph, out = captured(lambda: x + 1)
    graph.replay()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out.sum()
    graph.replay()


def an_output_that_is_read_too_early() -> None:
    x, side = device_ones(4), torch.cuda.Stream()
    graph, out = captured(lambda: x + 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    out.sum()


def two_graphs_in_one_pool_at_once() -> None:
    x, pool, side = device_ones(4), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs = [captured(lambda: ((x + 1) * 2).sum(), pool=pool)[0] for _ in range(2)]
    torch.cuda.synchronize()
    graphs[0].replay()
    with torch.cuda.stream(side):
        graphs[1].replay()


def a_pinned_input_that_is_written_too_early() -> None:
    x, host = device_ones(4096), torch.ones(4096).pin_memory()
    graph, _ = captured(lambda: x.copy_(host, non_blocking=True))
    graph.replay()
    host.fill_(2)


def a_cache_that_is_emptied() -> None:
    captured(torch.cuda.empty_cache)


def the_default_stream() -> None:
    torch.cuda.CUDAGraph().capture_begin()


UNSUPPORTED, PINNED = "cudaErrorStreamCaptureUnsupported", "Cannot copy between CPU and CUDA tensors"
WRONG = [
    (a_wait_for_the_device, UNSUPPORTED, "CAPTURE"),
    (a_wait_for_the_stream, UNSUPPORTED, "CAPTURE"),
    (a_number_read, UNSUPPORTED, "CAPTURE"),
    (a_shape_that_values_tell, UNSUPPORTED, "CAPTURE"),
    (another_shape_that_values_tell, UNSUPPORTED, "CAPTURE"),
    (a_copy_to_the_host, PINNED, "CAPTURE"),
    (a_copy_from_pageable_memory, PINNED, "CAPTURE"),
    (a_copy_that_waits, UNSUPPORTED, "CAPTURE"),
    (an_index_of_the_host, PINNED, "CAPTURE"),
    (a_stream_that_did_not_join, "has not joined the capture", "CAPTURE"),
    (memory_of_another_stream, "has not joined the capture", "CAPTURE"),
    (a_stream_that_is_not_joined_again, "cudaErrorStreamCaptureUnjoined", "CAPTURE"),
    (an_event_from_before, "cudaErrorStreamCaptureIsolation", "CAPTURE"),
    (an_event_of_the_capture, "cudaErrorCapturedEvent", None),
    (a_question_from_another_thread, UNSUPPORTED, "CAPTURE"),
    (a_race_within, None, "RACE on device memory: read by aten::add"),
    (an_input_that_is_freed, "was freed", "GRAPH"),
    (a_pinned_input_that_is_freed, "was freed", "GRAPH"),
    (an_output_that_is_read_too_late, None, "RACE on device memory: write by aten::add"),
    (an_output_that_is_read_too_early, None, "RACE on device memory: read by aten::sum"),
    (two_graphs_in_one_pool_at_once, None, "RACE on device memory"),
    (a_pinned_input_that_is_written_too_early, None, "HOST RACE: the host writes"),
    (a_cache_that_is_emptied, UNSUPPORTED, "CAPTURE"),
    (the_default_stream, "non-default stream", None),
]


def all_wrong() -> list[Seen]:
    return [watched(run) for run, *_ in WRONG]


def test_what_cuda_refuses_is_refused_by_name_and_line(emulated):
    for (run, words, prefix), seen in zip(WRONG, emulated(1).run(all_wrong, timeout=LIMIT)[0], strict=True):
        error = seen.extra or ""
        assert (words is None and not error) or (words is not None and words in error), (run.__name__, error)
        if prefix is None:
            assert seen.reports == [], (run.__name__, seen.reports)
            continue
        assert seen.reports and seen.reports[0].startswith(prefix), (run.__name__, seen.reports)
        assert len(set(LINE.findall(seen.reports[0]))) >= 2, (run.__name__, seen.reports[0])


# -- NCCL ------------------------------------------------------------------------------------------------------------


def sums() -> list[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, gathered = device_ones(4), torch.empty(4 * size, device="cuda")
    dist.all_reduce(x.clone())  # its communicator is there

    def run() -> torch.Tensor:
        y = x * (rank + 1)
        dist.all_reduce(y)
        dist.all_gather_into_tensor(gathered, y + rank)
        return gathered * 2

    with observed() as seen:
        graph, out = captured(run)
        for step in range(3):
            x.fill_(step + 1)
            graph.replay()
            total = (step + 1) * size * (size + 1) / 2
            assert out.tolist() == [2 * (total + r) for r in range(size) for _ in range(4)]
    return seen.reports


def test_messages_in_a_graph(emulated):
    assert emulated(2).run(sums, timeout=LIMIT) == [[], []]


def another_order() -> Seen:
    x, y = device_ones(4), device_ones(8)
    dist.all_reduce(x.clone())

    def run() -> None:
        for tensor in (x, y) if dist.get_rank() else (y, x):
            dist.all_reduce(tensor)

    def play() -> None:
        graph, _ = captured(run)
        assert emulates().reports() == []  # only replays send
        graph.replay()
        torch.cuda.synchronize()

    return watched(play)


def test_ranks_whose_graphs_have_another_order(emulated):
    for seen in emulated(2).run(another_order, timeout=LIMIT):
        assert "NCCL would hang or mix bytes" in seen.extra
        assert seen.reports[0].startswith("MISMATCH") and len(LINE.findall(seen.reports[0])) >= 2, seen.reports


def a_message_that_nobody_waits_for() -> Seen:
    x = device_ones(4)
    dist.all_reduce(x.clone())
    return watched(lambda: captured(lambda: dist.all_reduce(x, async_op=True)) and None)


def test_a_captured_message_has_to_be_waited_for(emulated):
    for seen in emulated(2).run(a_message_that_nobody_waits_for, timeout=LIMIT):
        assert "cudaErrorStreamCaptureUnjoined" in seen.extra and len(LINE.findall(seen.reports[0])) >= 2, seen
