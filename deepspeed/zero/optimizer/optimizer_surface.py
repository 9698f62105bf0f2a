"""Public attributes of `engine.optimizer`, except those of `ZeroOptimizer` itself.

The inner optimizer is the torch optimizer of the user; its parameters, called leaves, are views of the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import Parameter

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.collectives import scalars
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
    """Methods of an engine to which its optimizer forwards calls of the user."""

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> Any: ...

    def offload_states(self, include: Any, device: Any, pin_memory: bool, non_blocking: bool) -> None: ...

    def reload_states(self, non_blocking: bool) -> None: ...

    def full_hp_param(self, param: Parameter, optim_state_key: str | None) -> torch.Tensor | None: ...


class OptimizerSurface:
    """Public attributes of the ZeRO optimizer, with the names of upstream DeepSpeed's optimizers.

    Attributes:
        nccl_start_alignment_factor: alignment of shards for NCCL, in elements; always 1 (no alignment).
    """

    reducer: Reducer
    scaler: Any
    nccl_start_alignment_factor = 1

    optimizer: torch.optim.Optimizer  # inner optimizer, with leaves as parameters
    fragments: dict[int, list[Fragment]]
    groups: Sequence[ShardGroup]
    bit16_groups: list[list[Parameter]]  # model parameters in each group of the optimizer
    traits: UpdateTraits  # allowed ways to split the inner optimizer's update
    settings: Any  # see `optimizer.StepSettings`
    window: AccumulationWindow
    engine: TrainingEngine | None = None  # engine to which the optimizer belongs
    _norm: float | torch.Tensor | None = None  # of the last update; a tensor until somebody reads it
    _norm_known: Any = None  # event behind that tensor; None: on a CPU

    @property
    def _global_grad_norm(self) -> float | None:
        """Norm of the last update; the first read of one on a device, on any stream, waits for it."""
        if isinstance(self._norm, torch.Tensor):
            if self._norm_known is not None:
                get_accelerator().current_stream().wait_event(self._norm_known)
            self._norm = scalars.current.value(self._norm)
        return self._norm

    @_global_grad_norm.setter
    def _global_grad_norm(self, norm: float | torch.Tensor | None) -> None:
        self._norm, self._norm_known = norm, None
        if isinstance(norm, torch.Tensor) and norm.device.type != "cpu":
            self._norm_known = get_accelerator().Event()
            self._norm_known.record()

    @property
    def state(self) -> OptimizerState:
        """Return the optimizer state by model parameter; see [Note: state by parameter] in `optimizer_state`."""
        return adopt(self)

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value
        adopt(self)

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """Return the model parameters in each group of the optimizer; another name of `bit16_groups`."""
        return self.bit16_groups

    @property
    def single_partition_of_fp32_groups(self) -> list[torch.Tensor]:
        """Return this rank's shard of the master weights of each trained parameter group, as 1-D tensors.

        Shards in memory are returned directly, shards on a disk as copies. Do not write to them, since the model's
        parameters would not change: `safe_set_full_fp32_param` changes master weights.
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
        """Return the parameter groups of the inner optimizer: the user's dicts, with leaves as `params`."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def defaults(self) -> dict[str, Any]:
        """Return the inner optimizer's default hyperparameters."""
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """Return the current loss scale (1 if losses are not scaled)."""
        return self.window.loss_scale

    cur_scale = loss_scale

    @property
    def clip_grad(self) -> float:
        """Return the maximum global gradient norm (`gradient_clipping`); 0: no clipping."""
        return self.settings.clip

    @property
    def dp_process_group(self) -> Any:
        """Return the process group over which gradients are averaged: all data- and sequence-parallel ranks."""
        group = self.reducer.axes.dp_sp_group.group
        return get_own_group() if group is None else group

    @property
    def real_dp_process_group(self) -> list[Any]:
        """Return a list with `dp_process_group` once per parameter group of the optimizer."""
        return [self.dp_process_group for _ in self.bit16_groups]

    @property
    def param_names(self) -> dict[Parameter, str]:
        """Return the names of the model parameters that the optimizer updates, by parameter."""
        managed: list[Any] = [param for group in self.bit16_groups for param in group if is_managed(param)]
        return {param: param._ds_member.name for param in managed}

    @property
    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale is dynamic."""
        return bool(getattr(self.scaler, "dynamic", False))

    @property
    def cpu_offload(self) -> bool:
        """Return whether the master weights of any group are in host memory or on disk instead of the device."""
        return any(group.updated.memory is None or group.updated.memory.device != group.device for group in self.groups)

    @property
    def partition_gradients(self) -> bool:
        """Return whether each rank stores only its shard of the gradients (stages 2 and 3)."""
        return any(group.policy.reduces_as_gradients_arrive for group in self.groups)

    @property
    def allgather_bucket_size(self) -> int:
        """Return the number of elements of the largest parameter group, which one all-gather transfers."""
        return max((group.full.numel() for group in self.groups), default=0)

    @property
    def bit16_groups_flat(self) -> list[torch.Tensor]:
        """Return the flat memory of each parameter group: 1-D, all its parameters, in the model's dtype.

        Raises:
            NotAvailableError: at stage 3, where each rank has only a shard.
        """
        if any(group.policy.gathers_before_use for group in self.groups):
            raise NotAvailableError("bit16_groups_flat: at stage 3 no rank has flat parameters; see GatheredParameters")
        return [group.full for group in self.groups]

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[torch.Tensor]]:
        """Return, for each parameter group, one view of `bit16_groups_flat` per rank: the shard of that rank.

        Raises:
            NotAvailableError: at stage 3, where each rank has only a shard.
        """
        bounds = [group.layout.cuts for group in self.groups]
        return [
            [flat[low:high] for low, high in zip(cuts, cuts[1:], strict=False)]
            for flat, cuts in zip(self.bit16_groups_flat, bounds, strict=True)
        ]

    def update_lp_params(self) -> None:
        """Round master weights to the model's dtype; at stages 1 and 2, all-gather them. All ranks must call this."""
        all_gather_updated(self.groups)
        for group in self.groups:
            group.advance()

    def check_overflow(self, partition_gradients: bool = True) -> bool:
        """Return whether any gradient since the last update is not finite, on any rank. All ranks must call this.

        Args:
            partition_gradients: accepted without effect.
        """
        finite = True
        for bucket in self.reducer.buckets:
            for member in bucket.group.members:
                gradient = self.reducer.grad_of(member)
                finite = finite and (gradient is None or bool(gradient.isfinite().all()))
        return not all(all_gather_objects(self.reducer.axes.model_replica_group, finite))

    def quantize_nontrainable_params(self) -> None:
        """Raise an error: quantization of frozen parameters is not available.

        Raises:
            NotAvailableError: always.
        """
        raise NotAvailableError("quantize_nontrainable_params is not available yet: it belongs to quantized gathers")

    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move training state from the device to host memory; calls `engine.offload_states`. All ranks must call this.

        Args:
            include: kinds of state (`OffloadStateTypeEnum` or its values); None: all kinds.
            device: target; only "cpu" is supported.
            pin_memory: use pinned (page-locked) memory.
            non_blocking: accepted without effect: the call always waits for the copies.

        Raises:
            ArgumentError: another device, or an unknown kind of state.
            UsageError: the state is already offloaded, there are gradients, or the optimizer belongs to no engine.
        """
        self._attached().offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state of `offload_states` back to the device; calls `engine.reload_states`.

        Args:
            non_blocking: return before the copies have finished; later device work waits for them.

        Raises:
            UsageError: the optimizer belongs to no engine.
        """
        self._attached().reload_states(non_blocking)

    def get_full_hp_param(self, param: Parameter, optim_state_key: str | None = None) -> torch.Tensor | None:
        """Return the master weights of a parameter, or a tensor of its optimizer state. All ranks must call this.

        Args:
            param: parameter of the engine's model.
            optim_state_key: name of a state tensor, such as "exp_avg"; None: master weights.

        Returns:
            float32 tensor of the unsharded shape; None if the parameter is not trained, or has no such state (yet).

        Raises:
            UsageError: the optimizer belongs to no engine.
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
    """Optimizer state of one rank, as returned by `ZeroOptimizer.state_dict`.

    The keys `fp32_flat_groups` and `single_partition_of_fp32_groups` return the current shards of the master weights.
    Iteration, copies and pickles leave these keys out, since the engine's checkpoint has the master weights.

    Attributes:
        of: weak reference to the optimizer.
    """

    of: Callable[[], OptimizerSurface | None] = staticmethod(lambda: None)

    def __missing__(self, key: str) -> list[torch.Tensor]:
        optimizer = self.of()
        if optimizer is not None and key in ("fp32_flat_groups", "single_partition_of_fp32_groups"):
            return optimizer.single_partition_of_fp32_groups
        raise KeyError(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
