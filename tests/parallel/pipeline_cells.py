"""What stages go together with, a cell each: tiers, adapters, recomputed blocks, parts that are not trained, 3D."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.errors import MeshError, NotAvailableError
from deepspeed.pipe import PipelineModule
from tests.parallel import pipeline_layers as layers
from tests.parallel.dense import Dense, momentum
from tests.parallel.pipeline_runs import beside_dense, config_of, deep, engine_of
from tests.parallel.tiny import raises

STEPS = 4


def compared(
    model: Any, stage: int, settings: Any = None, replicas: int = 1, windows: int = 2, runs: list[int] | None = None
) -> list[float]:
    """The largest relative distance of loss, norm and parameters in each window; notes runs of blocks in `runs`."""
    config = config_of(stage, 2, STEPS, **copy.deepcopy(settings or {}))
    dense = Dense(model, momentum, replicas, STEPS)
    with engine_of(model, config) as engine:
        for block in [module for name, module in engine.module.named_modules() if name.endswith(".mlp")]:
            block.register_forward_pre_hook(lambda *_: runs.append(1) if runs is not None else None)
        found = [max(row) for row in beside_dense(engine, dense, windows)]
        frozen = {name: param for name, param in dense.model.named_parameters() if not param.requires_grad}
        for name, param in engine.module.named_parameters():
            assert param.requires_grad == (name not in frozen), name
    return found


def tiered(stage: int, tier: dict[str, Any]) -> list[float]:
    return compared(deep("GPTNeo", 4), stage, {"zero": tier})


def adapted(stage: int, only: list[int] | None) -> list[float]:
    """LoRA on all blocks, or on some: then a stage has nothing to train."""
    from peft import LoraConfig, get_peft_model

    model = deep("Llama", 4)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, layers_to_transform=only, lora_dropout=0.0
    )
    torch.manual_seed(1)
    return compared(get_peft_model(model, config), stage)


def frozen(stage: int, prefix: str) -> list[float]:
    """A part of the model is not trained."""
    model = deep("GPTNeo", 4)
    for name, param in model.named_parameters():
        param.requires_grad = not name.startswith(prefix)
    return compared(model, stage)


def recomputed(how: str, stage: int) -> tuple[list[float], int]:
    """Blocks are computed again in backward; how often one of this stage's ran in a window."""
    model, runs = deep("Llama", 4), list[int]()
    settings = {"activation_checkpointing": {"enabled": True}} if how == "json" else None
    if how == "model":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = compared(model.train(), stage, settings, windows=1, runs=runs)
    return found, len(runs)


def rebuilt(interval: int) -> tuple[list[Any], list[int]]:
    """Layers in a row, computed again by so many; and how often each own one ran in a window."""
    counts: dict[str, int] = {}
    found = []
    with layers.start(1, 2, STEPS, activation_checkpoint_interval=interval) as engine:
        torch.manual_seed(0)
        dense = Dense(layers.Whole(), momentum, 1, STEPS)
        for name, module in engine.module.named_modules():
            if isinstance(module, layers.Mixed):
                module.register_forward_pre_hook(lambda *_, name=name: counts.update({name: counts.get(name, 0) + 1}))
        theirs = dense.window(0, lambda model, step, at: model(layers.batch_of(step, at)))
        dense.step()
        loss = float(engine.train_batch(layers.feed(0, STEPS, 0)))
        found = [abs(loss - sum(theirs) / STEPS), layers.apart(engine, dense)]
    return found, sorted(counts.values())


def alone() -> list[tuple[float, float]]:
    """A stage of the embedding alone."""
    return layers.described(1, 2, STEPS, 1, partition_method=[0, 1, 6])


def solid(stage: int, json: dict[str, Any], mesh: dict[str, int], replicas: int) -> list[float]:
    """Three kinds of parallelism by JSON alone."""
    model = deep("GPTNeo", 4)
    found = compared(model, stage, json, replicas, windows=2)
    sizes = {dim: size for dim, size in current_mesh().sizes.items() if size > 1}
    assert sizes == mesh, sizes
    return found


def refused() -> None:
    """What cannot be had says what is nearest; on 4 ranks."""

    def start(model: Any = None, stage: int = 1, **json: Any) -> None:
        more = {"pipeline": {}, **json}
        config = config_of(stage, 2, 2, **more)
        deepspeed.initialize(model=model or deep("GPTNeo", 4), config=config)

    with raises(MeshError, "pp 3", "pipeline.stages", "nearest sizes", "2 and 4"):
        start(pipeline={"stages": 3})
    with raises(MeshError, "pp 4 x tp 2", "nearest sizes", "for pp"):
        start(pipeline={"stages": 4}, tensor_parallel={"autotp_size": 2})
    with raises(MeshError, "dp_shard 3", "nearest sizes", "1 and 2"):
        start(stage=3, mesh={"dp_shard": 3})
    with raises(NotAvailableError, "sp", "pp 2 x dp 2", "dp 2 x sp 2"):
        start(sequence_parallel_size=2)
    row = PipelineModule([nn.Linear(4, 4) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    with raises(NotAvailableError, "PipelineModule", "tp", "pp 2 x dp 2"):
        start(row, tensor_parallel={"autotp_size": 2})
    quantized = {
        "shared_parameters": {"enabled": True, "schedule_offset": 0, "quantize_groups": 1},
        "different_groups": {"all": {"params": {"start_bits": 8, "target_bits": 8}, "modules": ["*"]}},
    }
    with raises(NotAvailableError, "compression_training", "stages"):
        start(compression_training={"weight_quantization": quantized})
