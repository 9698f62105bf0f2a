"""Without a capacity, a sample's output does not depend on the samples beside it, bit for bit, on any rank.

The batch has one size, since other layers' matrix products may round otherwise for another one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import deepspeed
from tests import zoo
from tests.parallel.test_experts import settings

CELLS = [("Mixtral", "grouped_mm"), ("Mixtral", "eager")]
MORE_CELLS = [
    ("Mixtral", "batched_mm"), ("GptOss", "grouped_mm"), ("DeepseekV3", "grouped_mm"), ("Qwen3Moe", "batched_mm"),
    ("Olmoe", "grouped_mm"), ("NemotronH", "eager"), ("Dbrx", ""), ("Llama4", ""), ("JetMoe", ""),
]  # fmt: skip


MANY: dict[str, Any] = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 16)


def with_many_experts(family: str) -> Any:
    """A toy whose experts get few tokens each, in a number that depends on the neighbours."""
    torch.manual_seed(0)
    name = f"{family}ForCausalLM"
    return getattr(transformers, name)(next(zoo.configs(name, more=MANY))())


def beside(family: str, implementation: str, ep: int) -> list[bool]:
    """Whether a sample's output is the same beside each of several others, on this rank and on the other ones."""
    model = with_many_experts(family)
    if implementation:
        model.set_experts_implementation(implementation)
    engine, *_ = deepspeed.initialize(model=model, config=settings(0, ep, optimizer={"type": "AdamW"}))
    engine.eval()
    same, first = [], None
    for step, (own, length) in enumerate([(1, 4), (2, 4), (3, 1), (4, 9), (5, 2), (0, 4)]):
        generator = torch.Generator().manual_seed(dist.get_rank())
        sample = torch.randint(3, 64, (1, 4), generator=generator)
        generator.manual_seed(1000 * dist.get_rank() + 10 * own)
        others = torch.randint(3, 64, (2, 4), generator=generator) if own else sample.expand(2, -1)
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
