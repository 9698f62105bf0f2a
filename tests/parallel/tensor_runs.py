"""Models of Transformers cut by one number in the JSON, beside the dense model on one process."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.process_groups.mesh import current_mesh
from tests.parallel.dense import Dense, compared, momentum
from tests.unit.compression.architectures import architecture


def model_of(family: str, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    made, config = architecture(family)
    for name, value in changes.items():
        setattr(config, name, value)
    for name in vars(config):
        if "dropout" in name or name.endswith(("pdrop", "drop_rate")):
            if isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
    return made(config)


def batch_of(model: Any, step: int, rank: int, length: int = 9) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(3, 64, (2, length), generator=draw)
    return {"input_ids": ids, "labels": ids.clone()}


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(**batch_of(model, step, rank)).loss


def config_of(stage: int, tp: int, accumulation: int = 1, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "tensor_parallel": {"autotp_size": tp, **more.pop("tensor_parallel", {})},
        **more,
    }


def trained(
    family: str, dp: int, tp: int, stage: int, accumulation: int, clip: float, windows: int, settings: Any = None
) -> list[tuple[float, ...]]:
    import deepspeed

    model = model_of(family)
    dense = Dense(model, momentum, dp, accumulation, clip)
    config = config_of(stage, tp, accumulation, clip, **(settings or {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config)
    with engine:
        assert engine.module is model
        return list(compared(engine, dense, current_mesh(), loss_of, windows))
