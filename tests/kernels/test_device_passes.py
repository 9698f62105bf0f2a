"""The device executor with interpreted kernels: on the CPU, and on the emulated device with its detector."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.inference import Generator, SamplingParams  # noqa: E402
from deepspeed.inference.executors import attention_ways, select  # noqa: E402
from deepspeed.inference.executors.packed_decoder import PackedDecoder  # noqa: E402
from tests.kernels.interpreter import AllInterpreted  # noqa: E402
from tests.unit.inference.device_passes import (  # noqa: E402
    FAMILIES,
    OTHERS,
    THROUGH_MODULES,
    check_draws,
    check_tokens,
    small,
)
from tests.unit.inference.reference_kernels import only_way  # noqa: E402
from tests.unit.inference.test_attention_ways import varlen_stand_in  # noqa: E402
from tests.unit.inference.test_native import all_ways  # noqa: E402
from tests.unit.inference.toys import alone, llama, prompts  # noqa: E402

NEW = 5
ALL = {**FAMILIES, **OTHERS, **THROUGH_MODULES}
WAYS = ("packed", "kernels", "flash", "gathered")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str) -> None:
    with only_way(AllInterpreted()) as kernels:
        check_tokens(kernels, FAMILIES[family]())


@pytest.mark.slow
def test_tokens_chosen_on_the_device_are_those_of_the_host() -> None:
    with only_way(AllInterpreted()):
        check_draws(small())


def on_the_device(family: str) -> dict[str, Any]:
    """Tokens of a family on the emulated device by each way, what ran them, and reports of its detector."""
    from tests.emulated.runs import observed

    said: dict[str, Any] = {}
    texts = prompts((3, 20))
    with observed() as seen:
        for name in WAYS:
            kernels = AllInterpreted()
            way: Any = (
                attention_ways.FlashWay(varlen_stand_in) if name == "flash" else attention_ways.KernelWay(kernels)
            )
            ways = [] if name == "gathered" else [way]
            plain = mock.patch.object(select, "_without_modules", lambda executor, *_: executor)
            with (
                mock.patch.object(attention_ways, "ways_of", lambda _, ways=ways: (ways, "")),
                mock.patch.object(attention_ways, "FLASH_DTYPES", (torch.float32,)),
                contextlib.nullcontext() if name == "packed" else plain,
            ):
                page = 256 if name == "flash" else 16
                generator = Generator(ALL[family]().to("cuda"), page_size=page, cache_bytes=4 << 20)
            executor: Any = generator._executor
            tokens = generator.generate(texts, SamplingParams(max_new_tokens=NEW, ignore_eos=True))
            said[name] = tokens, type(executor).__name__, sorted({way.name for way, _ in executor.ways.values()})
            generator.close()
    return said | {"reports": seen.reports}


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL)
def test_families_on_the_emulated_device_say_what_the_cpu_says(emulated: Any, family: str) -> None:
    said = emulated(1).run(on_the_device, family, timeout=900.0)[0]
    assert said.pop("reports") == []
    wanted = [alone(ALL[family](), prompt, NEW) for prompt in prompts((3, 20))]
    assert {name: tokens for name, (tokens, *_) in said.items()} == dict.fromkeys(WAYS, wanted)
    assert (said["packed"][1] == "PackedDecoder") == (family not in THROUGH_MODULES)
    assert said["kernels"][2] == said["packed"][2] == ["kernels"] and said["gathered"][2] == []


TABLE = ("8 at once", "32 at once", "chunks", "prefix", "guesses", "other pages", "preempted")


def invariant(way: str) -> list[str]:
    """Compare the logits' bits of a way of the CPU's table on the emulated device; returns the detector's reports."""
    from tests.emulated.runs import observed

    with only_way(AllInterpreted()), mock.patch.object(select, "INVARIANT_ROWS", 8), observed() as seen:
        model = llama(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1).to("cuda")
        all_ways(model, 5, 16, 4, ROOM, (way,), PackedDecoder, batch_invariant=True, max_batch_tokens=32)
    return seen.reports


ROOM = 40  # tokens of the cache at which sequences are preempted


@pytest.mark.slow
@pytest.mark.parametrize("way", TABLE)
def test_logits_on_the_emulated_device_do_not_depend_on_the_batch(emulated: Any, way: str) -> None:
    assert emulated(1).run(invariant, way, timeout=1200.0)[0] == []
