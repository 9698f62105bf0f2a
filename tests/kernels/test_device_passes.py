"""The device executor with interpreted kernels: on the CPU, and on the emulated device with its detector."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from tests.kernels.needs import need_triton

need_triton()

from deepspeed.inference.executors import select  # noqa: E402
from tests.kernels.interpreter import AllInterpreted  # noqa: E402
from tests.unit.inference.device_passes import (  # noqa: E402
    FAMILIES,
    INVARIANT,
    ON_DEVICE,
    check_draws,
    check_family,
    check_invariance,
    check_tokens,
    families_on_the_device,
    small,
)
from tests.unit.inference.reference_kernels import only_way  # noqa: E402
from tests.unit.inference.test_packed_matrices import logits_of, model_in, widened  # noqa: E402
from tests.unit.inference.toys import llama, prompts  # noqa: E402


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate(family: str) -> None:
    with only_way(AllInterpreted()) as kernels:
        check_tokens(kernels, FAMILIES[family]())


@pytest.mark.slow
@pytest.mark.parametrize(("form", "tokens"), [("fp8", 2), ("fp8", 7), ("int8", 2), ("int4", 2)])
def test_logits_of_packed_matrices(form: str, tokens: int) -> None:
    """In fp16, beside the same matrices in plain layers, in fp32: products of few rows, and in tiles."""
    model = model_in(form, torch.float16, num_hidden_layers=1)
    right = widened(model).float()(torch.tensor(prompts((tokens,)))).logits[0].detach()
    with only_way(AllInterpreted()) as kernels:
        logits, products = logits_of(kernels, model, tokens)
    assert set(products) == ({"gemv"} if tokens <= 4 else {"tile"})
    torch.testing.assert_close(logits.float(), right, rtol=0.02, atol=0.01 * right.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "int8", "int4", "fp8"])
def test_logits_of_single_rows(form: str | None) -> None:
    """In bf16, six launches a layer, beside the same matrices in plain layers, in fp32."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = llama(**sizes).bfloat16() if form is None else model_in(form, torch.bfloat16)
    right = widened(model).float()(torch.tensor(prompts((1,)))).logits[0].detach()
    with only_way(AllInterpreted()) as kernels, mock.patch.object(select, "_tried", lambda *_: None):
        logits, products = logits_of(kernels, model, 1)
        launched = {name.split("_bf16")[0] for name, _ in kernels.launches}
    assert set(products) == {"gemv"} and launched >= {"gemv_rotate", "gemv_add", "gemv_gate"}
    torch.testing.assert_close(logits.float(), right, rtol=0.03, atol=0.03 * right.abs().max().item())


@pytest.mark.slow
def test_tokens_chosen_on_the_device_are_those_of_the_host() -> None:
    with only_way(AllInterpreted()):
        check_draws(small())


@pytest.mark.slow
@pytest.mark.parametrize("family", ON_DEVICE)
def test_families_on_the_emulated_device_say_what_the_cpu_says(emulated: Any, family: str) -> None:
    said = emulated(1).run(families_on_the_device, family, "interpreted", timeout=1500.0)[0]
    check_family(said, family)


@pytest.mark.slow
@pytest.mark.parametrize("way", INVARIANT)
def test_logits_on_the_emulated_device_do_not_depend_on_the_batch(emulated: Any, way: str) -> None:
    assert emulated(1).run(check_invariance, way, "interpreted", timeout=1500.0)[0] == []
