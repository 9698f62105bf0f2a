"""What is written down of a step on the CPU: kernels with their operations and bytes, memory that comes and goes."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepspeed.ops.fake_tensors import Valueless
from deepspeed.simulator.trace import KERNEL, MARK, HostEvent, Recording
from deepspeed.simulator.trace_recorder import StepRecorder


def recorded_step() -> Recording:
    recording = Recording("step", 0, 1)
    with Valueless(), StepRecorder(recording) as recorder:
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        recorder.mark("forward")
        loss = model(torch.randn(64, 256)).square().mean()
        recorder.mark("backward")
        loss.backward()
        del loss, model
    return recording


def products(recording: Recording) -> list[HostEvent]:
    return [entry for entry in recording.entries if entry.flops]


def test_operations_are_the_products_by_hand() -> None:
    made = products(recorded_step())
    one = 2 * 64 * 256 * 512
    assert [entry.flops for entry in made if entry.where == "forward"] == [one, one]
    assert sum(entry.flops for entry in made if entry.where == "backward") == 3 * one  # the input needs no gradient


def test_bytes_are_of_what_is_read_and_written() -> None:
    recording = Recording("bytes", 0, 1)
    with Valueless(), StepRecorder(recording):
        x, y = torch.empty(1 << 16), torch.empty(1 << 16)
        x + y
        x.add_(y)
        x.copy_(y)
        x.expand(4, 1 << 16).sum(0)
        x.view(256, 256)
    size = 4 << 16
    assert [(e.name, e.nbytes) for e in recording.entries] == [
        ("add", 3 * size), ("add_", 3 * size), ("copy_", 2 * size), ("sum", 2 * size),
    ]  # fmt: skip
    assert all(entry.kind == KERNEL and entry.dtype == "fp32" for entry in recording.entries)


def test_marks_and_memory() -> None:
    recording = recorded_step()
    assert [entry.name for entry in recording.entries if entry.kind == MARK] == ["forward", "backward"]
    held: dict[int, int] = {}
    most = 0
    for block in recording.blocks:
        held[block.number] = block.nbytes
        most = max(most, sum(held.values()))
    weights = 4 * (2 * 256 * 512 + 512 + 256)
    assert most >= 2 * weights  # with the gradients
    assert sum(held.values()) == 0


def test_nothing_is_added_while_it_is_off() -> None:
    recording = Recording("off", 0, 1)
    with Valueless(), StepRecorder(recording) as recorder:
        recorder.on = False
        torch.empty(1 << 16).add_(1)
    assert not recording.entries and [block.nbytes for block in recording.blocks] == [4 << 16, 0]


def test_what_torch_asks_for_shapes_alone_is_neither_memory_nor_a_kernel() -> None:
    recording = Recording("shapes", 0, 1)
    with Valueless(), StepRecorder(recording), FakeTensorMode():
        made = [torch.empty(1 << 16), torch.zeros(1 << 16), torch.arange(1 << 16).float()]
        torch._foreach_add_(made, 1.0)
    assert all(type(tensor).__name__ == "FakeTensor" for tensor in made)
    assert not recording.blocks and not recording.entries
