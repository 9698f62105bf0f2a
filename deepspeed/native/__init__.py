"""The one shared library of native code, or None where it was not built or is turned off."""

from __future__ import annotations

import ctypes
import functools
import os
import zlib
from pathlib import Path

import torch

from deepspeed.foundation.log import say
from deepspeed.foundation.simulation import simulating
from deepspeed.native.simulated import simulated_library

__all__ = ["INSTRUCTION_SETS", "KINDS", "library", "state", "threads"]

# In the order of numbers.h.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INSTRUCTION_SETS = ("portable", "AVX2", "AVX-512", "AVX-512 BF16", "AMX")

_FILE = Path(__file__).with_name("library.so")
_BUILD = "`python setup.py build_ext --inplace` in the source tree (or `pip install -v`) builds it or shows why not"


def library() -> ctypes.CDLL | None:
    """The library, loaded at the first call; None, with one line on rank 0, where Python and torch do its work.

    Callers declare the argument types of the functions they use. `DS_NATIVE=0` in the environment turns it off.
    """
    loaded = _load()[0]
    return simulated_library() if loaded is not None and simulating() else loaded


def state() -> str:
    """What `library()` gives and why, in a few words."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("DS_NATIVE") == "0":
        return _absent("off (DS_NATIVE=0)")
    if not _FILE.exists():
        return _absent(f"not built; {_BUILD}")
    try:
        loaded = ctypes.CDLL(str(_FILE))
    except OSError as error:
        return _absent(f"cannot be loaded ({error}); {_BUILD}")
    if loaded.ds_fingerprint() & 0xFFFFFFFF != _fingerprint():
        return _absent(f"built from other sources than those beside it; {_BUILD}")
    used = INSTRUCTION_SETS[loaded.ds_instruction_set(len(INSTRUCTION_SETS))]
    return loaded, f"{used} kernels on {threads()} threads"


def _fingerprint() -> int:
    """As setup.py forms it."""
    checksum = 0
    for source in sorted([*_FILE.parent.glob("*.cpp"), *_FILE.parent.glob("*.h")]):
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return checksum


def _absent(reason: str) -> tuple[None, str]:
    say(f"native library: {reason}; plain torch does its work")
    return None, reason


def threads() -> int:
    """Threads of a native call: this rank's share of the usable cores, and no more than torch uses.

    `OMP_NUM_THREADS` is taken as it is, `torch.set_num_threads` lowers the share.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    share = len(os.sched_getaffinity(0)) // ranks
    return max(1, min(share, torch.get_num_threads()))
