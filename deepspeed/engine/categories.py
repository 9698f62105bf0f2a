"""What memory is for, by the code that asks for it."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

ACTIVATIONS, TRANSIT, GATHERED, OPTIMIZER, GRADIENTS = "activations", "transit", "gathered", "optimizer", "gradients"
PARAMETERS, MASTERS, POOLS = "parameters", "masters", "pools"
_COMM = "deepspeed/comm/"
# In which file memory ran out, innermost first: the category it was for.
_BY_FILE = (
    ("comm/shared_allocator.py", ""),
    ("zero/aliases.py", GATHERED), ("zero/lifecycle.py", GATHERED), ("zero/prefetch.py", GATHERED),
    ("zero/wire.py", TRANSIT), (_COMM, TRANSIT), ("zero/buckets.py", GRADIENTS),
    ("zero/reducer.py", GRADIENTS), ("zero/waves.py", OPTIMIZER), ("zero/optimizer_shard.py", OPTIMIZER),
    ("zero/optimizer.py", OPTIMIZER), ("torch/optim/", OPTIMIZER), ("storage/buffer_pool.py", POOLS),
    ("ops/aio/", POOLS), ("deepspeed/ops/", OPTIMIZER), ("deepspeed/checkpoint/", OPTIMIZER),
)  # fmt: skip


def frames_of(error: BaseException) -> Iterator[Any]:
    """Frames of an error and of what caused it, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next
    if error.__cause__ is not None:
        yield from frames_of(error.__cause__)


def innermost(frames: Sequence[Any], otherwise: str = ACTIVATIONS) -> str:
    """What memory is asked for by the innermost function of ours, or of torch's optimizers.

    Args:
        frames: outermost first.
        otherwise: the answer where none is known.
    """
    codes = [frame.f_code for frame in reversed(frames)]
    sent = any(_by_code(code) for code in codes if _COMM in _file(code))
    # Messages are for whoever sends them: what a gather maps of its neighbours' memory, it gathers.
    asks = next((found for code in codes if _COMM not in _file(code) and (found := _by_code(code))), None)
    return TRANSIT if sent and asks in (None, OPTIMIZER) else asks or otherwise


def category_of(frame: Any) -> str:
    """What memory is for that the code of a frame, or of one of its callers, asks for."""
    while frame is not None:
        found = _by_code(frame.f_code)
        if found:
            return found
        frame = frame.f_back
    return ACTIVATIONS


@functools.cache
def _by_code(code: CodeType) -> str:
    file = _file(code)
    if file.endswith("zero/shard_group.py") and "gather" in code.co_name:
        return GATHERED
    if file.endswith(("zero/shard_group.py", "zero/local_shard.py")) and "master" in code.co_name:
        return MASTERS
    if _COMM in file and code.co_name == "empty":
        return ""  # for whoever asks there
    return next((category for part, category in _BY_FILE if part in file), "")


def _file(code: CodeType) -> str:
    return code.co_filename.replace(os.sep, "/")
