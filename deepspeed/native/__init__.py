"""Loader of the native library of CPU kernels, which is optional."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed.foundation.fake_mode import Replaceable
from deepspeed.foundation.log import log_rank0

__all__ = ["INSTRUCTION_SETS", "KINDS", "library", "state", "threads"]

# In the order of numbers.h.
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INSTRUCTION_SETS = ("portable", "AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16", "AMX")

_FILE = Path(__file__).with_name("library.so")
_BUILD = "`python setup.py build_ext --inplace` in the source tree (or `pip install -v`) builds it or shows why not"
_NO_SOURCES = "not in this wheel; the one for this platform, or an installation from the sources, has it"
_OPENMP = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\n]*\.so[.\d]*$", re.MULTILINE)


presented: Replaceable[Callable[[ctypes.CDLL], ctypes.CDLL]] = Replaceable(lambda loaded: loaded)
"""Wrapper of the loaded library; simulations replace it."""


def library() -> ctypes.CDLL | None:
    """Return the library, loaded at the first call; None if it cannot be used, which is logged once on rank 0.

    Callers declare the argument types of its functions. `DS_NATIVE=0` in the environment disables the library.
    """
    loaded = _load()[0]
    return None if loaded is None else presented.current(loaded)


def state() -> str:
    """Describe the state of the library: which kernels run, or why none do."""
    return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("DS_NATIVE") == "0":
        return _absent("off (DS_NATIVE=0)")
    sources = sorted([*_FILE.parent.glob("*.cpp"), *_FILE.parent.glob("*.h")])
    if not _FILE.exists():
        return _absent(f"not built; {_BUILD}" if sources else _NO_SOURCES)
    try:
        loaded = _opened()
    except OSError as error:
        return _absent(f"cannot be loaded ({error}); {_BUILD}")
    if sources and loaded.ds_fingerprint() & 0xFFFFFFFF != _fingerprint(sources):
        return _absent(f"built from other sources than those beside it; {_BUILD}")
    used = INSTRUCTION_SETS[loaded.ds_instruction_set(len(INSTRUCTION_SETS))]
    return loaded, f"{used} kernels on {threads()} threads"


def _opened() -> ctypes.CDLL:
    """Load the library with torch's OpenMP runtime; the library links no runtime, so that a process has only one."""
    try:
        return ctypes.CDLL(str(_FILE))
    except OSError as error:
        if "undefined symbol" not in str(error):
            raise
    # torch usually loads OpenMP with global symbols; other builds of torch have it in the process too
    loaded = _OPENMP.findall(Path("/proc/self/maps").read_text()) if os.path.exists("/proc/self/maps") else []
    for path in dict.fromkeys([*loaded, "libgomp.so.1", "libomp.so.5"]):  # the last is clang's, if it built the library
        with contextlib.suppress(OSError):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(_FILE))
    return ctypes.CDLL(str(_FILE))


def _fingerprint(sources: list[Path]) -> int:
    """Hash the sources, in the same way as setup.py."""
    checksum = 0
    for source in sources:
        checksum = zlib.crc32(source.read_bytes(), checksum)
    return checksum


def _absent(reason: str) -> tuple[None, str]:
    level = logging.INFO if reason.startswith("off") else logging.WARNING
    log_rank0(f"native library: {reason}; plain torch does its work", level)
    return None, reason


def threads() -> int:
    """Return the number of threads of a native call: this rank's share of the usable cores, at most torch's number.

    If the variable `OMP_NUM_THREADS` is set, the result is torch's number (`torch.get_num_threads`).
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    share = len(os.sched_getaffinity(0)) // ranks
    return max(1, min(share, torch.get_num_threads()))
