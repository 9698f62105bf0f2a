"""One persistent worker: joins the gloo group once, then runs the functions that come through its pipe."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

import deepspeed
from deepspeed.comm.watchdog import watchdog
from deepspeed.foundation.log import logger
from tests.harness.police import Police

TIMEOUT = datetime.timedelta(seconds=60)  # of one collective


def answer(request: bytes) -> tuple[bool, Any]:
    """Run one pickled `(function, arguments)`; `(True, result)` or `(False, traceback)`."""
    try:
        modules = len(sys.modules)
        fn, args = pickle.loads(request)
        police, level = Police(), logger.level
        try:
            result = fn(*args)
        finally:
            logger.setLevel(level)  # clients set it
        gc.collect()
        if len(sys.modules) > modules:  # looking whether anything is frozen would count it all
            while gc.collect():  # tensors that C++ holds are let go layer by layer; nothing of them is to be kept
                pass
            gc.freeze()  # what importing makes stays: looking through it after every request took most of the time
        left = police.report()
        return (False, f"{fn.__qualname__} left behind: {left}") if left else (True, result)
    except BaseException:  # also SystemExit: a rank must always answer
        return False, traceback.format_exc()


def join() -> None:
    """Meet the other ranks."""
    deepspeed.init_distributed("gloo", timeout=TIMEOUT)


def main(join: Callable[[], None] = join) -> None:
    """Serve until the pipe closes.

    Args:
        join: meets the other ranks.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.filterwarnings("error", module=r"deepspeed(\.|$)")
    torch.set_num_threads(1)
    join()  # with the group lives a thread that watches it
    gc.freeze()
    pipe = Connection(int(sys.argv[1]))
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            return
        ok, value = answer(request)
        ended = watchdog.here.raised or watchdog.here.verdict is not None  # the group was told to end
        pipe.send_bytes(pickle.dumps((ok, value, ended)))
        sys.stderr.flush()


if __name__ == "__main__":
    main()
