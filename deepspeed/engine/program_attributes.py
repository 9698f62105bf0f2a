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
from deepspeed.data.curriculum_sampler import CurriculumSampler
from deepspeed.engine.data_sampling import loader_of, sampling_of
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import UsageError
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

    def curriculum_learning_enabled(self) -> bool:
        """Return whether the JSON asks for `training_data` sampled by difficulty."""
        sampling = sampling_of(self._state)
        return sampling is not None and sampling.curriculum_learning.enabled

    def set_data_post_process_func(self, post_process_func: Any) -> None:
        """Set a function that changes every batch of `training_dataloader`: (batch, state of the sampler) → batch.

        The state has "current_difficulties" by metric if `training_data` is sampled by difficulty.

        Raises:
            UsageError: the engine has no loader of `training_data`.
        """
        loader_of(self._state).set_post_process(post_process_func)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: dict[str, Any]) -> None:
        """Set functions from step (from 1) to difficulty, by metric, of schedules of the type "custom".

        Raises:
            UsageError: `training_data` is not sampled by difficulty, a metric is unknown or has another schedule.
        """
        sampler = loader_of(self._state).custom_sampler
        if not isinstance(sampler, CurriculumSampler):
            raise UsageError("training_data is not sampled by difficulty: enable data_sampling.curriculum_learning")
        sampler.set_schedules(schedule_func_dict)

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
