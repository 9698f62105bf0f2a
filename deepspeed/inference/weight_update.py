"""Weights of a running generator replaced in place, from a file in shared memory, between two requests."""

from __future__ import annotations

import math
import mmap
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.errors import RequestError, UsageError
from deepspeed.inference.generator import Generator
from deepspeed.inference.shared_tensors import DTYPES, SharedTensor

SHARED = Path("/dev/shm")  # where the system keeps files in memory


def copy_tensors(model: torch.nn.Module, file: str, tensors: Sequence[SharedTensor]) -> None:
    """Copy tensors of a file in shared memory into a model, in place; all of them, or none if one does not fit.

    Args:
        model: the model.
        file: name of a file in `/dev/shm`, without a folder.
        tensors: tensors in the file.

    Raises:
        RequestError: there is no such file, it is too short, or the model has no such tensor of this shape.
    """
    if not re.fullmatch(r"[\w.-]{1,200}", file) or file.startswith("."):
        raise RequestError(f"shared_memory {file!r:.100} is not the name of a file in {SHARED}")
    own = model.state_dict(keep_vars=True)
    try:
        descriptor = os.open(SHARED / file, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
                pairs = [(own[each.name], _view(memory, each)) for each in tensors if _fits(each, own)]
                with torch.no_grad():
                    for target, source in pairs:
                        target.copy_(source)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise RequestError(f"shared_memory {file!r}: {error}") from None


def _fits(tensor: SharedTensor, own: dict[str, Any]) -> bool:
    """Return True; RequestError if the model has no such tensor."""
    if tensor.dtype not in DTYPES:
        raise RequestError(f"{tensor.name}: dtype {tensor.dtype!r:.40} is none of {', '.join(DTYPES)}")
    if tensor.name not in own:
        raise RequestError(
            f"the served model has no tensor {tensor.name!r:.100}; packed weights (--quantize) cannot be updated"
        )
    if tuple(own[tensor.name].shape) != tuple(tensor.shape):
        raise RequestError(f"{tensor.name}: shape {tensor.shape} instead of {tuple(own[tensor.name].shape)}")
    return True


def _view(memory: mmap.mmap, tensor: SharedTensor) -> torch.Tensor:
    dtype, count = getattr(torch, tensor.dtype), math.prod(tensor.shape)
    end = tensor.offset + count * dtype.itemsize
    if tensor.offset < 0 or tensor.offset % dtype.itemsize or end > len(memory):
        raise RequestError(f"{tensor.name}: bytes {tensor.offset} to {end} are not in a file of {len(memory)}")
    if not count:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(bytearray(memory[tensor.offset : end]), dtype=dtype).view(tensor.shape)


class WeightUpdate:
    """Update of the weights of a generator that serves: no request runs between its beginning and its end.

    Args:
        generator: the generator.
        patience: seconds after its last message within which an update that nobody ends is given up.
    """

    def __init__(self, generator: Generator, patience: float = 300.0) -> None:
        self._generator, self._patience = generator, patience
        self.version = 0
        self.active = False  # from the beginning on, new requests wait
        self._changed, self._last = False, 0.0

    @property
    def ready(self) -> bool:
        """Whether tensors may be sent: an update has begun, and no request runs."""
        return self.active and self._generator.idle

    def answered(self) -> None:
        """Note that the sender has got its answer to "begin"; its patience counts from here."""
        self._last = time.monotonic()

    def begin(self) -> None:
        """Begin an update; UsageError if one is under way whose sender is not silent."""
        if self.active and time.monotonic() - self._last < self._patience:
            raise UsageError("an update of the weights is under way")
        self._changed = self.active and self._changed  # of a sender that is gone
        self.active, self._last = True, time.monotonic()

    def copy(self, file: str, tensors: Sequence[SharedTensor]) -> None:
        """Copy tensors as `copy_tensors`; UsageError if requests run or no update has begun."""
        if not self.ready:
            raise UsageError("tensors come after the answer to the action 'begin', and before 'end'")
        self._last = time.monotonic()
        copy_tensors(self._generator.model, file, tensors)
        self._changed = True

    def end(self) -> int:
        """End the update and return the new version; UsageError if none has begun."""
        if not self.ready:
            raise UsageError("no update of the weights has begun")
        self.active, self.version = False, self.version + self._changed
        return self.version

    def given_up(self) -> bool:
        """Return whether an update without changes was given up, since its sender is silent, and end it then.

        Raises:
            UsageError: the sender of an update with changes is silent, so the weights are a mixture of two versions.
        """
        if not self.active or time.monotonic() - self._last < self._patience:
            return False
        if self._changed:
            raise UsageError(
                f"an update of the weights was not ended within {self._patience:g} s after its last tensors, so the "
                "weights are a mixture of two versions"
            )
        self.active = False
        return True
