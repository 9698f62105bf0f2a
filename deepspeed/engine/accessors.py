"""What an engine can be asked: places, sizes, rates, bytes. Nothing here changes anything."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.groups import get_local_rank
from deepspeed.comm.mesh import MODEL, Mesh
from deepspeed.engine.report import gather_counts, state_bytes
from deepspeed.engine.state import EngineState
from deepspeed.optim.precision import DTYPES


class MeshAccessors:
    """Where this rank stands among the others.

    Args:
        state: of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def mesh(self) -> Mesh:
        """The coordinates of all ranks."""
        return self._state.axes.mesh

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self._state.axes.mesh.world

    @property
    def dp_world_size(self) -> int:
        """Ranks that see different samples."""
        return self._state.axes.data.size

    @property
    def seq_dp_world_size(self) -> int:
        """Ranks that hold the same slice of the model."""
        return self._state.axes.same_slice.size

    @property
    def mp_world_size(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self._state.axes.mesh.size(*MODEL)

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return self._state.axes.mesh.size("sp")

    @property
    def global_rank(self) -> int:
        """This process among all ranks."""
        return self._state.axes.mesh.rank

    @property
    def local_rank(self) -> int:
        """This process among those of its machine."""
        return get_local_rank()

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the data-parallel ranks."""
        return self._state.axes.data.group

    def get_data_parallel_rank(self) -> int:
        """This rank's number on the data-parallel axis."""
        return self._state.axes.data.rank

    def get_model_parallel_rank(self) -> int:
        """This rank's number among those that hold one copy of the model together."""
        return self._state.axes.mesh.axis(*MODEL).rank

    def get_tensor_parallel_rank(self) -> int:
        """This rank's number among those that share its matrices."""
        return self._state.axes.mesh.axis("tp").rank

    def get_sequence_parallel_group(self) -> Any:
        """The process group of the ranks that share sequences with this one."""
        return self._state.axes.mesh.get_sequence_parallel_group()


class StateAccessors:
    """Answers about an engine.

    Args:
        state: of the engine.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state

    @property
    def config(self) -> Any:
        """The user's own configuration dict."""
        return self._state.ds_config.raw

    def train_batch_size(self) -> int:
        """Samples per update, over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self._state.window.steps * self._state.axes.data.size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per rank and micro-batch."""
        return self._state.window.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._state.window.steps

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch, micro-batch, accumulation steps)."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self._state.window.steps

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether a `no_sync` context is open."""
        return self._state.window.holding

    @property
    def param_names(self) -> dict[torch.nn.Parameter, str]:
        """The name of every parameter."""
        return {param: name for name, param in self._state.module.named_parameters()}

    def get_lr(self) -> list[float]:
        """Learning rate of each optimizer group."""
        return (
            [float(g["lr"]) for g in self._state.basic_optimizer.param_groups]
            if self._state.basic_optimizer is not None
            else []
        )

    def get_mom(self) -> list[Any]:
        """Momentum, or betas, of each optimizer group."""
        if self._state.basic_optimizer is None:
            return []
        return [g.get("betas", g.get("momentum")) for g in self._state.basic_optimizer.param_groups]

    def get_type(self) -> list[Any]:
        """The `type` entry of each optimizer group, where users set one."""
        return (
            [g.get("type") for g in self._state.basic_optimizer.param_groups]
            if self._state.basic_optimizer is not None
            else []
        )

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last update's mean gradient, before clipping; None before the first update."""
        return None if self._state.components.optimizer is None else self._state.components.optimizer._global_grad_norm

    def loss_scale(self) -> float:
        """The factor fp16 losses are multiplied by."""
        return self._state.window.loss_scale

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of parameters, dtype of gradient accumulators)."""
        return self._state.components.dtype, DTYPES[self._state.ds_config.data_types.grad_accum_dtype]

    @property
    def communication_data_type(self) -> torch.dtype:
        """The dtype in which gradients travel; fp32 unless `communication_data_type` says otherwise."""
        return DTYPES[self._state.ds_config.communication_data_type or "fp32"]

    def torch_autocast_dtype(self) -> torch.dtype:
        """The dtype of `torch_autocast`."""
        return DTYPES[self._state.ds_config.torch_autocast.dtype]

    def state_bytes(self) -> dict[str, int]:
        """Bytes of training state on this rank: parameters, masters, gradients, optimizer state, gathered buffers."""
        return state_bytes(self._state.components)

    def zero_report(self) -> dict[str, int]:
        """Stage 3 in numbers: elements gathered now, at the peak, and gathers so far."""
        return gather_counts(self._state.components)
