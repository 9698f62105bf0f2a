"""The emulated device's own rules: what is late, what crashes, what is a race, what NCCL asks of its callers."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import emulates, observed
from tests.harness.pool import REPOSITORY

need_compiler()

LINE = re.compile(r"\[[^\]]*?tests/emulated/test_device\.py:(\d+)")  # the innermost line of each side


def on_side(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Start copying `values` on a stream of its own."""
    target, side = torch.empty_like(values, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return target, event


def a_copy_that_is_waited_for() -> None:
    target, event = on_side(torch.ones(1000).pin_memory())
    event.wait()
    assert target.sum().item() == 1000


def a_copy_that_is_asked_for() -> None:
    target, event = on_side(torch.ones(1000).pin_memory())
    asked = [event.query() for _ in range(4)]
    assert asked == [False, False, False, True]
    assert target.sum().item() == 1000


def a_copy_that_nobody_waits_for() -> None:
    target, _ = on_side(torch.ones(1000).pin_memory())
    assert target.sum().isnan().item()


def a_host_buffer_written_too_early() -> None:
    source = torch.ones(1000).pin_memory()
    target, event = on_side(source)
    source.fill_(5)
    event.synchronize()
    assert target.sum().item() == 5000


def a_host_buffer_read_too_early() -> None:
    target = torch.zeros(1000).pin_memory()
    target.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
    assert target.numpy().sum() != 1000
    torch.cuda.synchronize()


def a_host_buffer_read_in_time() -> None:
    target = torch.zeros(1000).pin_memory()
    target.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert target.numpy().sum() == 1000


def memory_freed_in_use() -> None:
    target, event = on_side(torch.ones(1000).pin_memory())
    del target
    event.synchronize()


def memory_freed_in_use_and_recorded() -> None:
    target, event = on_side(torch.ones(1000).pin_memory())
    target.record_stream(torch.cuda.Stream(stream_id=target.device.index or 0, device_index=0, device_type=1))
    source = torch.ones(1000).pin_memory()
    side = torch.cuda.Stream()
    side.wait_event(event)
    torch.cuda.current_stream().wait_event(event)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    target.record_stream(side)
    del target
    torch.cuda.synchronize()


def pages_unlocked_in_use() -> None:
    memory = torch.frombuffer(bytearray(8192), dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    _, event = on_side(memory)
    runtime.cudaHostUnregister(memory.data_ptr())
    event.synchronize()


CLEAN = [
    a_copy_that_is_waited_for,
    a_copy_that_is_asked_for,
    a_host_buffer_read_in_time,
    memory_freed_in_use_and_recorded,
]
SPOILT = [
    (a_copy_that_nobody_waits_for, "RACE on device memory: read by aten::sum"),
    (a_host_buffer_written_too_early, "HOST RACE: the host writes"),
    (a_host_buffer_read_too_early, "HOST RACE: the host reads"),
    (memory_freed_in_use, "FREED in use"),
    (pages_unlocked_in_use, "HOST RACE: the host writes pinned memory (cudaHostUnregister)"),
]


def watched(run: Callable[[], None]) -> list[str]:
    with observed() as seen:
        run()
    return seen.reports


@pytest.mark.parametrize("run", CLEAN, ids=lambda run: run.__name__)
def test_what_is_in_order_is_not_reported(emulated, run):
    assert emulated(1).run(watched, run, timeout=LIMIT)[0] == []


@pytest.mark.parametrize(("run", "words"), SPOILT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_is_out_of_order_is_reported_with_both_lines(emulated, run, words):
    reports = emulated(1).run(watched, run, timeout=LIMIT)[0]
    assert [report for report in reports if report.startswith(words)], reports
    lines = LINE.findall(reports[0])
    assert len(set(lines)) >= 2, reports[0]


def refusals() -> list[str]:
    said = []
    native, device = emulates(), torch.device("cuda")
    for wrong in (
        lambda: torch.ones(3, device=device) + torch.ones(3),
        lambda: torch.ones(3, device=device).numpy(),
        lambda: torch.empty(1 << 20, device=device),
        lambda: torch.cuda.set_device(99),
    ):
        native.set("limit", 1 << 20)
        try:
            wrong()
        except (RuntimeError, TypeError) as error:
            said.append(str(error).splitlines()[0])
        finally:
            native.set("limit", 1 << 34)
    return said


def test_what_a_gpu_refuses(emulated):
    mixed, numpy, memory, ordinal = emulated(1).run(refusals, timeout=LIMIT)[0]
    assert mixed.startswith("Expected all tensors to be on the same device")
    assert "can't convert cuda" in numpy
    assert memory.startswith("CUDA out of memory")
    assert "invalid device ordinal" in ordinal


def test_host_code_that_touches_device_memory_ends_the_process():
    code = (
        "from tests.emulated import device; import ctypes, torch; device.native.watch_host();"
        "x = torch.ones(4, device='cuda'); ctypes.string_at(x.data_ptr(), 4)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == -11 and "the host touches device memory" in done.stderr, done.stderr


def counted() -> dict[str, int]:
    with observed() as seen:
        x = torch.ones(4, device="cuda")
        x.mul_(2)
        x.sum().item()
        x.cpu()
    return seen.counters


def test_what_is_counted(emulated):
    found = emulated(1).run(counted, timeout=LIMIT)[0]
    assert found["wait.item"] == 1 and found["wait.copy to host"] == 1
    assert found["launch"] == 5  # fill, mul, sum, item, copy
    assert found["bytes.copy to host"] == 16


# -- NCCL ------------------------------------------------------------------------------------------------------------


def every_collective() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((size, 2), rank + 1.0, device="cuda")
    total = float(sum(range(1, size + 1)))
    dist.all_reduce(y := x.clone())
    assert y.tolist() == [[total] * 2] * size
    dist.broadcast(y := x.clone(), src=1)
    assert y.eq(2).all()
    dist.reduce(y := x.clone(), dst=0)
    assert y.eq(total if rank == 0 else rank + 1).all()
    out = torch.empty(size * size, 2, device="cuda")
    dist.all_gather_into_tensor(out, x)
    assert out[::size, 0].tolist() == [r + 1.0 for r in range(size)]
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    assert [part[0, 0].item() for part in parts] == [r + 1.0 for r in range(size)]
    own = torch.empty(1, 2, device="cuda")
    dist.reduce_scatter_tensor(own, x)
    assert own.eq(total).all()
    dist.reduce_scatter(own, list(x.split(1)))
    assert own.eq(total).all()
    dist.all_to_all_single(out := torch.empty_like(x), x)
    assert out[:, 0].tolist() == [r + 1.0 for r in range(size)]
    sent = [torch.full((r + 1,), float(rank), device="cuda") for r in range(size)]
    got = [torch.empty(rank + 1, device="cuda") for _ in range(size)]
    dist.all_to_all(got, sent)
    assert [g.mean().item() for g in got] == list(range(size))
    dist.gather(x[0], [torch.empty(2, device="cuda") for _ in range(size)] if rank == 0 else None)
    dist.scatter(own[0], list(x) if rank == 0 else None)
    assert own.eq(1).all()
    dist.barrier()


def messages_in_a_group() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = torch.full((3,), float(rank), device="cuda"), torch.empty(3, device="cuda")
    ring = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    assert y.eq((rank - 1) % size).all()
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        dist.recv(y, 0)
        assert y.eq(0).all()


def coalesced() -> None:
    size = dist.get_world_size()
    ins = [torch.full((2,), dist.get_rank() + i * 1.0, device="cuda") for i in range(3)]
    outs = [torch.empty(2 * size, device="cuda") for _ in ins]
    with dist._coalescing_manager(device=torch.device("cuda", dist.get_rank()), async_ops=True) as group:
        for out, each in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(out, each)
    group.wait()
    assert [out[-1].item() for out in outs] == [size - 1.0 + i for i in range(3)]


def a_work_that_is_waited_for() -> None:
    x = torch.ones(1000, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert emulates().counters().get("wait.event", 0) == 0
    assert x.sum().item() == 1000 * dist.get_world_size()


def a_work_that_nobody_waits_for() -> None:
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x, async_op=True)
    x.sum()


def a_work_that_another_stream_waits_for() -> None:
    x, side = torch.ones(1000, device="cuda"), torch.cuda.Stream()
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    x.sum()


@pytest.mark.parametrize(
    "run", [every_collective, messages_in_a_group, coalesced, a_work_that_is_waited_for], ids=lambda run: run.__name__
)
def test_messages_in_order_are_not_reported(emulated, run):
    assert emulated(2).run(watched, run, timeout=LIMIT) == [[], []]


@pytest.mark.parametrize(
    "run", [a_work_that_nobody_waits_for, a_work_that_another_stream_waits_for], ids=lambda run: run.__name__
)
def test_messages_out_of_order_are_reported_with_both_lines(emulated, run):
    for reports in emulated(2).run(watched, run, timeout=LIMIT):
        assert reports and reports[0].startswith("RACE on device memory: read by aten::sum"), reports
        assert len(set(LINE.findall(reports[0]))) == 2, reports[0]


def another_order() -> None:
    x, y = torch.ones(10, device="cuda"), torch.ones(20, device="cuda")
    if dist.get_rank():
        dist.all_reduce(y)
    else:
        dist.broadcast(x, 0)
    x.sum().item()
    y.sum().item()


def another_shape() -> None:
    x = torch.ones(10 + dist.get_rank(), device="cuda")
    dist.all_reduce(x)
    x.sum().item()


def disagreed(run: Callable[[], None]) -> list[str]:
    with observed() as seen:
        try:
            run()
        except RuntimeError as error:
            seen.extra = str(error)
    assert "NCCL would hang or mix bytes" in seen.extra
    return seen.reports


@pytest.mark.parametrize("run", [another_order, another_shape], ids=lambda run: run.__name__)
def test_ranks_that_disagree_are_told_with_both_lines(emulated, run):
    pool = emulated(2)
    for reports in pool.run(disagreed, run, timeout=LIMIT):
        assert len(re.findall(r"\[tests/emulated/test_device\.py:\d+", reports[0])) == 2, reports
