"""Attributes and methods of the original DeepSpeed's engine that client programs use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.compat.upstream_names import TorchCheckpointEngine
from deepspeed.checkpoint.compat.upstream_write import SCRIPTS
from deepspeed.comm.process_groups.axis import get_own_group
from deepspeed.comm.process_groups.process_group import get_backend
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import NotAvailableError
from deepspeed.foundation.log import log_rank0, warn_once
from deepspeed.zero.api.tensor_access import safe_get_full_fp32_param, safe_get_full_optimizer_state

# Methods of the original DeepSpeed's engine that programs replace. This engine does not have them.
_REPLACED = (
    "_broadcast_model",
    "_configure_optimizer",
    "_create_checkpoint_file",
    "_save_checkpoint",
    "clip_fp32_gradients",
)


def warn_of_replaced_methods(engine: type) -> None:
    """Warn about methods that a program has set on the engine's class and that the engine does not call."""
    for name in _REPLACED:
        if hasattr(engine, name):
            warn_once(
                f"{engine.__name__}.{name} was set by the program; this engine does not call it: see docs/names.md"
            )


class ProgramAttributes:
    """Attributes and methods of the original DeepSpeed's engine that have no other implementation here.

    Attributes:
        warn_unscaled_loss: accepted without effect.
    """

    _state: EngineState
    global_steps: int
    warn_unscaled_loss = True
    checkpoint_engine = TorchCheckpointEngine()

    @property
    def _config(self) -> DeepSpeedConfig:
        return self._state.ds_config

    @property
    def dist_backend(self) -> str:
        """Return torch's name of the communication backend; raises UsageError without a process group."""
        return get_backend()

    @property
    def seq_data_parallel_group(self) -> Any:
        """Return the process group of the ranks with the same model slice."""
        group = self._state.axes.dp_sp_group.group
        return get_own_group() if group is None else group

    @property
    def _support_torch_style_backward(self) -> bool:
        """Return True: without loss scale and sp, `loss.backward()` is equivalent to `engine.backward(loss)`."""
        return True

    def fp16_master_weights_and_gradients(self) -> bool:
        """Return whether masters and gradients are fp16."""
        return self._state.ds_config.fp16.fp16_master_weights_and_grads

    def get_compile_time(self) -> float:
        """Return 0.0, in place of the seconds of graph compilation, which are not measured."""
        return 0.0

    def set_data_post_process_func(self, post_process_func: Any) -> None:
        """Raise NotAvailableError: post-processing of batches is not available."""
        raise NotAvailableError("set_data_post_process_func is not available yet: it belongs to data efficiency")

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Log the time of a forward pass, `fwd_time` in milliseconds."""
        log_rank0(f"forward: {fwd_time:.2f} ms")

    def _report_progress(self: Any, step: int) -> None:
        """Log the step, the number of skipped steps, the learning rates and the momenta."""
        log_rank0(f"step={step}, skipped={self._state.skipped_steps}, lr={self.get_lr()}, mom={self.get_mom()}")

    def _copy_recovery_script(self, save_path: str) -> None:
        """Write `zero_to_fp32.py` into a folder; the script converts the folder's checkpoints to fp32 weights."""
        for name, text in SCRIPTS.items():
            Path(save_path, name).write_bytes(text)

    def full_hp_param(self, param: torch.nn.Parameter, optim_state_key: str | None) -> torch.Tensor | None:
        """Return the result of `safe_get_full_fp32_param` or `safe_get_full_optimizer_state`. Collective.

        Args:
            optim_state_key: name of the state tensor, such as "exp_avg"; None: the fp32 master.
        """
        if optim_state_key is None:
            return safe_get_full_fp32_param(param)
        return safe_get_full_optimizer_state(param, optim_state_key)
