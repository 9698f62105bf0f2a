"""The launches of the device executor are those that the simulator's tables take."""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import transformers

from benchmarks import decode_pass
from benchmarks.simulated_models import Shape
from deepspeed.inference import Generator
from deepspeed.simulator.trace import KERNEL, Recording
from tests.unit.inference.reference_kernels import ReferenceKernels, only_way

TOY = Shape(layers=2, width=64, heads=4, inner=96, vocabulary=256, kv_heads=2, gated=True, tied=False)


def launches(recording: Recording) -> Counter[tuple[object, ...]]:
    """Kernels with what they cost; looking up cosines and sines takes one launch or two."""
    kernels = (e for e in recording.entries if e.kind == KERNEL and e.name not in ("embedding", "index_select"))
    return Counter((e.name, e.nbytes, e.flops, e.work) for e in kernels)


@pytest.mark.parametrize(("batch", "context"), [(1, 600), (2, 600), (3, 40)])
def test_an_executor_launches_what_is_simulated(batch: int, context: int) -> None:
    config = transformers.LlamaConfig(
        vocab_size=TOY.vocabulary, hidden_size=TOY.width, intermediate_size=TOY.inner, num_hidden_layers=TOY.layers,
        num_attention_heads=TOY.heads, num_key_value_heads=TOY.kv_heads, max_position_embeddings=1024,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with only_way(ReferenceKernels()):
        generator = Generator(
            transformers.LlamaForCausalLM(config).bfloat16(), page_size=decode_pass.PAGE, cache_bytes=1 << 22
        )
    found = launches(decode_pass.record_executor(generator._executor, batch, context))
    with mock.patch.dict(decode_pass.SHAPES, {"toy": TOY}):
        wanted = launches(decode_pass.record(decode_pass.Pass("toy", batch, context)))
    assert found == wanted
