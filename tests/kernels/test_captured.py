"""Captured passes with interpreted kernels, on the emulated device: the tokens of eager passes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.kernels.needs import need_triton

need_triton()

from tests.emulated.needs import need_compiler  # noqa: E402
from tests.emulated.runs import Seen, observed  # noqa: E402

need_compiler()


def both_ways(seed: int, drafts: int) -> Seen:
    """Tokens of a schedule with and without graphs, the load at the end, and what the detector saw."""
    from deepspeed.inference import Generator
    from deepspeed.inference.executors import attention_ways
    from tests.emulated.captured_runs import DeviceKernels, schedule
    from tests.kernels.interpreter import AllInterpreted
    from tests.unit.inference.toys import llama

    ways: Any = [attention_ways.KernelWay(DeviceKernels(AllInterpreted()))]
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    sizes: dict[str, Any] = {"page_size": 16, "max_sequences": 3, "max_batch_tokens": 16, "prompt_chunk": 8}
    with observed() as seen, mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")):
        said, stats = [], []
        for graphs in (False, True):
            model = llama(num_hidden_layers=1, num_key_value_heads=1, **small, max_position_embeddings=64).to("cuda")
            generator = Generator(
                model, cuda_graphs=graphs, cache_bytes=4 * 2 * 16 * 16 * 4, speculation=drafts, **sizes
            )
            assert type(generator._executor).__name__ == "PackedDecoder"
            said.append(schedule(generator, seed, requests=6, longest=30, vocabulary=8))
            stats.append(generator.load())
            generator.close()
        seen.extra = said, stats
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "drafts"), [(0, 0), (4, 0), (2, 2)])
def test_replayed_tokens_are_the_eager_ones(emulated: Any, seed: int, drafts: int) -> None:
    seen = emulated(1).run(both_ways, seed, drafts, timeout=600.0)[0]
    (eager, replayed), (_, stats) = seen.extra
    assert replayed == eager and len(eager) >= 5
    assert seen.reports == []
    assert 0 < stats.graphs <= 12 and stats.replays > 10 and stats.preemptions > 0, stats
    assert stats.drafts > 0 or not drafts
