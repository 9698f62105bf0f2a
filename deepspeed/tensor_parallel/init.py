"""Public functions that split a model before `initialize`, or a single layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.process_groups import init as comm_init
from deepspeed.comm.process_groups.axis import Axis, group_axis, world_axis
from deepspeed.comm.process_groups.mesh import mesh_for, ranks_started, resolve
from deepspeed.comm.process_groups.process_group import is_initialized
from deepspeed.errors import ArgumentError, MeshError
from deepspeed.foundation.log import warn_once
from deepspeed.tensor_parallel.layers import (
    SliceLocation,
    become_column,
    become_row,
    even_segments,
    is_linear,
    is_transposed,
)
from deepspeed.tensor_parallel.parallelize import cut_over, is_cut


def tp_model_init(
    model: nn.Module,
    tp_size: int,
    dtype: torch.dtype | None = None,
    config: Any = None,
    tp_group: Any = None,
    *,
    example: Any = None,
    verify: str = "units",
) -> nn.Module:
    """Split a dense model over ranks before `initialize`. All ranks must call this.

    Args:
        model: the same on all ranks; changed in place.
        tp_size: number of consecutive ranks over which matrices are split.
        dtype: no effect; the engine's configuration sets the precision.
        config: no effect; the configuration of `initialize` is used.
        tp_group: process group of these ranks, which is compared with the mesh; None: not compared.
        example: arguments of forward: a dict, a tensor or a tuple; None: generated for a model of Transformers.
        verify: "units" compares each split module with its dense form, "model" also compares the model's output,
            "off" compares nothing.

    Returns:
        The model.

    Raises:
        ArgumentError: the model is already split.
        MeshError: `tp_size` does not fit, `tp_group` has other ranks, or the ranks have different models.
        TensorParallelError: the model cannot be split, or a split module computes other results.
    """
    if not is_initialized():
        comm_init.init_distributed()
    if is_cut(model):
        raise ArgumentError("tp_model_init: the model is split already")
    device = torch.device(get_accelerator().current_device_name())
    mesh = mesh_for(resolve(ranks_started(), [("tp", tp_size, "tp_model_init")]), None, device)
    axis = mesh.axis("tp")
    if tp_group is not None and group_axis("tp", tp_group, device) is not axis:
        raise MeshError(f"tp_model_init: tp_group is not the {tp_size} neighbouring ranks {list(axis.ranks)}")
    if axis.size > 1:
        cut_over(mesh, model, example=example, check=verify)
    return model


def set_autotp_mode(training: bool = False) -> None:
    """Do nothing: a split model trains and generates with the same layers. Warns once if `training` is False."""
    if not training:
        warn_once("set_autotp_mode has no effect: split layers train and generate in the same way")


def LinearLayer(module: nn.Module, mp_group: Any = None, name: str = "linear") -> nn.Module:
    """Turn a linear layer into a column-parallel one, in place. All ranks of the group must call this.

    Args:
        module: the dense layer: `nn.Linear`, or `Conv1D` of Transformers.
        mp_group: process group of the ranks; None: all ranks.
        name: name of the layer in error messages.

    Returns:
        The same module, which computes this rank's outputs.

    Raises:
        ArgumentError: the module is not a linear layer, or has fewer outputs than ranks.
    """
    axis, layer = _axis_for(module, mp_group)
    size = layer.weight.shape[1 if is_transposed(module) else 0]
    become_column(module, SliceLocation(axis, name), even_segments(size, axis, name))
    return module


def LinearAllreduce(module: nn.Module, mp_group: Any = None, name: str = "linear") -> nn.Module:
    """Turn a linear layer into a row-parallel one, in place; its outputs are all-reduced.

    Arguments and errors are those of `LinearLayer`. Returns the same module, which reads this rank's inputs.
    """
    axis, layer = _axis_for(module, mp_group)
    size = layer.weight.shape[0 if is_transposed(module) else 1]
    become_row(module, SliceLocation(axis, name), even_segments(size, axis, name))
    return module


def _axis_for(module: nn.Module, group: Any) -> tuple[Axis, Any]:
    """Return the axis of a group (None: all ranks), and the layer; raise ArgumentError if the layer is not linear."""
    axis = world_axis() if group is None else group_axis("tp", group)
    if not is_linear(module):
        raise ArgumentError(f"a {type(module).__name__} is not a linear layer that can be split")
    return axis, module
