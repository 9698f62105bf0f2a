"""Functions that scripts call directly: `configure`, `checkpoint` and the random-state functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import rng
from deepspeed.activation_checkpointing.recompute import calls
from deepspeed.activation_checkpointing.rng import RNGTracker
from deepspeed.config import DeepSpeedConfig
from deepspeed.config.sections.memory import ActivationCheckpointing
from deepspeed.errors import ArgumentError
from deepspeed.foundation.script_helpers import detach_variable  # noqa: F401  programs import it from here

_OF_TORCH = ("preserve_rng_state", "determinism_check", "debug")


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set the flags of `checkpoint` for calls outside of engines that have their own flags.

    For each flag, None means the value of `deepspeed_config`. With `partition_activations`, all ranks must call this.

    Args:
        mpu_: a model-parallel unit (`get_model_parallel_group`, `…_rank`); None: no model parallelism.
        deepspeed_config: parsed configuration, or dict, path or base64 of a JSON; None: the defaults.
        partition_activations: partition saved activations over the ranks of the unit's group.
        contiguous_checkpointing: store saved inputs in one buffer (`contiguous_memory_optimization`).
        num_checkpoints: initial capacity of that buffer, in checkpoints (`number_checkpoints`).
        checkpoint_in_cpu: store saved inputs in host memory (`cpu_checkpointing`).
        synchronize: synchronize the device before and after each checkpoint (`synchronize_checkpoint_boundary`).
        profile: log the time of each checkpoint.

    Raises:
        DeepSpeedConfigError: the configuration is invalid.
    """
    flags = ActivationCheckpointing()
    if deepspeed_config is not None:
        config = deepspeed_config
        if not isinstance(config, DeepSpeedConfig):
            config = DeepSpeedConfig.for_init(config)
        flags = config.top.activation_checkpointing
    calls.configure(
        flags,
        mpu_,
        partition_activations=partition_activations,
        contiguous_memory_optimization=contiguous_checkpointing,
        number_checkpoints=num_checkpoints,
        cpu_checkpointing=checkpoint_in_cpu,
        synchronize_checkpoint_boundary=synchronize,
        profile=profile,
    )


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` and save only its inputs. Backward recomputes it with the same random states.

    Args:
        function: a module or callable.
        args: positional arguments of `function`.
        kwargs: keyword arguments of `function`. For scripts that replace `torch.utils.checkpoint.checkpoint`,
            `preserve_rng_state`, `determinism_check` and `debug` are passed to torch, and `use_reentrant` is dropped.

    Returns:
        The outputs of `function`.
    """
    calls.made += 1
    options = {name: kwargs.pop(name) for name in _OF_TORCH if name in kwargs}
    kwargs.pop("use_reentrant", None)  # always False here
    return calls.checkpointer().run(function, args, kwargs, **options)


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """Form of `checkpoint` with the interface of an autograd function, for Megatron's scripts."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Return `checkpoint(function, *args)`, and append its outputs to `all_outputs`."""
        outputs = checkpoint(function, *args)
        all_outputs += outputs if isinstance(outputs, tuple) else (outputs,)
        return outputs


def is_configured() -> bool:
    """Return whether `configure`, or a function that changes one flag, was called."""
    return calls.configured is not None


def reset() -> None:
    """Free the contiguous buffers; the flags do not change."""
    if calls.configured is not None and calls.configured.saver.buffers is not None:
        calls.configured.saver.buffers.clear()


def set_num_layers(nlayers: int) -> None:
    """Set the initial capacity of the contiguous buffer, in checkpoints.

    Raises:
        ArgumentError: `nlayers` is less than 1.
    """
    if nlayers < 1:
        raise ArgumentError(f"set_num_layers({nlayers}): a model has at least one layer")
    calls.configure(calls.checkpointer().flags, calls.checkpointer().mpu, number_checkpoints=nlayers)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn the flag `partition_activations` on or off. All ranks of the model-parallel group must call this."""
    flags, mpu = calls.checkpointer().flags, calls.checkpointer().mpu
    calls.configure(flags, mpu, partition_activations=partition_activation)


def get_cuda_rng_tracker() -> RNGTracker:
    """Return the tracker of the named random states of the current device, CUDA or not."""
    return rng.tracker


_CUDA_RNG_STATE_TRACKER = rng.tracker
_MODEL_PARALLEL_RNG_TRACKER_NAME = rng.MODEL_PARALLEL


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Set the random state of the device with the index `device`; -1: the current device."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with `seed`; replace all named states by "model-parallel-rng", which differs between ranks.

    Args:
        seed: the same on every rank of the group.
    """
    rng.tracker.reset()
    get_accelerator().manual_seed(seed)
    rng.tracker.add(rng.MODEL_PARALLEL, seed + rng.SEED_OFFSET + (rng.of_model_parallel(calls.mpu, "rank") or 0))


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed "model-parallel-rng" by `seed` and the model-parallel rank; the device's default state does not change.

    Args:
        seed: the same on every rank of the group.
    """
    rank = rng.of_model_parallel(calls.mpu, "rank") or 0
    rng.tracker.reseed(rng.MODEL_PARALLEL, seed + rng.SEED_OFFSET + rank)
