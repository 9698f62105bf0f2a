"""The category of memory by the code that asks for it: modules and functions are known by themselves, not by names."""

from __future__ import annotations

import importlib
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.comm.collectives import collectives
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.shared_memory import allocator, transport
from deepspeed.engine import engine
from deepspeed.engine.memory import categories
from deepspeed.engine.memory.categories import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    MASTERS,
    OPTIMIZER,
    POOLS,
    TRANSIT,
    category_of,
    innermost,
)
from deepspeed.ops import aio, cpu_optimizer
from deepspeed.storage import buffer_pool
from deepspeed.zero.gradients import buckets, reduce_scatter, reducer
from deepspeed.zero.optimizer.optimizer import ZeroOptimizer
from deepspeed.zero.parameters import prefetch
from deepspeed.zero.parameters.local_shard import LocalShard
from deepspeed.zero.parameters.shard_group import ShardGroup


def _frame(where: ModuleType | FunctionType, back: Any = None) -> Any:
    """A frame of a function; of any other function of a module."""
    code = where.__code__ if isinstance(where, FunctionType) else compile("0", "anywhere", "exec")
    module = where.__module__ if isinstance(where, FunctionType) else where.__name__
    return SimpleNamespace(f_code=code, f_globals={"__name__": module}, f_back=back)


@pytest.mark.parametrize(
    ("where", "category"),
    [
        (prefetch, GATHERED),
        (reduce_scatter, TRANSIT),
        (collectives, TRANSIT),
        (buckets, GRADIENTS),
        (reducer, GRADIENTS),
        (importlib.import_module(torch.optim.Adam.__module__), OPTIMIZER),
        (cpu_optimizer, OPTIMIZER),
        (importlib.import_module(aio.aio_handle.__module__), POOLS),
        (buffer_pool, POOLS),
        (LocalShard.round_masters, MASTERS),
        (ShardGroup.wait_all_gather.__wrapped__, GATHERED),  # type: ignore[attr-defined]
        (allocator, ACTIVATIONS),
        (Axis.empty, ACTIVATIONS),
        (engine, ACTIVATIONS),
    ],
)
def test_a_frame_has_the_category_of_its_function_or_module(where: Any, category: str) -> None:
    assert category_of(_frame(where)) == category
    assert innermost([_frame(where)]) == category


def test_who_asks_for_shared_memory_is_who_calls() -> None:
    assert category_of(_frame(Axis.empty, _frame(buckets))) == GRADIENTS
    assert innermost([_frame(buckets), _frame(Axis.empty)]) == GRADIENTS


def test_messages_are_for_whoever_sends_them() -> None:
    assert innermost([_frame(prefetch), _frame(transport)]) == GATHERED
    assert innermost([_frame(importlib.import_module(torch.optim.Adam.__module__)), _frame(collectives)]) == TRANSIT


def test_every_function_of_the_table_is_one_that_python_calls() -> None:
    assert all(isinstance(code, CodeType) for code in categories._CODES)
    assert len(categories._CODES) == len(categories._BY_FUNCTION)


def test_all_files_of_the_optimizer_allocate_for_it() -> None:
    modules = {cls.__module__ for cls in ZeroOptimizer.__mro__} - {"builtins"}
    assert len(modules) > 1
    assert {innermost([_frame(importlib.import_module(module))]) for module in modules} == {OPTIMIZER}
