"""Without a capacity, a sample's output does not depend on the samples beside it, bit for bit, on any rank.

The batch has one size, since other layers' matrix products may round otherwise for another one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.parallel.test_experts import settings, toy

CELLS = [("Mixtral", "grouped_mm"), ("Mixtral", "eager")]
MORE_CELLS = [
    ("Mixtral", "batched_mm"), ("GptOss", "grouped_mm"), ("DeepseekV3", "grouped_mm"), ("Qwen3Moe", "batched_mm"),
    ("Olmoe", "grouped_mm"), ("NemotronH", "eager"), ("Dbrx", ""), ("Llama4", ""), ("JetMoe", ""),
]  # fmt: skip


def beside(family: str, implementation: str, ep: int) -> list[bool]:
    """Whether a sample's output is the same beside each of several others, on this rank and on the other ones."""
    model = toy(family)
    if implementation:
        model.set_experts_implementation(implementation)
    engine, *_ = deepspeed.initialize(model=model, config=settings(0, ep, optimizer={"type": "AdamW"}))
    engine.eval()
    same, first = [], None
    for step, (own, length) in enumerate([(1, 12), (2, 12), (1, 5), (1, 40), (2, 23), (0, 12)]):
        generator = torch.Generator().manual_seed(dist.get_rank())
        sample = torch.randint(3, 64, (1, 12), generator=generator)
        generator.manual_seed(1000 * dist.get_rank() + 10 * own)
        others = torch.randint(3, 64, (2, 12), generator=generator) if own else sample.expand(2, -1)
        with torch.no_grad():
            if dist.get_rank() != step % dist.get_world_size():  # a rank whose batch has another size each time
                generator.manual_seed(step)
                engine(input_ids=torch.randint(3, 64, (1 + own, length), generator=generator))
                continue
            output = engine(input_ids=torch.cat([sample, others])).logits[0]
        first = output if first is None else first
        same.append(torch.equal(output, first))
    engine.destroy()
    return same


@pytest.mark.parametrize(
    ("family", "implementation"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE_CELLS)]
)
def test_a_sample_beside_others(workers: Any, family: str, implementation: str) -> None:
    for same in workers(2).run(beside, family, implementation, 2, timeout=120):
        assert len(same) == 3 and all(same)
