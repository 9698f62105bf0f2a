"""New values that arrive beside the next forward (`overlap_publish`), on the emulated device: whoever reads waits."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.zero.parameters.local_shard import ArrivingParameter, DeferredAllGather
from deepspeed.zero.parameters.parameter import ManagedParameter
from tests.emulated import runs
from tests.emulated.cells import Cell
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import observed

need_compiler()

TWO = Cell(stage=2, ranks=2, dtype="bf16", small_buckets=True)


@contextlib.contextmanager
def asked(late: bool) -> Iterator[None]:
    """Inside, engines are asked to let new values arrive late, or are not."""
    plain = runs.config_of

    def config_of(cell: Cell) -> dict[str, Any]:
        made = plain(cell)
        made["zero_optimization"]["overlap_publish"] = late
        return made

    with mock.patch.object(runs, "config_of", config_of):
        yield


def arriving(engine: Any) -> int:
    """Groups whose values nobody has waited for."""
    groups = engine.optimizer.groups
    assert all(
        (member.param.__class__ is ArrivingParameter) == (group._arriving is not None)
        for group in groups
        for member in group.members
    )
    return sum(group._arriving is not None for group in groups)


def train(cell: Cell, late: bool) -> runs.Seen:
    """Losses; and how many groups were on their way after each step, and after the forward behind it."""
    with asked(late), observed(cell.own_stream) as seen:
        engine, seen.extra = runs.engine_of(cell), []
        for step in range(runs.STEPS):
            for micro in range(cell.accumulation):
                rank = torch.distributed.get_rank()
                ids, targets = (part.to(engine.device) for part in runs.batch(step, micro, rank))
                loss = engine(ids, targets)
                forward = arriving(engine)
                engine.backward(loss)
                engine.step()
                seen.extra.append((forward, arriving(engine)))
                seen.losses.append(float(loss))
        engine.destroy()
    return seen


@pytest.mark.parametrize(
    "cell",
    [
        Cell(stage=2, ranks=2, dtype="bf16", small_buckets=True, own_stream=True),
        pytest.param(Cell(stage=1, ranks=2, dtype="fp32", small_buckets=True), marks=pytest.mark.slow),
        pytest.param(Cell(stage=1, ranks=4, dtype="fp16", accumulation=2), marks=pytest.mark.slow),
        pytest.param(
            Cell(stage=2, ranks=4, dtype="bf16", small_buckets=True, checkpointing=True), marks=pytest.mark.slow
        ),
        pytest.param(Cell(stage=2, ranks=2, dtype="bf16", tier="cpu", small_buckets=True), marks=pytest.mark.slow),
        pytest.param(Cell(stage=1, ranks=2, dtype="bf16", tier="nvme"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training_is_the_same_and_nothing_waits_for_the_publish(emulated, cell):
    plain, late = (emulated(cell.ranks).run(train, cell, late, timeout=LIMIT) for late in (False, True))
    for one, other in zip(plain, late, strict=True):
        assert one.losses == other.losses and other.reports == []
        assert set(one.extra) == {(0, 0)}
        after = [step for _, step in other.extra]
        assert after[cell.accumulation - 1] > 0, "every publish was waited for in the step"
        assert all(forward == 0 for forward, _ in other.extra)


def _readers() -> dict[str, Callable[[Any, torch.nn.Parameter], Any]]:
    """What reads parameters between a step and the next forward."""

    def stored(value: Any) -> Any:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)

    def moved_aside(engine: Any, param: torch.nn.Parameter) -> torch.Tensor:
        home, side = torch.cuda.current_stream(), torch.cuda.Stream()
        with torch.cuda.stream(side):
            made = param.float().sum()
        home.wait_stream(side)
        return made

    def average(engine: Any, _param: torch.nn.Parameter) -> torch.Tensor:
        kept = [torch.zeros_like(each) for each in engine.module.parameters()]
        torch._foreach_lerp_(kept, [each.detach() for each in engine.module.parameters()], 0.5)
        return torch.stack([each.float().sum() for each in kept])

    def changed(_engine: Any, param: torch.nn.Parameter) -> torch.Tensor:
        with torch.no_grad():
            param.mul_(0.5)
        return param.detach().clone()

    def changed_below(_engine: Any, param: torch.nn.Parameter) -> torch.Tensor:
        param.data.clamp_(-0.01, 0.01)
        return param.detach().clone()

    def by_fragments(_engine: Any, param: torch.nn.Parameter) -> torch.Tensor:
        import deepspeed

        return deepspeed.utils.safe_get_full_fp32_param(param)

    def linear(_engine: Any, param: torch.nn.Parameter) -> torch.Tensor:
        return torch.nn.functional.linear(torch.ones(1, param.shape[1], dtype=param.dtype, device="cuda"), param)

    return {
        "sum": lambda _, param: param.sum(),
        "item": lambda _, param: torch.tensor(param[0, 0].item()),
        "tolist": lambda _, param: torch.tensor(param.tolist()),
        "cpu": lambda _, param: param.cpu(),
        "detach": lambda _, param: param.detach().clone(),
        "data": lambda _, param: param.data.clone(),
        "index": lambda _, param: param[0].clone(),
        "compare": lambda _, param: (param == param).sum(),
        "stack": lambda _, param: torch.stack([param, param]).sum(),
        "norms": lambda engine, _: torch.stack(torch._foreach_norm(list(engine.module.parameters()))),
        "vector": lambda engine, _: torch.nn.utils.parameters_to_vector(engine.module.parameters()).clone(),
        "deep copy": lambda _, param: copy.deepcopy(param).detach(),
        "pickle": lambda _, param: stored(param).detach(),
        "saved": lambda engine, _: next(iter(stored(engine.module.state_dict()).values())),
        "another stream": moved_aside,
        "average": average,
        "changed in place": changed,
        "changed by data": changed_below,
        "master": by_fragments,
        "functional": linear,
        "gradient": lambda _, param: torch.func.grad(lambda weight: weight.square().sum())(param),
        "vmap": lambda _, param: torch.vmap(torch.sum)(param),
        "numpy": lambda _, param: torch.tensor(param.detach().float().cpu().numpy().sum()),
    }


def read_after(late: bool) -> runs.Seen:
    """What each reader sees right after a step, and the losses that follow."""
    with asked(late), observed() as seen:
        engine, seen.extra = runs.engine_of(TWO), {}
        param = next(each for each in engine.module.parameters() if each.dim() == 2)
        for step, (name, read) in enumerate(_readers().items()):
            seen.losses.append(runs.micro_step(engine, step))
            assert (arriving(engine) > 0) == late, name
            seen.extra[name] = read(engine, param).detach().float().cpu()
        engine.destroy()
    return seen


def test_whoever_reads_first_waits(emulated):
    plain, late = (emulated(2).run(read_after, late, timeout=LIMIT) for late in (False, True))
    for one, other in zip(plain, late, strict=True):
        assert other.reports == []
        assert one.losses == other.losses
        for name, value in one.extra.items():
            assert torch.equal(value, other.extra[name]), name


def metadata_of_what_arrives() -> tuple[int, int]:
    """Groups on their way after a step, and after names that tell no values."""
    with asked(True):
        engine = runs.engine_of(TWO)
        runs.micro_step(engine, 0)
        before = arriving(engine)
        for param in engine.module.parameters():
            assert isinstance(param, torch.nn.Parameter) and param.numel() == param.shape.numel()
            assert param.dtype is torch.bfloat16 and param.is_cuda and param.requires_grad and param.is_leaf
            assert param.is_contiguous() and hash(param) == id(param) and param.grad is None
        after = arriving(engine)
        engine.destroy()
    return before, after


def test_metadata_makes_nobody_wait(emulated):
    for before, after in emulated(2).run(metadata_of_what_arrives, timeout=LIMIT):
        assert before == after > 0


def held_view() -> tuple[int, bool]:
    """Groups on their way when a view of each is held, and whether a view shows the new values."""
    with asked(True), observed() as seen:
        engine = runs.engine_of(TWO)
        held = [param.detach() for param in engine.module.parameters()]
        runs.micro_step(engine, 0)
        late = arriving(engine)
        same = all(torch.equal(a, b) for a, b in zip(held, engine.module.parameters(), strict=True))
        engine.destroy()
    return late, same and not seen.reports


def test_a_view_that_somebody_holds_makes_the_step_wait(emulated):
    assert emulated(2).run(held_view, timeout=LIMIT) == [(0, True)] * 2


def written_and_read(late: bool, folder: str) -> runs.Seen:
    """Losses around a checkpoint that is written right after a step, and one that is read right after a later one."""
    with asked(late), observed() as seen:
        engine = runs.engine_of(TWO)
        for step in range(2):
            seen.losses.append(runs.micro_step(engine, step))
            assert (arriving(engine) > 0) == late
            if step == 0:
                engine.save_checkpoint(folder, tag="late")
        engine.load_checkpoint(folder, tag="late")
        seen.losses += [runs.micro_step(engine, step) for step in range(1, 3)]
        engine.destroy()
    return seen


@pytest.mark.slow
def test_checkpoints_are_of_what_has_arrived(emulated, tmp_path):
    for folder, late in (("plain", False), ("late", True)):
        for seen in emulated(2).run(written_and_read, late, str(tmp_path / folder), timeout=LIMIT):
            assert seen.reports == [] and seen.losses[1] == seen.losses[2]
            assert len(set(seen.losses)) == 3


def unordered() -> list[str]:
    """Reports when landing orders nobody."""
    kept = []

    def land(group: DeferredAllGather) -> None:
        kept.append(group._arriving)
        group._arriving = None
        for member in group.members:
            member.param.__class__ = ManagedParameter

    with asked(True), observed() as seen, mock.patch.object(DeferredAllGather, "wait", land):
        engine = runs.engine_of(TWO)
        for step in range(2):
            runs.micro_step(engine, step)
        torch.cuda.synchronize()
    return seen.reports


def test_the_device_reports_a_read_that_does_not_wait(emulated):
    assert any(report for rank in emulated(2).run(unordered, timeout=LIMIT) for report in rank)


def compiled() -> list[int]:
    """Groups on their way after steps of a plain module, and of one that is compiled on one rank alone."""
    with asked(True):
        engine, found = runs.engine_of(TWO), []
        for step in range(2):
            runs.micro_step(engine, step)
            found.append(arriving(engine))
            if torch.distributed.get_rank() == 0:
                engine.module._compiled_call_impl = engine.module._call_impl
        engine.destroy()
    return found


def test_a_compiled_module_waits_in_the_step(emulated):
    (plain, traced), (other, late) = emulated(2).run(compiled, timeout=LIMIT)
    assert plain == other > 0 and traced == 0 and late > 0


class PastTorch(torch.nn.Linear):
    """As a kernel of an extension reads its weight: below its class, so that nothing of Python is asked."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return torch._C._nn.linear(x, self.weight)


class Extended(torch.nn.Module):
    """Layers of an extension; the first to run shares its weight with one that never does, and owns it first."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.first = (PastTorch(64, 64, bias=False) for _ in range(2))
        self.first.weight = self.idle.weight
        self.blocks = torch.nn.ModuleList(PastTorch(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def extended(late: bool, outside: bool = False) -> runs.Seen:
    """Losses of a model of extensions, each step's parameters read past torch behind it if asked."""
    import deepspeed

    with asked(late), observed() as seen:
        torch.manual_seed(0)
        model = Extended()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=runs.config_of(TWO))
        x = torch.ones(2, 64, dtype=torch.bfloat16, device=engine.device) + torch.distributed.get_rank()
        for _ in range(3):
            loss = engine(x)
            engine.backward(loss)
            engine.step()
            assert (arriving(engine) > 0) == late
            if outside:
                with torch._C.DisableTorchFunctionSubclass():
                    torch.sum(model.idle.weight)
            seen.losses.append(float(loss))
        engine.destroy()
    return seen


def test_a_kernel_of_an_extension_finds_its_weight_in_its_modules_forward(emulated):
    plain, late = (emulated(2).run(extended, late, timeout=LIMIT) for late in (False, True))
    for one, other in zip(plain, late, strict=True):
        assert one.losses == other.losses and len(set(one.losses)) == 3 and other.reports == []


def test_what_reads_past_torch_outside_of_a_forward_is_seen_by_nobody(emulated):
    """Why the key is a promise, and is not set by itself: no code of Python's runs between such a reader and memory."""
    assert all(seen.reports for seen in emulated(2).run(extended, True, True, timeout=LIMIT))
    assert not any(seen.reports for seen in emulated(2).run(extended, False, True, timeout=LIMIT))
