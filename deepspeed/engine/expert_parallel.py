"""Divides the experts of a model among ranks, as `expert_parallel` asks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.moe.expert_parallel import divide_experts, is_divided


def divide_experts_of(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any) -> None:
    """Divide the experts of a whole model, in place, unless that was done. All ranks call together."""
    ep = config.expert_parallel_size
    if ep == 1 or is_divided(model):
        return
    if isinstance(optimizer, torch.optim.Optimizer) and optimizer.state:
        raise ArgumentError("the optimizer has state of all experts: pass it to initialize before its first step")
    for name in ("compression_training", "quantize_training"):
        block = getattr(config.top, name)
        if block != type(block)():
            raise NotAvailableError(f"{name} together with expert parallelism is not available yet; leave one out")
    divide_experts(model, mesh, ep)
