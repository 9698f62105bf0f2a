"""What one pass of generation costs on a device, in launches, waits of the host and copies, by the emulated device.

`pytest -s -m slow tests/emulated/test_decode_launches.py` prints the table. An operator stands in for each kernel: the
count is right, the tokens are not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import emulates, observed

need_compiler()

LAYERS, SEQUENCES = 4, 4
WRITTEN = ("out", "partial", "tokens", "numbers", "scores")  # the first that a kernel has among its arguments


class CountedKernels:
    """Kernels that write zeros, one operator a launch."""

    def __init__(self) -> None:
        self.launches = 0

    def has(self, variant: Any) -> bool:
        return True

    def prepare(self, variants: Any) -> None:
        pass

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        self.launches += 1
        names = list(variant.signature)
        written = next(name for name in WRITTEN if name in names)
        arguments[names.index(written)].zero_()


def cost(way: str, ranks: int = 1) -> dict[str, Any]:
    """Counters of one pass with a new token of each sequence, and the lines at which the host waited.

    `ranks`: ranks over which the model is split.
    """
    import deepspeed
    from deepspeed.inference import Generator, Request, SamplingParams
    from deepspeed.inference.executors import attention_ways, select
    from deepspeed.inference.quantization.float8 import float8_linears
    from tests.unit.inference.toys import llama, prompts

    def probe(executor: Any, *arguments: Any, **named: Any) -> str | None:
        return None if getattr(executor, "ways", None) else plain(executor, *arguments, **named)

    def modules(executor: Any, *_: Any) -> Any:
        return executor

    kernels, native, plain = CountedKernels(), emulates(), select._probe
    ways: Any = [] if way == "gathered" else [attention_ways.KernelWay(kernels)]
    without = (
        contextlib.nullcontext()
        if way in ("packed", "captured", "fp8")
        else mock.patch.object(select, "_without_modules", modules)
    )
    with (
        mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")),
        mock.patch.object(select, "_probe", probe),
        without,
    ):
        model = llama(num_hidden_layers=LAYERS, max_position_embeddings=1024).to("cuda")
        if way == "fp8":
            float8_linears(model)
        if ranks > 1:
            deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": ranks})
        generator = Generator(
            model, page_size=16, cache_bytes=1 << 22, max_batch_tokens=2048, cuda_graphs=way == "captured"
        )
    for number, prompt in enumerate(prompts((30, 33, 90, 600)[:SEQUENCES])):
        generator.submit(Request(number, prompt, SamplingParams(max_new_tokens=8, ignore_eos=True)))
    for _ in range(3):
        generator.step()
    before = kernels.launches
    with observed() as seen:
        native.clear()
        generator.step()
    generator.close()
    return {
        "counters": seen.counters,
        "waits": seen.waits,
        "kernels": kernels.launches - before,
        "reports": seen.reports,
    }


@pytest.mark.slow
def test_launches_of_a_pass(emulated: Any) -> None:
    ways = ("gathered", "kernels", "packed", "captured", "fp8")
    costs = {way: emulated(1).run(cost, way, timeout=LIMIT)[0] for way in ways}
    for way, seen in costs.items():
        print(f"\n{way}: {seen['counters']}, {seen['kernels']} of them kernels")
        for line in seen["waits"]:
            print("   ", line)
        assert seen["reports"] == []
    gathered, kernels, packed, captured, float8 = costs.values()
    assert kernels["kernels"] == 2 * LAYERS  # one context has two splits
    assert [what for what, _ in kernels["waits"]] == ["copy to host"]
    assert len(gathered["waits"]) == 1 + 2  # a mask of each group of sequences
    assert kernels["counters"]["launch"] <= 0.6 * gathered["counters"]["launch"]
    assert packed["counters"]["launch"] <= gathered["counters"]["launch"] / 6
    assert [what for what, _ in packed["waits"]] == ["event"]
    assert packed["kernels"] == 6 * LAYERS + 1 + 2  # the last norm; scores and tokens
    assert float8["counters"]["launch"] == packed["counters"]["launch"]
    assert float8["kernels"] == packed["kernels"] + 4 * LAYERS  # products
    for split in emulated(2).run(cost, "captured", 2, timeout=LIMIT):  # sums over ranks; not captured
        assert split["reports"] == [] and [what for what, _ in split["waits"]] == ["event"]
        assert split["counters"]["launch"] == packed["counters"]["launch"] + 2 * LAYERS
        assert split["counters"]["launch.nccl"] == 2 * LAYERS
    assert captured["counters"]["launch"] == 5 and captured["counters"]["graph.replays"] == 1
    assert [what for what, _ in captured["waits"]] == ["event"]
