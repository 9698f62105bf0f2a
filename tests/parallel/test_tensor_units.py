"""Units of a plan, and what comparing them sees and takes: ways of calling them, inner regions, memory, counts."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.collectives.autograd import reduce_from
from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.errors import TensorParallelError
from deepspeed.profiling.live_memory import LiveMemory
from deepspeed.tensor_parallel import parallelize
from deepspeed.tensor_parallel.layers import RowParallel
from deepspeed.tensor_parallel.plan import make_plan
from deepspeed.tensor_parallel.plan_file import read_plan, write_plan
from deepspeed.tensor_parallel.verify import Watch, dims_of, part_of, sketches
from deepspeed.zero.layout.placement import Cut, Placement, place
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import raises

WIDTH, INNER = 8, 16


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks in a stream, of which each is handed what `handed` says."""

    example_input_array: Any = torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(0))

    def __init__(self, kind: Callable[[], nn.Module] = Pair, count: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(count))

    def handed(self) -> tuple[Any, ...]:
        return ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x, *self.handed())
        return x


# -- a region inside a unit ------------------------------------------------------------------------------------------


class Gated(Pair):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        return self.down(hidden if gate is None else hidden * gate)


class Parallel(nn.Module):
    """A unit with a region in a module of its own, which is handed the unit's `scale` as its `gate`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), Gated()

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) + self.inner(x * 2, gate=scale * 1.5)


class Scaled(Stack):
    def __init__(self) -> None:
        super().__init__(Parallel)
        self.register_buffer("scale", torch.rand(1, 1, INNER) + 0.5)

    def handed(self) -> tuple[Any, ...]:
        return (self.scale,)


def same_as(model: Any, dense: Any, **inputs: Any) -> None:
    given = inputs or {"x": model.example_input_array}
    wanted = dense(**given)
    assert (model(**given) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def inner_region(path: str) -> None:
    for file in (None, path):
        model = Scaled()
        dense = copy.deepcopy(model)
        plan = parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"), plan_file=file)
        assert not plan.whole and [unit.name for unit in plan.units] == ["blocks.0", "blocks.1"], plan.table()
        inner = next(one for one in plan.units[0].regions if one.shares.region.home)
        assert list(inner.shares.inputs) == ["gate"]
        same_as(model, dense)


def test_a_region_inside_a_unit_is_handed_its_channels(workers: Any, tmp_path: Any) -> None:
    write_plan(tmp_path / "plan.json", Scaled(), 2)
    workers(2).run(inner_region, str(tmp_path / "plan.json"))
    with pytest.raises(TensorParallelError, match=r"'blocks.0.inner' is given no tensor 'scale'; it is given x, gate"):
        text = (tmp_path / "plan.json").read_text().replace('"gate":', '"scale":')
        (tmp_path / "other.json").write_text(text)
        read_plan(tmp_path / "other.json", Scaled(), 2, 0)


# -- ways of calling -------------------------------------------------------------------------------------------------


class Sorting(Pair):
    """Reads a number of its own where a flag says so."""

    groups = 4

    def forward(self, x: torch.Tensor, grouped: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if grouped:
            hidden = hidden.unflatten(-1, (self.groups, INNER // 4)).softmax(-1).flatten(-2)
        return self.down(hidden)


class Masked(nn.Module):
    """Takes padding, of which its blocks are told by a flag alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(30, WIDTH), nn.ModuleList(Sorting() for _ in range(2))

    @property
    def example_input_array(self) -> Any:
        return {"input_ids": torch.arange(8)[None]}

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x, attention_mask is not None)
        return x


def flagged() -> None:
    model = Masked()
    dense, ids = copy.deepcopy(model), torch.arange(10)[None]
    plan = parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    assert not plan.whole, plan.table()
    same_as(model, dense, input_ids=ids)
    same_as(model, dense, input_ids=ids, attention_mask=torch.ones_like(ids))


def test_ways_that_differ_in_a_flag_are_two(workers: Any) -> None:
    workers(2).run(flagged)


class Planted(Sorting):
    """Wrong once it is cut, beside padding alone: in its result, or in its gradient."""

    result, gradient = 1.0, 1.0

    def forward(self, x: torch.Tensor, grouped: bool = False) -> torch.Tensor:
        made = super().forward(x, grouped)
        if isinstance(self.down, RowParallel) and grouped:
            made = made * self.result
            made = made * self.gradient + (made * (1 - self.gradient)).detach()
        return made


def planted() -> None:
    for what, factor in (("result", 1.01), ("gradient", 0.99)):
        model: Any = Masked()
        model.blocks[1].__class__ = Planted
        setattr(model.blocks[1], what, factor)
        with raises(TensorParallelError, "'blocks.1'", "in way 2 of 2", "output 0" if what == "result" else "gradient"):
            parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"))


def test_what_is_wrong_beside_padding_alone_is_found(workers: Any) -> None:
    workers(2).run(planted)


def doubled(self: Any, input: torch.Tensor, *args: Any) -> torch.Tensor:
    """A row-parallel layer, right but for the gradient of its weight."""
    weight = 2 * self.weight - self.weight.detach()
    return reduce_from(F.linear(input, weight), self.slot.axis) + self.bias


def own_gradient() -> None:
    right = RowParallel.forward
    RowParallel.forward = doubled  # type: ignore[method-assign]
    try:
        with raises(TensorParallelError, "'blocks.0'", "the gradient of down.weight differs by 1 of"):
            parallelize.cut_model(Stack(), mesh_for({"tp": 2}).axis("tp"))
    finally:
        RowParallel.forward = right  # type: ignore[method-assign]


def test_gradients_of_slices_are_their_own(workers: Any) -> None:
    workers(2).run(own_gradient)


class OddlyMasked(Masked):
    """Raises beside padding on some ranks."""

    raising: tuple[int, ...] = ()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if attention_mask is not None and torch.distributed.get_rank() in self.raising:
            raise ValueError("planted")
        return super().forward(input_ids, attention_mask)


def unpadded(path: str) -> None:
    for file in (None, path):
        for raising in ((), (1,), (0, 1)):
            model = OddlyMasked()
            model.raising = raising
            if len(raising) == 1:
                with raises(TensorParallelError, "with padding", "rank 1: ValueError: planted"):
                    parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"), plan_file=file)
                continue
            plan = parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"), plan_file=file)
            assert bool(plan.unpadded) is bool(raising)


def test_padding_that_one_rank_alone_refuses_ends_all(workers: Any, tmp_path: Any) -> None:
    write_plan(tmp_path / "plan.json", Masked(), 2)
    text = (tmp_path / "plan.json").read_text().replace('"Masked"', '"OddlyMasked"')
    (tmp_path / "plan.json").write_text(text)
    workers(2).run(unpadded, str(tmp_path / "plan.json"))


# -- gradients of parameters -----------------------------------------------------------------------------------------


class Uses(nn.Module):
    """Linear layers that a forward calls twice, changes the result of, and reads the weight of."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.after, self.read = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.unused, self.packed = nn.Linear(5, 5), nn.Parameter(torch.randn(3, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(x)))
        made = self.after(x)
        made *= 2  # in place
        made = self.read(made) + F.linear(made, self.read.weight)
        return torch.einsum("bti,eij->btj", made, self.packed)


def test_sketches_are_of_the_gradients() -> None:
    torch.manual_seed(0)
    model, x = Uses(), torch.randn(2, 3, 5, requires_grad=True)
    total = model(x.clone()).sin().sum()
    params = dict(model.named_parameters())
    wanted = dict(zip(params, torch.autograd.grad(total, list(params.values()), allow_unused=True), strict=True))
    with Watch(params) as watch:
        total = model(x.clone()).sin().sum()
        back = torch.autograd.grad(total, [x, *params.values()], allow_unused=True)[0]
    assert back is not None and torch.allclose(back, torch.autograd.grad(model(x.clone()).sin().sum(), x)[0])
    found = watch.sketches()
    for name, gradient in wanted.items():
        ours = found[name]
        assert (gradient is None) is (ours is None) is name.startswith("unused")
        for dim, sketch in ({} if gradient is None else sketches(gradient)).items():
            assert ours is not None and torch.allclose(ours[dim], sketch, atol=1e-5), (name, dim)
    assert not any(hook for p in params.values() for hook in (p._backward_hooks or {}).values())


class Products(nn.Module):
    """Matrices that linear products read as they are, turned, in part, changed, and over a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.turned, self.part, self.changed, self.bare = (
            nn.Parameter(torch.randn(4, 4)) for _ in range(5)
        )
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.plain, self.bias) + F.linear(x, self.turned.t(), self.bias)
        x = F.linear(x[..., :2], self.part[:, :2]) + F.linear(x, self.part.t()[:4])
        x = F.linear(x, 2 * self.changed - self.changed.detach())
        x = torch.addmm(self.bias, x.flatten(0, 1), self.bare).view(x.shape) + x
        return torch.addmm(self.bias, x.flatten(0, 1), self.bare.t(), beta=2.0) + x[0, 0]


def test_products_are_seen_whatever_they_read() -> None:
    torch.manual_seed(0)
    model, x = Products(), torch.randn(2, 3, 4, requires_grad=True)
    params, linear = dict(model.named_parameters()), F.linear
    with Watch(params) as watch:
        torch.autograd.grad(model(x).sin().sum(), list(params.values()), allow_unused=True)
    assert F.linear is linear
    for name, gradient in zip(params, torch.autograd.grad(model(x).sin().sum(), list(params.values())), strict=True):
        ours = watch.sketches()[name]
        for dim, sketch in sketches(gradient).items():
            assert ours is not None and torch.allclose(ours[dim], sketch, rtol=1e-4, atol=1e-4), (name, dim)


@pytest.mark.parametrize("shape", [(6,), (6, 4), (3, 6, 4), (3, 4, 6)])
def test_a_part_of_a_sketch_is_that_of_the_part(shape: tuple[int, ...]) -> None:
    gradient = torch.randn(shape)
    for dim, size in enumerate(shape):
        segments = ((0, 1), (2, size - 2))
        part = torch.cat([gradient.narrow(dim, *one) for one in segments], dim)
        param = place(part.clone(), Placement((Cut(dim, size, segments),)))
        found = sketches(part, dims_of(param))
        assert found
        for along, sketch in sketches(gradient).items():
            if along in found:
                assert torch.allclose(part_of(sketch, along, param), found[along], atol=1e-6), (dim, along)


def growth() -> list[tuple[int, float]]:
    """(ways of the first unit, what comparing takes beside the dense units, over one of them), of units cut at once."""
    model = model_of("Llama", hidden_size=768, intermediate_size=2112, num_hidden_layers=2, head_dim=192)
    found: list[tuple[int, float]] = []
    right = parallelize._cut_units

    def measured(units: Any, *args: Any) -> None:
        dense = [sum(p.nbytes for p in module.parameters()) for module in units]
        ways = len(next(iter(units.values())).calls)
        with LiveMemory() as live:
            for module in units:
                for param in module.parameters():
                    live.see(param)
            right(units, *args)
        found.append((ways, (live.peak - sum(dense)) / min(dense)))

    parallelize._cut_units = measured
    try:
        parallelize.cut_model(model, mesh_for({"tp": 2}).axis("tp"))
    finally:
        parallelize._cut_units = right
    return found


def test_comparing_takes_less_than_the_unit(workers: Any) -> None:
    for found in workers(2).run(growth, timeout=90):
        assert found and all(ways == 2 for ways, _ in found)
        assert all(part <= 0.75 for _, part in found), found  # the gradients alone would be 1.5, of each way


# -- counts ----------------------------------------------------------------------------------------------------------


def calls_in_plan(action: Callable[[], Any]) -> int:
    """How often functions of plans, and of the names in them, are called."""
    calls: Counter[str] = Counter()

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith(("plan.py", "plan_file.py", "regions.py")):
            calls[frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return sum(calls.values())


def test_plans_take_as_long_as_there_are_units(tmp_path: Any) -> None:
    counts = []
    for count in (6, 12, 24):
        model = Stack(count=count)
        plan = lambda model=model: make_plan(model, 2, 0)  # noqa: E731
        write = lambda model=model: write_plan(tmp_path / "plan", model, 2)  # noqa: E731
        read = lambda model=model: read_plan(tmp_path / "plan", model, 2, 0)  # noqa: E731
        counts.append([calls_in_plan(action) for action in (plan, write, read)])
    for few, more, most in zip(*counts, strict=True):
        assert most - more <= 2.1 * (more - few), (few, more, most)
