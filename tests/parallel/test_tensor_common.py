"""What units of one comparison have in common, and what they change: modules, parameters, numbers of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deepspeed.comm.collectives.collectives import broadcast_tensors
from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.mesh import mesh_for
from deepspeed.foundation.malloc import LARGE
from deepspeed.tensor_parallel import verify
from deepspeed.tensor_parallel.layers import cut_tensor, mark_partial, take
from deepspeed.tensor_parallel.parallelize import cut_model
from deepspeed.tensor_parallel.verify import Watch, sketches
from tests.parallel.test_tensor_units import WIDTH, Pair, Stack, same_as


class Around(Pair):
    """Has a module that other units have too."""

    def __init__(self) -> None:
        super().__init__()
        self.common: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.common(x))


def sharing(common: nn.Module, count: int) -> Stack:
    model = Stack(Around, count)
    for block in model.blocks:
        block.common = common
    return model


def cut_in_two(model: Any) -> None:
    dense = copy.deepcopy(model)
    plan = cut_model(model, mesh_for({"tp": dist.get_world_size()}).axis("tp"))
    assert len(plan.units) == len(model.blocks), plan.table()
    same_as(model, dense)


def commons() -> None:
    for count in (2, 4):
        cut_in_two(sharing(nn.LayerNorm(WIDTH), count))  # ones and zeros
    for count in (2, 3, 4):
        cut_in_two(sharing(Pair(), count))


def test_units_that_share_a_module_are_compared(workers: Any) -> None:
    workers(2).run(commons)


class Meeting(Pair):
    """Goes by what all ranks read, of which it tells them itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.detach().square().mean()
        dist.all_reduce(size)
        return super().forward(x) / size


def met() -> None:
    others = dist.new_group(list(range(1, dist.get_world_size())))  # torch lists it on rank 0 too, under a number
    for count in (2, 3):
        cut_in_two(Stack(Meeting, count))
    if dist.get_rank():
        dist.destroy_process_group(others)


def test_units_whose_forward_sends_messages_are_compared(workers: Any) -> None:
    workers(2).run(met)
    workers(3).run(met)


class Counting(Pair):
    """Counts its calls, and goes by them."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.last = self.seen[None] * 2
        self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls + 0.1 * self.seen)


def counted() -> None:
    axis = mesh_for({"tp": 2}).axis("tp")
    for dtype in (torch.float32, torch.bfloat16):
        model = Stack(Counting, 3).to(dtype)
        cut_model(model, axis)
        mine = [(int(block.seen), float(block.last), block.calls) for block in model.blocks]
        assert len(set(mine)) == 1 and mine[0][1] == 2 * mine[0][0], mine
        assert all(theirs == mine for theirs in all_gather_objects(axis, mine))


def test_comparing_changes_nothing_of_a_unit(workers: Any) -> None:
    workers(2).run(counted)


class Recomputed(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.other, x, use_reentrant=False) + super().forward(x)


def recomputed() -> None:
    cut_in_two(Stack(Recomputed))


def test_units_that_compute_again_in_backward_are_compared(workers: Any) -> None:
    workers(2).run(recomputed)


class Beside(nn.Module):
    """Calls a layer of whose result nothing is left, and reads its weight besides."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.again = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.one(x).abs().max().detach()
        x = F.linear(x, self.one.weight) / scale
        return checkpoint(lambda x: self.again(self.again(x)), x, use_reentrant=False)


@pytest.mark.parametrize("given", [False, True])
def test_sketches_are_of_what_is_used(given: bool) -> None:
    """Whether what the module reads has a gradient or not."""
    torch.manual_seed(0)
    model, x = Beside(), torch.randn(3, 5, requires_grad=given)
    params = dict(model.named_parameters())
    with Watch(params) as watch:
        torch.autograd.grad(model(x).sin().sum(), [*([x] if given else []), *params.values()], allow_unused=True)
    wanted = torch.autograd.grad(model(x).sin().sum(), list(params.values()), allow_unused=True)
    for (name, ours), gradient in zip(watch.sketches().items(), wanted, strict=True):
        assert (ours is None) is (gradient is None), name
        for dim, sketch in ({} if gradient is None else sketches(gradient)).items():
            assert ours is not None and torch.allclose(ours[dim], sketch, atol=1e-5), (name, dim)


def partial() -> None:
    axis = mesh_for({"tp": 2}).axis("tp")
    param = nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
    mark_partial(param)
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    ours = verify._over_ranks(param, sketches(gradient) if axis.rank == 0 else None, axis, "sum")
    for dim, sketch in sketches(gradient).items():
        assert torch.equal(ours[dim], sketch)


def test_a_rank_without_its_part_of_a_gradient_adds_zeros(workers: Any) -> None:
    workers(2).run(partial)


def test_each_side_of_a_gradient_has_its_own_scale() -> None:
    """Of a gradient with one large row the products along the rows are many times those along the columns."""
    gradient = torch.zeros(4096, 8)
    gradient[5] = torch.randn(8, generator=torch.Generator().manual_seed(0))
    wrong = gradient * torch.tensor([1.0, 1.003, 1, 1, 1, 1, 1, 1])
    param = nn.Parameter(torch.zeros(4096, 8))
    found = {dim: sketches(one)[-2] for dim, one in ((0, gradient), (1, wrong))}
    seen = [verify.UnitResult([], {}, {"weight": {**sketches(gradient), -2: sketch}}) for sketch in found.values()]
    module = nn.Module()
    module.weight = param
    axis: Any = None
    assert not list(verify._differences(seen[0], seen[0], module, axis, verify.TOLERANCE))
    assert list(verify._differences(seen[0], seen[1], module, axis, verify.TOLERANCE))


def test_large_slices_lie_outside_of_the_heap() -> None:
    """What lies in the heap may stay with the process when an engine has moved it elsewhere."""
    for shape, dim, segments in (((1024, 512), 0, ((256, 512),)), ((512, 1024), 1, ((0, 256), (768, 256)))):
        for dtype in (torch.float32, torch.bfloat16):
            whole = torch.randn(shape).to(dtype)
            param = nn.Parameter(whole.clone())
            cut_tensor(param, dim, segments)
            assert torch.equal(param.detach(), take(whole, dim, segments)) and param.is_contiguous()
            assert param.untyped_storage().resizable() is (param.nbytes < LARGE)  # what is mapped has its size for good
            assert torch.equal(copy.deepcopy(param), param)


def first_rank_s() -> None:
    """Large and small tensors, none at all, and large ones that lie otherwise on one rank."""
    axis = mesh_for({"tp": 2}).axis("tp")
    shapes = [(3,), (700, 1000), (0,), (5, 2), (900, 600), (1 << 20,), (7,)]
    wanted = [torch.randn(shape, generator=torch.Generator().manual_seed(at)) for at, shape in enumerate(shapes)]
    wanted += [torch.arange(9), torch.arange(4).bool()]
    ours = [one.clone() if axis.rank == 0 else torch.zeros_like(one) for one in wanted]
    if axis.rank == 1:
        ours[1] = torch.zeros(1000, 700).t()
    else:
        ours[4] = wanted[4].t().contiguous().t()
    broadcast_tensors(axis, ours, "values", chunk=1 << 20)
    assert all(map(torch.equal, ours, wanted))


def test_values_are_those_of_the_first_rank_however_they_lie(workers: Any) -> None:
    workers(2).run(first_rank_s)
