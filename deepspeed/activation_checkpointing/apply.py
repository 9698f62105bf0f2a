"""Activation checkpointing of a model's repeated blocks, as the `activation_checkpointing` block configures it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import Token
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from deepspeed.activation_checkpointing.recompute import Checkpointer, calls, inside_checkpoint
from deepspeed.config.sections.memory import ActivationCheckpointing
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.foundation.log import log_once, log_rank0
from deepspeed.foundation.replaced_forward import ReplacedForward, withdraw
from deepspeed.zero.layout.units import repeated_blocks
from deepspeed.zero.parameters.module_hooks import Hook

_TRANSFORMERS = "_gradient_checkpointing_func"  # set by Transformers' gradient checkpointing


class BlockForward(ReplacedForward):
    """Checkpointed replacement for a block's `forward`. A copy or pickle of the block has the original `forward`.

    Args:
        block: the block.
        checkpointer: runner of the block's calls.
    """

    def __init__(self, block: nn.Module, checkpointer: Checkpointer) -> None:
        super().__init__(block)
        self._checkpointer = checkpointer
        self._norms = [m for m in block.modules() if isinstance(m, _NormBase)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or inside_checkpoint():
            return self.inner(*args, **kwargs)
        args, kwargs = self._without_caches(args), self._without_caches(kwargs)
        return self._checkpointer.run(self.inner, args, kwargs, self._statistics_kept)

    @staticmethod
    def _without_caches(arguments: Any) -> Any:
        """Replace key-value caches in the arguments by None: the recomputation would append to them again."""

        def keep(value: Any) -> Any:
            if hasattr(value, "get_seq_length"):
                log_once("activation checkpointing: key-value caches are not filled while training")
                return None
            return value

        if isinstance(arguments, dict):
            return {name: keep(value) for name, value in arguments.items()}
        return tuple(keep(value) for value in arguments)

    @contextlib.contextmanager
    def _statistics_kept(self) -> Iterator[None]:
        """Freeze running statistics of batch norms during recomputation, since forward has already updated them."""
        before = []
        for norm in self._norms:
            if norm.training and norm.num_batches_tracked is not None:
                before.append((norm, norm.momentum, norm.num_batches_tracked))
                norm.momentum, norm.num_batches_tracked = 0.0, norm.num_batches_tracked.clone()
        try:
            yield
        finally:
            for norm, momentum, seen in before:
                norm.momentum, norm.num_batches_tracked = momentum, seen


def _itself(value: Any) -> Any:
    return value


def checkpointed_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the modules in `module`, itself included, whose forward runs in a checkpoint with the configured flags."""

    def runs_in_one(each: nn.Module) -> bool:
        forward = vars(each).get("forward")
        while isinstance(forward, ReplacedForward) and not isinstance(forward, BlockForward):
            forward = forward.inner  # random-LTD and layer drop replace it again, around the checkpoint
        return isinstance(forward, BlockForward) or isinstance(vars(each).get(_TRANSFORMERS), _Governed)

    return [each for each in module.modules() if runs_in_one(each)]


class Wrapping:
    """Activation checkpointing of one model: wrapped blocks, or flags for the model's own checkpoints.

    Args:
        model: the model.
        flags: the `activation_checkpointing` block.
        mpu: model-parallel unit as in Megatron; None: the unit of `deepspeed.checkpointing.configure`.

    Raises:
        DeepSpeedConfigError: `enabled` is true, but the model has no repeated blocks.
    """

    def __init__(self, model: nn.Module, flags: ActivationCheckpointing, mpu: Any) -> None:
        self._model = model
        self._wants = flags.enabled if flags.enabled is not None else bool(self.flags_set(flags))
        mpu = calls.mpu if mpu is None else mpu
        blocks = repeated_blocks(model)
        if flags.number_checkpoints is None and blocks:
            flags = flags.model_copy(update={"number_checkpoints": len(blocks)})
        self.checkpointer = Checkpointer(flags, mpu)
        self._wrapped: list[tuple[nn.Module, BlockForward]] = []
        self._governed: list[tuple[nn.Module, Any]] = []
        self._tokens: list[Token[Any]] = []
        self._first = True
        self._calls_before = 0
        if self._wants and not self._govern_transformers():
            self._wrap(blocks)
        self._handles = [
            model.register_forward_pre_hook(Hook(self._enter, transparent=True), prepend=True),
            model.register_forward_hook(Hook(self._leave, transparent=True), always_call=True),
        ]

    @staticmethod
    def flags_set(flags: ActivationCheckpointing) -> list[str]:
        """Return the names of the flags that are true and imply `enabled`."""
        names = ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
        return [name for name in names if getattr(flags, name)]

    def _wrap(self, blocks: list[nn.Module]) -> None:
        if not blocks:
            text = (
                f"no repeated blocks are in {type(self._model).__name__} (several modules of one class in a "
                f"ModuleList, ModuleDict or Sequential)"
            )
            if self.checkpointer.flags.enabled:
                raise DeepSpeedConfigError(
                    f"activation_checkpointing.enabled is true, but {text}; put the blocks into a ModuleList, or leave "
                    f"the key out and call deepspeed.checkpointing.checkpoint in forward"
                )
            log_rank0(
                f"activation checkpointing: {text}; the flags hold for calls of deepspeed.checkpointing.checkpoint"
            )
            return
        for block in blocks:
            forward = block.forward = BlockForward(block, self.checkpointer)
            self._wrapped.append((block, forward))
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(type(b).__name__ for b in blocks).items())
        flags = ", ".join(self.flags_set(self.checkpointer.flags))
        log_rank0(
            f"activation checkpointing: {len(blocks)} blocks ({kinds}) are computed again in backward"
            + (f"; {flags}" if flags else "")
        )

    def _unwrap(self) -> None:
        for block, forward in self._wrapped:
            withdraw(block, forward)
        self._wrapped.clear()

    def _govern_transformers(self) -> bool:
        """Apply the flags to Transformers' gradient checkpointing; returns whether it is on."""
        on = [m for m in self._model.modules() if getattr(m, "gradient_checkpointing", False) is True]
        for module in on:
            own = vars(module).get(_TRANSFORMERS)
            if own is not None and not isinstance(own, _Governed):
                setattr(module, _TRANSFORMERS, _Governed(own, self.checkpointer))
                self._governed.append((module, own))
        if self._governed:
            self._unwrap()
            log_rank0(
                "activation checkpointing: the model's gradient checkpointing is on; its blocks are not wrapped again"
            )
        return bool(self._governed)

    # -- around the model's forward -------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._first and self._wants and not self._governed:
            self._govern_transformers()
        self._calls_before = calls.made
        self._tokens.append(calls.running.set(self.checkpointer))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        calls.running.reset(self._tokens.pop())
        if not self._first or not torch.is_grad_enabled():
            return
        self._first = False
        if self._wrapped and calls.made > self._calls_before:
            self._unwrap()
            log_rank0(
                "activation checkpointing: the model calls deepspeed.checkpointing.checkpoint itself; its blocks are "
                "no longer wrapped, the flags hold for those calls"
            )

    def remove(self) -> None:
        """Restore the model's original forward and checkpointing functions, and remove the hooks."""
        self._unwrap()
        for module, own in self._governed:
            setattr(module, _TRANSFORMERS, own)
        for handle in self._handles:
            handle.remove()


class _Governed:
    """Wrapper of a model's own checkpointing function, which applies the configured flags to its calls."""

    def __init__(self, own: Callable[..., Any], checkpointer: Checkpointer) -> None:
        self._own, self._checkpointer = own, checkpointer

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._checkpointer.governed("a block of the model"):
            return self._own(function, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._own,)


def wrap(model: nn.Module, flags: ActivationCheckpointing, mpu: Any) -> Wrapping | None:
    """Apply the configured flags to a model; returns None if no flag is set. Arguments and errors as in `Wrapping`."""
    asks = flags.enabled or Wrapping.flags_set(flags) or flags.profile or flags.synchronize_checkpoint_boundary
    return Wrapping(model, flags, mpu) if asks else None
