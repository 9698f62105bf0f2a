"""Every public torch function on a sharded parameter gives the dense value or raises by name; nothing stays gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.configs import config
from tests.parity.functions import Call, dense, find_calls, public_functions, same

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
    return "" if same(result, expected) else f"gave {result!r} instead of {expected!r}"


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
