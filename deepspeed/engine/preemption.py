"""Preemption signals: all ranks agree on a step, save and exit with code 85."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from typing import Any

from deepspeed.comm.watchdog import watchdog
from deepspeed.comm.watchdog.watchdog import stopping
from deepspeed.engine.checkpointing import CheckpointIO
from deepspeed.engine.engine_state import EngineState
from deepspeed.foundation.log import log_once, log_rank0

REQUEUE = 85
"""Exit code after a save that a signal requested."""
GRACE_S = 30.0
"""Maximum seconds between the signal and the end of the process; the variable DS_GRACE overrides it."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LAUNCHED_BY = ("DS_JOB_ID", "SLURM_JOB_ID", "TRAINING_JOB_NAME", "KUBERNETES_SERVICE_HOST")

_listening: weakref.WeakSet[Preemption] = weakref.WeakSet()
_process = [0]  # id of the process that must save; forked loader workers inherit the handler but must not save


class Preemption:
    """Checkpoint and exit of an engine after a preemption signal."""

    def __init__(self, state: EngineState, checkpoints: CheckpointIO) -> None:
        self._state, self._checkpoints = state, checkpoints
        self._folder = state.ds_config.top.checkpoint.signal_dir
        self._last_client_state: dict[str, Any] | None = None
        state.hooks.checkpointed.append(self._remember)

    def listen(self) -> None:
        """Install handlers for those of `SIGNALS` that have none, in the main thread only; existing handlers stay."""
        _listening.add(self)
        if threading.current_thread() is not threading.main_thread():
            return
        taken = [number for number in SIGNALS if self._is_free(number)]
        for number in taken:
            signal.signal(number, self._on_signal)
        _process[0] = os.getpid()
        if taken and self._folder is None and any(name in os.environ for name in _LAUNCHED_BY):
            names = ", ".join(number.name for number in taken)
            log_once(f"{names}: nothing will be saved before a checkpoint was saved or loaded, or signal_dir names one")

    @property
    def can_save(self) -> bool:
        """Return whether the save folder is known and the engine still has its state."""
        return self._folder is not None and not self._state.components.destroyed

    def _remember(self, folder: str | os.PathLike[str], client_state: dict[str, Any] | None = None) -> None:
        self._folder = self._state.ds_config.top.checkpoint.signal_dir or os.fspath(folder)
        self._last_client_state = client_state or self._last_client_state

    def stop_if_asked(self) -> None:
        """If all ranks agreed to stop after this update, save engines with a known folder and raise SystemExit(85).

        All ranks must call this after each update; raises CommError if another rank has failed.
        """
        number = watchdog.here.end_of_step()
        if number == 0:
            return
        for engine in list(_listening):
            if engine.can_save:
                engine._checkpoints.save_checkpoint(str(engine._folder), client_state=engine._last_client_state)
                engine._checkpoints.wait_for_checkpoint()
        log_rank0(f"{signal.Signals(number).name}: saved to {self._folder}; exit code {REQUEUE} asks for a new start")
        raise SystemExit(REQUEUE)

    @staticmethod
    def _is_free(number: int) -> bool:
        """Return whether the signal has no handler, neither in Python nor in C (as faulthandler's)."""
        if signal.getsignal(number) is not signal.SIG_DFL:
            return False
        with contextlib.suppress(OSError), open("/proc/self/status") as lines:
            caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
            return not int(caught, 16) >> (number - 1) & 1
        return True

    @staticmethod
    def _on_signal(number: int, _: Any) -> None:
        known = any(engine.can_save for engine in _listening)
        if known and os.getpid() == _process[0] and stopping.request == number:
            return  # the same signal twice: directly from the scheduler, and through the launcher's agent
        if known and os.getpid() == _process[0] and not stopping.request:
            stopping.ask(number)
            Preemption._end_after(float(os.environ.get("DS_GRACE") or GRACE_S), number)
            return
        left = watchdog.here.seconds_to_end()
        if left and os.getpid() == _process[0]:
            # The launcher ends the remaining ranks after a failure: first print this rank's report.
            Preemption._end_after(left, number)
            return
        signal.signal(number, signal.SIG_DFL)  # nothing to save, a worker, or another signal: the default action
        os.kill(os.getpid(), number)

    @staticmethod
    def _end_after(seconds: float, number: int) -> None:
        """End the process with code 128 + `number` after `seconds`, even if no further step runs."""
        end = threading.Timer(seconds, os._exit, (128 + number,))
        end.daemon = True
        end.start()
