"""Names for the search of a fault, and prints of several processes."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from deepspeed.utils import debug


@pytest.fixture(autouse=True)
def forgotten():
    yield
    debug.debug_clear_module_and_param_names()


def test_modules_and_parameters_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1, bias=False)))
    weight = model[1][1].weight
    assert debug.debug_module2name(model[0]) == debug.debug_param2name(weight) == "unknown"
    debug.debug_extract_module_and_param_names(model)
    assert debug.debug_module2name(model) == "" and debug.debug_module2name(model[1][1]) == "1.1"
    assert debug.debug_module2name_class(model[0]) == "name=0 Linear"
    assert debug.debug_module2name_id(model[0]) == f"name=0 id={id(model[0])}"
    assert debug.debug_param2name_id(weight) == "name=1.1.weight id=none"
    assert debug.debug_param2name_id_numel(weight) == "name=1.1.weight id=none numel=3"
    shaped = debug.debug_param2name_id_shape(weight)
    assert shaped == "name=1.1.weight id=none shape=torch.Size([1, 3])"
    assert debug.debug_param2name_id_shape_device(weight) == f"{shaped} device=cpu"
    assert debug.debug_param2name_id_shape_status(weight) == f"{shaped} status=ZeroParamStatus.AVAILABLE"
    other = nn.Linear(2, 2)
    assert debug.debug_param2name(nn.Parameter(weight.detach().clone())) == "unknown"  # by object, not by value
    debug.debug_extract_module_and_param_names(other)
    assert debug.debug_param2name(other.bias) == "bias" and debug.debug_param2name(weight) == "1.1.weight"
    debug.debug_clear_module_and_param_names()
    assert debug.debug_param2name(weight) == debug.debug_module2name(model) == "unknown"


def test_names_keep_nothing_alive() -> None:
    import weakref

    model = nn.Linear(2, 2)
    debug.debug_extract_module_and_param_names(model)
    seen = [weakref.ref(model), weakref.ref(model.weight)]
    del model
    assert [ref() for ref in seen] == [None, None]


def test_lines_of_processes_do_not_mix(tmp_path: Path) -> None:
    path, parts, lines, children = tmp_path / "out", 40, 60, []
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in range(3):
        child = os.fork()
        if child == 0:  # every part of a line is a write of its own
            os.sched_yield()
            import sys

            sys.stdout = io.TextIOWrapper(os.fdopen(handle, "wb", buffering=0), write_through=True)
            try:
                for _ in range(lines):
                    debug.printflock(*[number] * parts)
            finally:
                os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    whole = [" ".join([str(number)] * parts) for number in range(3)]
    assert sorted(path.read_text().splitlines()) == sorted(whole * lines)


def test_a_file_for_each_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    debug.log_rank_file(3, "a", 1, {"b": 2})
    debug.log_rank_file(3, "later")
    assert (tmp_path / "log_rank_3.txt").read_text() == "a\n1\n{'b': 2}\nlater\n"


def test_prints_that_are_off_until_forced(capfd: pytest.CaptureFixture[str]) -> None:
    debug.print_rank("x")
    debug.print_rank0("x")
    assert capfd.readouterr().out == ""
    debug.print_rank("x", 1, force=True)
    debug.print_rank0("y", force=True)
    assert capfd.readouterr().out == "[rank 0] x 1\ny\n"


def test_the_graph_of_a_backward(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    debug.debug_extract_module_and_param_names(model)
    hidden = model(torch.ones(1, 2))
    debug.print_backward_tensors((hidden * hidden).sum())
    said = capfd.readouterr().out.splitlines()
    assert [line.removeprefix("backward: ") for line in said[:4]] == [
        "SumBackward0", "MulBackward0", "TanhBackward0", "AddmmBackward0",
    ]  # fmt: skip
    assert said.count("backward: TanhBackward0") == 1  # once, though it is reached twice
    assert {line.split()[1] for line in said if line.startswith("  tensor: ")} == {"name=0.weight", "name=0.bias"}
    debug.print_backward_tensors(torch.ones(1))
    assert capfd.readouterr().out == ""
