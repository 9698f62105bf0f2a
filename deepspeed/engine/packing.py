"""`weight_quantization`: matrices of a model that only answers become packed integers before anything shards them."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.comm.mesh import Mesh
from deepspeed.config import DeepSpeedConfig
from deepspeed.errors import ArgumentError, NotAvailableError
from deepspeed.inference.quantization.quantization import apply_section


def pack_weights(model: nn.Module, config: DeepSpeedConfig, mesh: Mesh, optimizer: Any, parameters: Any) -> None:
    """Pack what the configuration names.

    Args:
        model: changed in place.
        config: resolved.
        mesh: of the engine.
        optimizer: the client's, or None.
        parameters: what is to be trained, or nothing.

    Raises:
        ArgumentError: something is to be trained.
        NotAvailableError: the model is cut over ranks too.
    """
    section = config.top.weight_quantization
    asked = {"post_init_quant": section.post_init_quant, "quantized_initialization": section.quantized_initialization}
    if not any(asked.values()):
        return
    if optimizer is not None or parameters or config.top.optimizer is not None:
        raise ArgumentError(
            "weight_quantization is for a model that answers: packed weights are not trained; leave optimizer and "
            "model_parameters out"
        )
    if mesh.size("tp") > 1 or mesh.size("pp") > 1:
        raise NotAvailableError("weight_quantization together with tensor or pipeline parallelism is not available yet")
    apply_section(model, asked)
