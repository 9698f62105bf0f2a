"""Creation of an engine from a model and a JSON (`deepspeed.initialize`)."""

from __future__ import annotations

import argparse
from typing import Any

from deepspeed.comm.process_groups import init as comm_init
from deepspeed.config import DeepSpeedConfig
from deepspeed.engine.engine import DeepSpeedEngine, DeepSpeedHybridEngine
from deepspeed.engine.logging import say_info
from deepspeed.engine.pipeline_engine import PipelineEngine
from deepspeed.engine.pipeline_setup import is_pipelined
from deepspeed.errors import ArgumentError, DeepSpeedConfigError
from deepspeed.foundation.tested_versions import say_untested
from deepspeed.zero.api.init_context import suspended


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """Create an engine for a model, and a process group if there is none. All ranks must call this.

    Args:
        args: a namespace with `deepspeed_config`, the path of the JSON, in place of `config`.
        model: a torch module, or a `PipelineModule`; required.
        optimizer: a torch optimizer, or a function of parameters; None: the JSON's, else AdamW for `model_parameters`.
        model_parameters: parameters or parameter groups to train; None: all that require a gradient.
        training_data: a dataset for the distributed loader; None: no loader.
        lr_scheduler: a scheduler, or a callable that creates one from the optimizer; None: the JSON's, if any.
        distributed_port: port for a new process group if MASTER_PORT is not set.
        mpu: the client's model-parallel unit, or a `deepspeed.comm.process_groups.mesh.Mesh`.
        dist_init_required: False: use the existing process group.
        collate_fn: collate function of the loader, as in torch's DataLoader.
        config: dict, path or base64 of the JSON.
        mesh_param: sizes of mesh dims by name, or (data-parallel ranks, sequence-parallel ranks).
        config_params: older name of `config`.

    Returns:
        (engine, optimizer, loader, scheduler), None for a missing one; at stage 3 without optimizer `ModuleHooks`.

    Raises:
        ArgumentError: an argument is missing or invalid, or arguments contradict each other.
        DeepSpeedConfigError: the configuration is missing, given twice or invalid; a MeshError for sizes of the mesh.
    """
    if model is None:
        raise ArgumentError("deepspeed.initialize requires a model")
    source = _config_of(args, config, config_params)
    if dist_init_required is not False:
        comm_init.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    say_info()
    say_untested()
    kind = PipelineEngine if is_pipelined(model, source, mpu, mesh_param) else _kind_of(source)
    with suspended():
        engine = kind(
            model,
            source,
            optimizer=optimizer,
            model_parameters=model_parameters,
            lr_scheduler=lr_scheduler,
            training_data=training_data,
            collate_fn=collate_fn,
            mpu=mpu,
            mesh_param=mesh_param,
        )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _kind_of(source: Any) -> type[DeepSpeedEngine]:
    """Return the class of an engine without pipeline stages."""
    return DeepSpeedHybridEngine if DeepSpeedConfig.for_init(source).top.hybrid_engine.enabled else DeepSpeedEngine


def _config_of(args: Any, config: Any, config_params: Any) -> Any:
    if config is not None and config_params is not None and config is not config_params:
        raise DeepSpeedConfigError("both config and config_params were given; pass one of them")
    config_source = config if config is not None else config_params
    path = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    if config_source is not None and path is not None:
        raise DeepSpeedConfigError(f"both config and args.deepspeed_config ({path}) were given; pass one of them")
    if config_source is None and path is None:
        raise DeepSpeedConfigError("no configuration: pass config=… (dict or path) or --deepspeed_config FILE")
    return config_source if config_source is not None else path


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--deepspeed`, `--deepspeed_config` and their older names to `parser`; returns `parser`."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", default=False, action="store_true", help="use DeepSpeed")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of the JSON configuration")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
