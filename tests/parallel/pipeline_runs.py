"""Models trained as pipelines of stages, beside the dense model on one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.comm.mesh import Mesh, current_mesh
from deepspeed.utils import safe_get_full_fp32_param
from tests.parallel.dense import Dense, momentum
from tests.parallel.tensor_runs import batch_of, loss_of, model_of

LAYERS = ("num_hidden_layers", "n_layer", "num_layers")


def deep(family: str, layers: int, **changes: Any) -> Any:
    """A toy of so many blocks, without dropout."""
    if family == "GPTNeo":
        changes.setdefault("attention_types", [[["global", "local"], layers // 2]])
        changes.setdefault("attention_layers", ["global", "local"] * (layers // 2))
    return model_of(family, **{name: layers for name in LAYERS if family not in ("GPTNeo",) or name == "num_layers"}, **changes)


def config_of(stage: int, pp: int, accumulation: int = 4, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "pipeline": {"stages": pp, **more.pop("pipeline", {})},
        **more,
    }


def replica(mesh: Mesh) -> int:
    at = mesh.coordinates
    return at["dp_replicate"] * mesh.size("dp_shard") + at["dp_shard"]


def batches(model: Any, first: int, count: int, rank: int, lengths: bool = False) -> Iterator[Any]:
    return iter(batch_of(model, first + at, rank, 9 + (at % 3 if lengths else 0)) for at in range(count))


def apart(engine: Any, dense: Dense) -> float:
    """The largest difference of this stage's parameters over the largest norm."""
    whole = dense.parameters()
    largest, worst = max(float(t.norm()) for t in whole.values()), 0.0
    for name, param in engine.module.named_parameters():
        ours = safe_get_full_fp32_param(param)
        if ours is not None:
            worst = max(worst, float((ours - whole[name]).norm()))
    return worst / largest


def trained(
    family: str, layers: int, pp: int, dp: int, stage: int, accumulation: int, settings: Any = None, windows: int = 2,
    clip: float = 0.0,
) -> list[tuple[float, float, float]]:  # fmt: skip
    """Relative distances of loss, norm and parameters, by window."""
    import deepspeed

    model = deep(family, layers)
    dense = Dense(model, momentum, dp, accumulation, clip)
    config = config_of(stage, pp, accumulation, clip, **(settings or {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    found = []
    with engine:
        for window in range(windows):
            theirs = dense.window(window * accumulation, loss_of)
            dense.step()
            rank = replica(current_mesh())
            ours = engine.train_batch(batches(engine.module, window * accumulation, accumulation, rank))
            wanted = sum(theirs) / len(theirs)
            norm = abs(float(engine.get_global_grad_norm()) - dense.norm) / dense.norm
            found.append((abs(float(ours) - wanted) / wanted, norm, apart(engine, dense)))
    return found
