"""Temporary move of training state off the device (`engine.offload_states`)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import ArgumentError, UsageError
from deepspeed.storage.buffer_pool import BufferPool
from deepspeed.storage.device_tier import RESIDENT, Resident
from deepspeed.zero.parameters.shard_group import meet_before_change


class OffloadDeviceEnum(str, enum.Enum):
    """Storage tiers of training state, with their names in the JSON."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Kinds of training state: optimizer state, masters, stage-3 parameters, gradient sums, reduction buffers."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class OffloadStates:
    """Temporary move of training state off the device; `before_forward` registers a forward pre-hook."""

    def __init__(self, state: EngineState, before_forward: Callable[[Callable[..., None]], Any]) -> None:
        self._state, self._before_forward = state, before_forward
        self._away: BufferPool | None = None
        self._returning: BufferPool | None = None  # source of the last reload, whose copies may not have finished
        self._refusal: Any = None

    def offload_states(
        self,
        include: Iterable[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move training state from the device to host memory until `reload_states`. All ranks must call this.

        State that is already offloaded (`offload_optimizer`, `offload_param`), and whole parameters (stages 0 to 2),
        are not moved. Until the state is reloaded, a forward pass of the engine raises UsageError.

        Args:
            include: kinds of state; None: all kinds.
            device: destination; only "cpu" is available.
            pin_memory: use page-locked memory.
            non_blocking: accepted without effect: the call waits, since memory can be freed only after the copy.

        Raises:
            ArgumentError: another device, or an unknown kind.
            UsageError: the state is already offloaded, or gradients were accumulated since the last update.
        """
        if device != "cpu":
            raise ArgumentError(f"offload_states(device={device!r}): state can be moved to 'cpu'")
        names = sorted(kind.value for kind in OffloadStateTypeEnum)
        kinds = []
        for kind in OffloadStateTypeEnum if include is None else include:
            if getattr(kind, "value", kind) not in names:
                raise ArgumentError(f"offload_states: there is no state {kind!r}; there are {', '.join(names)}")
            kinds.append(OffloadStateTypeEnum(kind))
        reducer, optimizer = self._state.components.reducer, self._state.components.optimizer
        if self._away is not None:
            raise UsageError("offload_states: state was moved already; call reload_states() first")
        if reducer is not None and not reducer.clean:
            raise UsageError("offload_states in the middle of a window: its gradients are on the device; step first")
        if self._state.components.lifecycle is not None:
            self._state.components.lifecycle.settle()
            meet_before_change(self._state.components.groups)  # a slower rank may still read the state to be moved
        pool = self._away = BufferPool(pin=pin_memory)
        for held in self._held(kinds):
            held.evict(pool)
        if optimizer is not None and OffloadStateTypeEnum.optim_states in kinds:
            for shard in optimizer.shards:
                shard.evict_state(pool)
        if reducer is not None and OffloadStateTypeEnum.contiguous_grad_buffer in kinds:
            reducer.reduce_scatter.forget_buffers()
        self._refusal = self._before_forward(self._reject_moved_state)
        get_accelerator().empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Restore the state that `offload_states` moved, if any. All ranks must call this.

        Args:
            non_blocking: do not wait for the copies; later work on the device is ordered after them.
        """
        if self._away is None:
            return
        for held in self._held(list(OffloadStateTypeEnum)):
            held.restore(non_blocking)
        if self._state.components.optimizer is not None:
            for shard in self._state.components.optimizer.shards:
                shard.restore_state(non_blocking)
        self._refusal.remove()
        if self._returning is None:
            self._state.hooks.ended.append(self._let_pinned_go)
        self._returning, self._away, self._refusal = self._away, None, None
        self._let_pinned_go(wait=not non_blocking)

    def _let_pinned_go(self, wait: bool = False) -> None:
        """Release the host memory of the last reload once its copies have finished; called at each step."""
        if self._returning is not None and (wait or self._returning.idle):
            self._returning.shrink()
            self._returning = None
            self._state.hooks.ended.remove(self._let_pinned_go)

    @staticmethod
    def _reject_moved_state(*_: Any) -> None:
        raise UsageError("training state was moved by engine.offload_states(); call engine.reload_states() first")

    def _held(self, kinds: list[OffloadStateTypeEnum]) -> list[Resident]:
        """Return the state of these kinds that the JSON keeps on the device, also if `offload_states` has moved it."""
        tensors: list[Any] = []
        for group in self._state.components.groups:
            if OffloadStateTypeEnum.hp_params in kinds and group.tiers.optimizer is RESIDENT:
                tensors.append(group.master)
            if OffloadStateTypeEnum.lp_params in kinds and group.policy.gathers_before_use:
                tensors.append(group.values if group.tiers.parameters is RESIDENT else None)
        if OffloadStateTypeEnum.lp_grads in kinds and self._state.components.reducer is not None:
            tensors += [b.sum for b in self._state.components.reducer.buckets if b.group.tiers.optimizer is RESIDENT]
        return [stored for stored in tensors if isinstance(stored, Resident)]
