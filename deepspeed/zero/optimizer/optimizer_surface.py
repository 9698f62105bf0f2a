"""The public attributes of `engine.optimizer` other than `step`, `backward` and state dicts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Parameter

from deepspeed.comm.collectives.torch_api import all_gather_objects
from deepspeed.comm.process_groups.axis import get_own_group
from deepspeed.errors import NotAvailableError, UsageError
from deepspeed.optim.separability import UpdateTraits
from deepspeed.zero.gradients.accumulation import AccumulationWindow
from deepspeed.zero.gradients.reducer import Reducer
from deepspeed.zero.optimizer.optimizer_shard import Fragment
from deepspeed.zero.optimizer.optimizer_state import OptimizerState, adopt
from deepspeed.zero.optimizer.update import all_gather_updated
from deepspeed.zero.parameters.parameter import is_managed

if TYPE_CHECKING:
    from deepspeed.zero.parameters.shard_group import ShardGroup


class TrainingEngine(Protocol):
    """The methods of an engine that its optimizer calls for clients."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any: ...

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None: ...

    def reload_states(self, non_blocking: bool) -> None: ...

    def full_hp_param(self, param: Parameter, optim_state_key: str | None) -> torch.Tensor | None: ...


class OptimizerSurface:
    """The public attributes of an optimizer over shards, among them those that programs read of the reference's.

    Attributes:
        nccl_start_alignment_factor: shards start at multiples of as many elements in the reference; here anywhere.
    """

    reducer: Reducer
    scaler: Any
    nccl_start_alignment_factor = 1

    optimizer: torch.optim.Optimizer  # over the leaves
    fragments: dict[int, list[Fragment]]
    groups: Sequence[ShardGroup]
    bit16_groups: list[list[Parameter]]  # the model's parameters that each group of the optimizer updates
    traits: UpdateTraits  # of the optimizer
    settings: Any  # see `optimizer.StepSettings`
    window: AccumulationWindow
    engine: TrainingEngine | None = None  # that it is attached to

    @property
    def state(self) -> OptimizerState:
        """The inner optimizer's state; see [Note: state by parameter]."""
        return adopt(self)

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value
        adopt(self)

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """See `bit16_groups`."""
        return self.bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """This rank's shard of each flat group that is updated: 1-D, in the dtype of the master.

        Shards in memory are given as they are, shards on a disk as a copy. A write is not detected:
        `safe_set_full_fp32_param` sets masters.
        """
        partitions = []
        for group in self.groups:
            if group.under_leaves is None:
                continue
            memory = group.updated.memory
            if memory is not None:
                partitions.append(memory.detach())
            else:
                with group.updated.borrowed() as lent:
                    partitions.append(lent.detach().clone())
        return partitions

    fp32_partitioned_groups_flat = single_partition_of_fp32_groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: the same dicts that the client created."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """Factor on the loss (1 when losses are not scaled)."""
        return self.window.loss_scale

    cur_scale = loss_scale

    @property
    def clip_grad(self) -> float:
        """The clipping limit, 0 for none."""
        return self.settings.clip

    @property
    def dp_process_group(self) -> Any:
        """The process group of the ranks with the same slice of the model, over which gradients are averaged."""
        group = self.reducer.axes.dp_sp_group.group
        return get_own_group() if group is None else group

    @property
    def real_dp_process_group(self) -> list[Any]:
        """`dp_process_group` for each group of the optimizer."""
        return [self.dp_process_group for _ in self.bit16_groups]

    @property
    def param_names(self) -> dict[Parameter, str]:
        """The name of each parameter that is updated."""
        managed: list[Any] = [param for group in self.bit16_groups for param in group if is_managed(param)]
        return {param: param._ds_member.name for param in managed}

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return bool(getattr(self.scaler, "dynamic", False))

    @property
    def cpu_offload(self) -> bool:
        """Whether masters and moments rest outside of the device."""
        return any(group.updated.memory is None or group.updated.memory.device != group.device for group in self.groups)

    @property
    def partition_gradients(self) -> bool:
        """Whether a rank keeps the gradients of its shards only."""
        return any(group.policy.reduces_as_gradients_arrive for group in self.groups)

    @property
    def allgather_bucket_size(self) -> int:
        """Most elements that one all-gather of updated parameters fills: those of the largest group."""
        return max((group.full.numel() for group in self.groups), default=0)

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        """The parameters of each flat group as they lie in memory, one after the other: 1-D, in their dtype.

        Raises:
            NotAvailableError: at stage 3, where nobody has them whole.
        """
        if any(group.policy.gathers_before_use for group in self.groups):
            raise NotAvailableError("bit16_groups_flat: at stage 3 no rank has flat parameters; see GatheredParameters")
        return [group.full for group in self.groups]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[torch.Tensor]]:
        """The shard of each rank in each of `bit16_groups_flat`: views of it."""
        bounds = [group.layout.cuts for group in self.groups]
        return [
            [flat[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
            for flat, cuts in zip(self.bit16_groups_flat, bounds, strict=True)
        ]

    def update_lp_params(self) -> None:
        """Round the masters into the parameters of the model. All ranks call together."""
        all_gather_updated(self.groups)

    def check_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient of this window is not finite on any rank. All ranks call together, before `step`.

        Args:
            partition_gradients: accepted: shards are looked at where there are shards.
        """
        finite = True
        for bucket in self.reducer.buckets:
            for member in bucket.group.members:
                gradient = self.reducer.grad_of(member)
                finite = finite and (gradient is None or bool(gradient.isfinite().all()))
        return not all(all_gather_objects(self.reducer.axes.model_replica_group, finite))

    def quantize_nontrainable_params(self) -> None:
        """Not available: frozen parameters stay in their dtype.

        Raises:
            NotAvailableError: always.
        """
        raise NotAvailableError("quantize_nontrainable_params is not available yet: it belongs to quantized gathers")

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move training state from the device to host memory, as `engine.offload_states` does.

        Args:
            include: kinds of state; None: all of them.
            device: "cpu".
            pin_memory: into page-locked memory.
            non_blocking: accepted; see the engine's.
        """
        self._attached().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved, as `engine.reload_states` does.

        Args:
            non_blocking: do not wait until the copies are over.
        """
        self._attached().reload_states(non_blocking)

    def get_full_hp_param(self, param: Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """The master of a parameter, or a tensor of its optimizer state. All ranks call together.

        Args:
            param: of the engine's model.
            optim_state_key: None: the master; or `exp_avg`, `momentum_buffer`, …

        Returns:
            float32, of the global shape; None for a parameter that is not updated, and before the first step for state.
        """
        return self._attached().full_hp_param(param, optim_state_key)

    def _attached(self) -> TrainingEngine:
        if self.engine is None:
            raise UsageError("this optimizer is not attached to an engine")
        return self.engine

    def _rank_state(self, **state: Any) -> RankState:
        rank_state = RankState(state)
        rank_state.of = weakref.ref(self)
        return rank_state


class RankState(dict[str, Any]):
    """A rank's optimizer state, in which clients also look for its masters.

    `state["fp32_flat_groups"]` and `state["single_partition_of_fp32_groups"]` give the masters of this moment. They are
    among no keys and neither saved nor copied with it: the engine's checkpoint has them.

    Attributes:
        of: the optimizer that has the masters; a state that somebody keeps does not keep it.
    """

    of: Callable[[], OptimizerSurface | None] = staticmethod(lambda: None)

    def __missing__(self, key: str) -> list[torch.Tensor]:
        optimizer = self.of()
        if optimizer is not None and key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            return optimizer.single_partition_of_fp32_groups
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
