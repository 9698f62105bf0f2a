"""The riskiest thing on one page: a Llama block cut in two by hand, ZeRO over two copies of it, equal to dense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.process_groups.mesh import Mesh, mesh_for
from deepspeed.tensor_parallel.layers import SliceLocation, become_column, become_row, even_segments
from tests.parallel.dense import Dense, compared, momentum


class Block(nn.Module):
    """A block of Transformers' Llama between an embedding and a head."""

    def __init__(self) -> None:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
        config._attn_implementation = "sdpa"
        self.embed, self.head = nn.Embedding(17, 32), nn.Linear(32, 17)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        places = torch.arange(ids.shape[1])[None]
        for layer in self.layers:
            hidden = layer(hidden, position_ids=places, position_embeddings=self.rotary(hidden, places))
        return nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    return model(torch.randint(0, 17, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank)))


def cut_by_hand(model: nn.Module, mesh: Mesh) -> None:
    axis = mesh.axis("tp")
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            become_column(module, SliceLocation(axis, name), even_segments(module.out_features, axis, name))  # type: ignore[arg-type]
        if name.endswith(("o_proj", "down_proj")):
            become_row(module, SliceLocation(axis, name), even_segments(module.in_features, axis, name))  # type: ignore[arg-type]


def trained(sizes: dict[str, int], stage: int, accumulation: int, clip: float) -> list[tuple[float, ...]]:
    import deepspeed

    mesh, model = mesh_for(sizes), Block()
    dense = Dense(model, momentum, mesh.size("dp_replicate", "dp_shard"), accumulation, clip)
    cut_by_hand(model, mesh)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=momentum(model.parameters()), config=config, mpu=mesh)
    with engine:
        return list(compared(engine, dense, mesh, loss_of, windows=10))


CELLS = [
    pytest.param({"dp_shard": 2, "tp": 2}, 3, 2, 0.0, id="zero3-dp2-tp2"),
    pytest.param({"tp": 2}, 0, 1, 0.5, id="zero0-tp2-clipped"),
    pytest.param({"dp_shard": 2, "tp": 2}, 1, 1, 0.5, id="zero1-dp2-tp2", marks=pytest.mark.slow),
    pytest.param({"dp_shard": 2, "tp": 2}, 2, 2, 0.5, id="zero2-dp2-tp2", marks=pytest.mark.slow),
    pytest.param({"dp_replicate": 2, "tp": 2}, 3, 1, 0.5, id="hybrid-tp2", marks=pytest.mark.slow),
]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(("sizes", "stage", "accumulation", "clip"), CELLS)
def test_a_block_in_two_equals_the_dense_one(
    workers: Any, sizes: dict[str, int], stage: int, accumulation: int, clip: float
) -> None:
    ranks = torch.tensor(list(sizes.values())).prod().item()
    for windows in workers(ranks).run(trained, sizes, stage, accumulation, clip, timeout=120):
        worst = [max(column) for column in zip(*windows, strict=True)]
        assert worst[0] <= 2e-6 and max(worst[1:]) <= 5e-6, worst
