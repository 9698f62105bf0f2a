"""The only way pickles are opened: torch's restricted unpickler, with a handful of named classes as inert stand-ins."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from deepspeed.errors import CheckpointCorruptError, CheckpointError


class Inert:
    """Holds the attributes of an object of upstream's; has no behaviour."""


class InertNumber(int):
    """Holds the value of an enumeration of upstream's."""


# Classes that upstream's checkpoints are known to hold, by where their pickles say they are.
_KNOWN: dict[str, type] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Inert,
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase": Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": InertNumber,
    "deepspeed.utils.tensor_fragment.fragment_address": Inert,
}


def load_pt(path: Path) -> Any:
    """The contents of a file that `torch.save` wrote; tensors stay in the file until they are read.

    Raises:
        CheckpointError: it names a class that is not admitted; nothing of the file has run.
        CheckpointCorruptError: it cannot be read.
    """
    admitted: list[Any] = [(made, name) for name, made in _KNOWN.items()]
    try:
        with torch.serialization.safe_globals(admitted):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} names something else than tensors, plain values and {len(_KNOWN)} known classes, and is refused: "
            f"opening it could run code ({str(error).splitlines()[0][:300]})"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise CheckpointCorruptError(f"{path} cannot be read: {error}") from error
