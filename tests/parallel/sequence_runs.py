"""Models of Transformers over sequences that ranks share, by one number in the JSON, beside the dense model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from deepspeed.comm.process_groups.mesh import current_mesh
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from tests.parallel.dense import Dense, adamw, compared, momentum
from tests.parallel.tensor_runs import model_of

LENGTH = 12
OPTIMIZERS = {"momentum": momentum, "adamw": adamw}


def batch_of(step: int, rank: int, length: int = LENGTH, kind: str = "plain") -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(3, 64, (2, length), generator=draw)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, : length // 3] = 0
        batch["attention_mask"][1, length // 2 + 1 :] = 0
        batch["labels"] = ids.masked_fill(batch["attention_mask"] == 0, -100)
    if kind == "packed":
        cut = length // 2 - 2
        places = torch.arange(length)
        batch["position_ids"] = torch.where(places < cut, places, places - cut).repeat(2, 1)
        batch["labels"][:, cut] = -100
    if kind == "prompt":  # all labels in the last tokens: other ranks have none
        batch["labels"][:, : length - 2] = -100
    return batch


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(**batch_of(step, rank), use_cache=False).loss


def config_of(
    sizes: dict[str, int], stage: int, accumulation: int = 1, clip: float = 0.0, **more: Any
) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        "mesh": sizes,
        **more,
    }


def start(model: Any, config: dict[str, Any], optimizer: Any = momentum, **more: Any) -> Any:
    import deepspeed

    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(trained), config=config, **more)
    return engine


def close(windows: list[tuple[float, ...]]) -> None:
    worst = [max(column) for column in zip(*windows, strict=True)]
    assert worst[0] <= 2e-6 and max(worst[1:]) <= 5e-6, worst


def trained(
    family: str,
    sizes: dict[str, int],
    stage: int,
    accumulation: int,
    clip: float,
    windows: int,
    optimizer: str = "momentum",
    **changes: Any,
) -> list[tuple[float, ...]]:
    model = model_of(family, **changes)
    data = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    dense = Dense(model, OPTIMIZERS[optimizer], data, accumulation, clip)
    config = config_of(sizes, stage, accumulation, clip)
    with start(model, config, OPTIMIZERS[optimizer]) as engine:
        return list(compared(engine, dense, current_mesh(), loss_of, windows))


def tile(model: Any, tiles: int = 3) -> None:
    """Feed-forward blocks tile by tile."""
    for layer in model.model.layers:
        whole = layer.mlp.forward
        layer.mlp.forward = lambda x, mlp=layer.mlp, whole=whole: TiledMLP.apply(lambda _, t: whole(t), mlp, x, tiles)


class Tiled(nn.Module):
    """The sum of the tokens' losses; the logits come tile by tile."""

    def __init__(self, lm: Any, tiles: int, watch: AbstractContextManager[Any] | None = None) -> None:
        super().__init__()
        self.lm, self.tiles, self.watch = lm, tiles, watch or nullcontext()

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.lm.model(input_ids=ids, position_ids=position_ids, use_cache=False).last_hidden_state

        def loss_of(head: Any, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")

        with self.watch:
            return TiledFusedLogitsLoss.apply(loss_of, self.lm.lm_head, hidden, labels, None, self.tiles, None, "sum")
