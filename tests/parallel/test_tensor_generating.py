"""`generate` and `save_pretrained` of a cut model: whose method is called, and what the ranks are compared by."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import GenerationConfig

from deepspeed.comm.collectives.same_error import digest
from deepspeed.comm.process_groups.axis import Axis, world_axis
from deepspeed.errors import DataError, NotAvailableError
from deepspeed.tensor_parallel.parallelize import guard_generating
from tests.parallel.tensor_runs import model_of
from tests.parallel.tiny import raises

ALONE = Axis("alone", (0,), 0, None, True)
PROMPT = torch.tensor([[3, 4, 5]])


class Delegating(nn.Module):
    """Has what is inside it, without a class that says so."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_a_wrapper_that_delegates_generates() -> None:
    model: Any = Delegating(model_of("Llama").eval())
    wanted = model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    guard_generating(model, ALONE)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=2, do_sample=False), wanted)
    twin: Any = copy.deepcopy(model)
    with torch.no_grad():
        twin.inner.lm_head.weight.neg_()
    assert not torch.equal(twin.generate(PROMPT, max_new_tokens=2, do_sample=False), wanted)


def test_a_method_of_its_own_is_kept() -> None:
    model = model_of("Llama")
    model.generate = lambda *_, **__: "its own"
    guard_generating(model, ALONE)
    assert model.generate(PROMPT) == copy.deepcopy(model).generate(PROMPT) == "its own"


@dataclasses.dataclass
class Fields:
    one: Any


@pytest.mark.parametrize(
    "made",
    [
        lambda n: GenerationConfig(max_new_tokens=n),
        lambda n: np.full(3, n),
        lambda n: np.float32(n),
        lambda n: np.array([n, None], dtype=object),
        Fields,
        lambda n: Fields(torch.tensor(n)),
        lambda n: collections.UserDict(one=n),
        lambda n: {1, n},
        lambda n: [torch.float32, torch.float64][n > 5],
    ],
)
def test_a_digest_tells_values_inside_objects_apart(made: Any) -> None:
    assert digest([made(5)]) == digest([made(5)]) != digest([made(500)])


def compared() -> None:
    model, axis = model_of("Llama").eval(), world_axis()
    guard_generating(model, axis)
    config = GenerationConfig(max_new_tokens=2 + dist.get_rank())
    with raises(DataError, "ranks 0 and 1", "other arguments"):
        model.generate(PROMPT, generation_config=config)
    timed = GenerationConfig(max_new_tokens=2, max_time=1.0)
    for more in ({"max_time": 1.0}, {"generation_config": timed}):
        with raises(NotAvailableError, "max_time", "max_new_tokens"):
            model.generate(PROMPT, **more)
    assert model.generate(PROMPT, generation_config=timed, max_time=None).shape == (1, 5)
    model.generation_config.max_new_tokens = 2 + dist.get_rank()
    with raises(DataError, "generation_config"):
        model.generate(PROMPT)


def test_ranks_with_other_configs_or_a_clock_are_refused(workers: Any) -> None:
    workers(2).run(compared, timeout=60)
