"""Every torch function on a sharded parameter gives the dense value or raises by name; nothing stays gathered."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.parallel.tiny import micro_step, raises, start
from tests.parity.configs import config
from tests.parity.functions import BARS, Call, dense, find_calls, public_functions, same
from tests.unit.comm.ranks import run_ranks

SHAPES = ((4, 4), (4,))
# Functions that hand out or replace memory: the list in the docs.
RAW_STORAGE = frozenset(
    "data_ptr const_data_ptr untyped_storage storage storage_type is_shared share_memory_ numpy __array__ __dlpack__ "
    "set_ is_set_to module_load __cuda_array_interface__".split()
)
TEXT = frozenset(["__repr__", "__format__", "__reduce_ex__"])  # says that the parameter is sharded; pickling is below
IN_PLACE_BUT_NO_WRITE = frozenset(["requires_grad_"])


def last_part(name: str) -> str:
    return name.removesuffix(".__get__").removesuffix(".__set__").removesuffix(".__delete__").rsplit(".", 1)[-1]


def writes(call: Call, parameter: nn.Parameter, before: torch.Tensor) -> bool:
    """Whether a call on a dense parameter changes its values or its layout, by name or by what it did."""
    name = last_part(call.name)
    in_place = name.endswith("_") and not name.endswith("__") and name not in IN_PLACE_BUT_NO_WRITE
    return in_place or parameter.shape != before.shape or not torch.equal(parameter.detach(), before)


class Holder(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = dense(shape)

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def sharded_engine(model: nn.Module) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config=config(3, model),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    return engine


def judge(call: Call, sharded: nn.Parameter, shape: tuple[int, ...]) -> str:
    """What is wrong with one call on the sharded parameter; empty when nothing is."""
    from deepspeed.errors import ShardedParameterError

    plain = dense(shape)
    before = plain.detach().clone()
    expected = call(plain)
    wrote = writes(call, plain, before)
    try:
        result = call(sharded)
    except ShardedParameterError as error:
        if "weight" not in str(error):
            return f"the error does not name the parameter: {error}"
        return "" if wrote or last_part(call.name) in RAW_STORAGE else f"refused, but only computes: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if wrote:
        return "wrote without an error"
    if last_part(call.name) in TEXT:
        return ""
    return "" if same(result, expected, BARS.get(call.name, 0.0)) else f"gave {result!r} instead of {expected!r}"


def try_calls(calls: list[Call], shape: tuple[int, ...]) -> list[str]:
    engine = sharded_engine(Holder(shape))
    parameter, found = engine.module.weight, []
    for call in calls:
        wrong = judge(call, parameter, shape)
        if wrong:
            found.append(f"{call.name}{call.arguments} ({call.mode}): {' '.join(wrong.split())[:300]}")
        parameter.requires_grad_(True)
        parameter.grad = None
        if not same(parameter, dense(shape)):
            found.append(f"{call.name}{call.arguments} ({call.mode}) changed the parameter")
            engine.destroy()
            engine = sharded_engine(Holder(shape))
            parameter = engine.module.weight
    engine.destroy()
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_public_function(workers: Any, shape: tuple[int, ...]) -> None:
    (calls,) = workers(1).run(find_calls, shape, list(public_functions()), timeout=120)
    assert len(calls) > 950
    for rank, found in enumerate(workers(2).run(try_calls, calls, shape, timeout=120)):
        assert not found, f"rank {rank}:\n" + "\n".join(found)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether the values are away and their memory is given back."""
    from deepspeed.zero.param import ShardedParameter

    return isinstance(parameter, ShardedParameter) and not parameter._ds_member.group.full.untyped_storage().nbytes()


def copies() -> None:
    from deepspeed.zero import GatheredParameters

    with start(3) as engine:
        parameter = engine.module.out.weight
        with GatheredParameters(parameter):
            wanted = parameter.detach().clone()
        saved = io.BytesIO()
        torch.save(parameter, saved)
        saved.seek(0)
        made = [copy.deepcopy(parameter), pickle.loads(pickle.dumps(parameter)), torch.load(saved)]
        assert all(type(one) is nn.Parameter and one.requires_grad for one in made)
        for guarded in (parameter.detach(), parameter.t().t()):
            made += [copy.deepcopy(guarded), pickle.loads(pickle.dumps(guarded))]
        for one in made:
            assert torch.equal(one, wanted)
            one.detach().zero_()  # its own memory, open to writes
        assert torch.equal(parameter.clone(), wanted)
        assert is_sharded(parameter)


def test_deepcopy_and_pickle_give_dense_tensors(workers: Any) -> None:
    workers(2).run(copies)


def stand_ins() -> None:
    from deepspeed.errors import ShardedParameterError

    with start(3) as engine:
        parameter = engine.module.out.weight
        made = {
            "detach": parameter.detach(),
            "data": parameter.data,
            "state_dict": engine.module.state_dict()["out.weight"],
        }
        micro_step(engine, 0)
        for name, one in made.items():
            assert one.shape == parameter.shape and one.dtype == parameter.dtype and not one.requires_grad, name
            assert torch.equal(one.clone(), parameter.clone()), name  # the values of now, not of then
            assert torch.equal(one[0] * 2, parameter[0] * 2), name
            for write in (one.zero_, lambda one=one: one.copy_(torch.ones(one.shape)), lambda one=one: one[0].fill_(1)):
                with raises(ShardedParameterError, "out.weight"):
                    write()
        assert is_sharded(parameter)


def test_stand_ins_read_as_tensors_and_refuse_writes(workers: Any) -> None:
    workers(2).run(stand_ins)


class Wide(nn.Module):
    """50 MB of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(12))


def growth_of_state_dict() -> tuple[int, int]:
    """Bytes by which `state_dict()` grows the process, and bytes of the model."""
    start(3).module.state_dict()  # the first call of all loads code
    with start(3, Wide()) as engine:
        gc.collect()
        before = psutil.Process().memory_info().rss
        state = engine.module.state_dict()
        grown = psutil.Process().memory_info().rss - before
        assert all(is_sharded(parameter) for parameter in engine.module.parameters())
        return grown, sum(value.nbytes for value in state.values())


def test_state_dict_costs_no_memory(workers: Any) -> None:
    for grown, size in workers(2).run(growth_of_state_dict, timeout=60):
        assert size > 50_000_000
        assert grown < 0.01 * size


def test_a_read_on_one_rank_alone_ends_by_name() -> None:
    ends = run_ranks(
        """
dist.init_distributed(verbose=False)
from tests.parallel.tiny import start
engine = start(3)
if dist.get_rank() == 0:
    engine.module.out.weight.sum()
else:
    dist.barrier(log_name="waiting for the others")
""",
        world=2,
        limit=120,
        DEEPSPEED_TIMEOUT="0.05",
    )
    for end in ends:
        assert end.code == 1, end.err
        assert "in 'read of out.weight'" in end.err, end.err
    assert "waiting for the others" in ends[0].err
