"""Public attributes of `engine.optimizer` other than `step`, `backward` and state dicts."""

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
    """Methods of an engine that its optimizer calls for clients."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any: ...

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None: ...

    def reload_states(self, non_blocking: bool) -> None: ...

    def full_hp_param(self, param: Parameter, optim_state_key: str | None) -> torch.Tensor | None: ...


class OptimizerSurface:
    """Public attributes of an optimizer over shards, including those of upstream's optimizer that programs read.

    Attributes:
        nccl_start_alignment_factor: alignment of shards in upstream, in elements; shards of this package are unaligned.
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
        """Return the inner optimizer's state; see [Note: state by parameter]."""
        return adopt(self)

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value
        adopt(self)

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """Return `bit16_groups`."""
        return self.bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """Return this rank's shard of each updated flat group: 1-D, in the dtype of the master.

        Shards in memory are returned directly, shards on a disk as a copy. Writes are not detected:
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
        """Return the inner optimizer's groups: the same dicts that the client created."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """Return the factor on the loss (1 if losses are not scaled)."""
        return self.window.loss_scale

    cur_scale = loss_scale

    @property
    def clip_grad(self) -> float:
        """Return the clipping limit, 0 for none."""
        return self.settings.clip

    @property
    def dp_process_group(self) -> Any:
        """Return the process group of the ranks with the same model slice, over which gradients are averaged."""
        group = self.reducer.axes.dp_sp_group.group
        return get_own_group() if group is None else group

    @property
    def real_dp_process_group(self) -> list[Any]:
        """Return `dp_process_group` for each group of the optimizer."""
        return [self.dp_process_group for _ in self.bit16_groups]

    @property
    def param_names(self) -> dict[Parameter, str]:
        """Return the name of each updated parameter."""
        managed: list[Any] = [param for group in self.bit16_groups for param in group if is_managed(param)]
        return {param: param._ds_member.name for param in managed}

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return bool(getattr(self.scaler, "dynamic", False))

    @property
    def cpu_offload(self) -> bool:
        """Return whether masters and moments are stored outside of the device."""
        return any(group.updated.memory is None or group.updated.memory.device != group.device for group in self.groups)

    @property
    def partition_gradients(self) -> bool:
        """Return whether a rank stores only the gradients of its shards."""
        return any(group.policy.reduces_as_gradients_arrive for group in self.groups)

    @property
    def allgather_bucket_size(self) -> int:
        """Return the maximum number of elements in one all-gather of updated parameters: those of the largest group."""
        return max((group.full.numel() for group in self.groups), default=0)

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        """Return the parameters of each flat group as stored in memory: 1-D, concatenated, in their dtype.

        Raises:
            NotAvailableError: at stage 3, where no rank has the whole group.
        """
        if any(group.policy.gathers_before_use for group in self.groups):
            raise NotAvailableError("bit16_groups_flat: at stage 3 no rank has flat parameters; see GatheredParameters")
        return [group.full for group in self.groups]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[torch.Tensor]]:
        """Return the shard of each rank in each of `bit16_groups_flat`, as views."""
        bounds = [group.layout.cuts for group in self.groups]
        return [
            [flat[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
            for flat, cuts in zip(self.bit16_groups_flat, bounds, strict=True)
        ]

    def update_lp_params(self) -> None:
        """Round the masters into the parameters of the model. All ranks must call this."""
        all_gather_updated(self.groups)

    def check_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether a gradient of this window is not finite on any rank. All ranks must call this before `step`.

        Args:
            partition_gradients: accepted without effect: sharded gradients are checked by shard.
        """
        finite = True
        for bucket in self.reducer.buckets:
            for member in bucket.group.members:
                gradient = self.reducer.grad_of(member)
                finite = finite and (gradient is None or bool(gradient.isfinite().all()))
        return not all(all_gather_objects(self.reducer.axes.model_replica_group, finite))

    def quantize_nontrainable_params(self) -> None:
        """Raise an error: frozen parameters cannot be quantized, and stay in their dtype.

        Raises:
            NotAvailableError: always.
        """
        raise NotAvailableError("quantize_nontrainable_params is not available yet: it belongs to quantized gathers")

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move training state from the device to host memory, like `engine.offload_states`.

        Args:
            include: kinds of state; None: all kinds.
            device: "cpu".
            pin_memory: use page-locked memory.
            non_blocking: accepted without effect; see `engine.offload_states`.
        """
        self._attached().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Restore the state that `offload_states` moved, like `engine.reload_states`.

        Args:
            non_blocking: do not wait for the copies.
        """
        self._attached().reload_states(non_blocking)

    def get_full_hp_param(self, param: Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Return the master of a parameter, or a tensor of its optimizer state. All ranks must call this.

        Args:
            param: parameter of the engine's model.
            optim_state_key: None: the master; or `exp_avg`, `momentum_buffer`, …

        Returns:
            float32 tensor of the global shape; None for parameters without updates, and for state before the first
                step.
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
    """A rank's optimizer state, with access to its masters for clients.

    `state["fp32_flat_groups"]` and `state["single_partition_of_fp32_groups"]` return the current masters. They are not
    listed as keys, and neither saved nor copied with the state: the engine's checkpoint has them.

    Attributes:
        of: the optimizer with the masters; weakly referenced.
    """

    of: Callable[[], OptimizerSurface | None] = staticmethod(lambda: None)

    def __missing__(self, key: str) -> list[torch.Tensor]:
        optimizer = self.of()
        if optimizer is not None and key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            return optimizer.single_partition_of_fp32_groups
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
