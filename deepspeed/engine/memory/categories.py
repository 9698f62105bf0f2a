"""Categories of memory, determined by the code that allocates it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from deepspeed import checkpoint, comm, ops
from deepspeed.comm.fake_world import SimulatedMemory
from deepspeed.comm.process_groups.axis import Axis
from deepspeed.comm.shared_memory import allocator
from deepspeed.comm.shared_memory.transport import SharedMemory
from deepspeed.ops import aio
from deepspeed.storage import buffer_pool
from deepspeed.zero.gradients import buckets, reduce_scatter, reducer
from deepspeed.zero.optimizer import optimizer, optimizer_shard, optimizer_surface, update
from deepspeed.zero.parameters import buffer_views, module_hooks, prefetch
from deepspeed.zero.parameters.local_shard import LocalShard
from deepspeed.zero.parameters.shard_group import ShardGroup

ACTIVATIONS, TRANSIT, GATHERED, OPTIMIZER, GRADIENTS = "activations", "transit", "gathered", "optimizer", "gradients"
PARAMETERS, MASTERS, POOLS = "parameters", "masters", "pools"
# Category of the memory that a module allocates.
_BY_MODULE = {
    allocator: "",
    buffer_views: GATHERED, module_hooks: GATHERED, prefetch: GATHERED,
    reduce_scatter: TRANSIT, buckets: GRADIENTS, reducer: GRADIENTS,
    update: OPTIMIZER, optimizer_shard: OPTIMIZER, optimizer: OPTIMIZER, optimizer_surface: OPTIMIZER,
    buffer_pool: POOLS,
}  # fmt: skip
# The same for packages; the first one that contains the module counts.
_BY_PACKAGE = {comm: TRANSIT, torch.optim: OPTIMIZER, aio: POOLS, ops: OPTIMIZER, checkpoint: OPTIMIZER}
# The same for functions; they take precedence over their modules.
_BY_FUNCTION = {
    ShardGroup.expect_gather: GATHERED,
    ShardGroup.start_all_gather: GATHERED,
    ShardGroup.wait_all_gather: GATHERED,
    ShardGroup.gather_together: GATHERED,
    LocalShard.overwrite_master: MASTERS,
    LocalShard.add_master: MASTERS,
    LocalShard.split_master: MASTERS,
    LocalShard.round_masters: MASTERS,
    Axis.empty: "",  # counts for the caller
    SharedMemory.empty: "",
    SimulatedMemory.empty: "",
}
_MODULES = {module.__name__: category for module, category in _BY_MODULE.items()}
_PACKAGES = {package.__name__: category for package, category in _BY_PACKAGE.items()}
_CODES = {inspect.unwrap(function).__code__: category for function, category in _BY_FUNCTION.items()}
_COMM = comm.__name__


def frames_of(error: BaseException) -> Iterator[Any]:
    """Yield the frames of an error's traceback, outermost first, then those of its cause."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from frames_of(error.__cause__)


def innermost(frames: Sequence[Any], otherwise: str = ACTIVATIONS) -> str:
    """Return the category of the memory that the innermost known function allocates; messages count for their sender.

    Args:
        frames: frames of a call stack, outermost first.
        otherwise: category if no function is known.
    """
    known = [(_is_within(frame.f_globals.get("__name__", ""), _COMM), _of_frame(frame)) for frame in reversed(frames)]
    sent = any(category for in_comm, category in known if in_comm)
    # Messages count for the code that sends them; memory of other ranks that a gather maps counts as gathered.
    allocates = next((category for in_comm, category in known if category and not in_comm), None)
    return TRANSIT if sent and allocates in (None, OPTIMIZER) else allocates or otherwise


def category_of(frame: Any) -> str:
    """Return the memory category of a frame's function, or of its nearest caller with one; else "activations"."""
    while frame is not None:
        category = _of_frame(frame)
        if category:
            return category
        frame = frame.f_back
    return ACTIVATIONS


def _of_frame(frame: Any) -> str:
    return _by_code(frame.f_code, frame.f_globals.get("__name__", ""))


@functools.cache
def _by_code(code: CodeType, module: str) -> str:
    """Return the memory category of a function, or of its module; empty if neither is known."""
    if code in _CODES:
        return _CODES[code]
    if module in _MODULES:
        return _MODULES[module]
    return next((category for package, category in _PACKAGES.items() if _is_within(module, package)), "")


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")
