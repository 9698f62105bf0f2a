"""Detection of out-of-memory errors, and their replacement by an error that suggests offload settings."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import MemoryExhaustedError

_MUCH = 0.1  # fraction of the device memory reserved by torch that is unused, from which fragmentation is reported
_WORDS = (
    "can't allocate memory", "out of memory", "not enough memory", "Cannot allocate memory",
    "can't start new thread",  # there is no room for its stack
)  # fmt: skip


def is_exhaustion(error: BaseException | None) -> bool:
    """Return whether an error was caused by exhausted device memory, host memory or a memory limit of the process."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def raise_if_exhausted(doing: str, error: BaseException) -> None:
    """Replace an out-of-memory error by one that suggests offload settings; do nothing for any other error.

    Args:
        doing: operation for the message, such as "building the engine".
        error: error that was caught.

    Raises:
        MemoryExhaustedError: `is_exhaustion(error)`, and `error` is not a MemoryExhaustedError.
    """
    if not isinstance(error, MemoryExhaustedError) and is_exhaustion(error):
        raise exhausted(doing, error) from error


@contextlib.contextmanager
def behind(error: BaseException | None) -> Iterator[None]:
    """Suppress out-of-memory RuntimeErrors of the `with` block if `error` is a MemoryExhaustedError (for clean-up)."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as trouble:
        if not (isinstance(error, MemoryExhaustedError) and is_exhaustion(trouble)):
            raise


def exhausted(doing: str, error: BaseException) -> MemoryExhaustedError:
    """Return the error that suggests offload settings; see `raise_if_exhausted` for the arguments."""
    return MemoryExhaustedError(
        f"memory ran out while {doing} ({str(error).strip().splitlines()[0]}). Move training state away: "
        f'zero_optimization.offload_optimizer.device "cpu" or "nvme" takes master weights, gradient sums and optimizer '
        f"state from stage 1 on; at stage 3 zero_optimization.offload_param does the same for parameters, with "
        f"zero.Init(remote_device=…) from birth on{_advice_on_pieces()}"
    )


def _advice_on_pieces() -> str:
    """Return advice if much reserved CUDA memory is unused and `expandable_segments` is not set, else ""."""
    accelerator = get_accelerator()
    held, used = accelerator.memory_reserved(), accelerator.memory_allocated()
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if accelerator.device_name() != "cuda" or held - used <= _MUCH * held or "expandable_segments" in settings:
        return ""
    return (
        f". Of {held / 2**30:.2f} GiB that torch holds of the device, {(held - used) / 2**30:.2f} are in pieces that "
        f"nothing fitted into: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True joins them"
    )
