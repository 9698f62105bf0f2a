"""Matrices in int8, int4 and fp8 in passes without modules, the kernels in plain torch: logits, launches, memory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed.inference import Generator
from deepspeed.inference.executors import device_matrices
from deepspeed.inference.executors.packed_decoder import PackedDecoder
from deepspeed.inference.executors.ragged_batch import BatchSlice, RaggedBatch
from deepspeed.inference.quantization import float8
from deepspeed.inference.quantization.float8 import Float8Linear, float8_linears
from deepspeed.inference.quantization.quantization import quantize_linears
from tests.unit.inference.device_passes import GREEDY, toy
from tests.unit.inference.reference_kernels import ReferenceKernels, only_way
from tests.unit.inference.toys import llama, phi3, prompts

CPU = torch.device("cpu")
PACK = {
    "int8": lambda model: quantize_linears(model, 8, 1),
    "int4": lambda model: quantize_linears(model, 4, 1),
    "fp8": float8_linears,
}


@pytest.fixture
def kernels() -> Iterator[Any]:
    with only_way(ReferenceKernels()) as launched:
        yield launched


def model_in(form: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    model = llama(hidden_size=64, intermediate_size=64, **sizes).to(dtype)
    PACK[form](model)
    return model


def logits_of(kernels: Any, model: Any, tokens: int, **options: Any) -> tuple[torch.Tensor, Counter[str]]:
    """Logits of a prompt's rows in one pass, and the products that ran."""
    executor: Any = Generator(model, cache_bytes=1 << 18, **options)._executor
    assert type(executor) is PackedDecoder, executor.unfused
    executor.store = executor.store.resized(4, 16)
    launches, text = len(kernels.launches), prompts((tokens,))[0]
    logits = executor.run(RaggedBatch([BatchSlice(text, 0, [1], tokens)], 16, CPU))
    names = [name.split("_")[0] for name, _ in kernels.launches[launches:]]
    return logits, Counter(name for name in names if name in ("gemv", "tile", "wide", "round"))


def widened(model: Any) -> Any:
    """The model with the values of its fp8 matrices in plain layers, whose inputs nobody rounds."""
    plain = copy.deepcopy(model)
    for owner in list(plain.modules()):
        for name, child in owner.named_children():
            if isinstance(child, Float8Linear):
                layer = torch.nn.Linear(
                    child.in_features, child.out_features, child.bias is not None, dtype=child.dtype
                )
                layer.weight.data.copy_(child.weight)
                if child.bias is not None:
                    layer.bias.data.copy_(child.bias)
                setattr(owner, name, layer)
    return plain


@pytest.mark.parametrize(("form", "ran"), [
    ("int8", {"tile": 9}), ("int4", {"tile": 9}), ("fp8", {"tile": 8}),
])  # fmt: skip
def test_logits_are_those_of_the_values(kernels: Any, form: str, ran: dict[str, int]) -> None:
    """Four products a layer, and a head in 8 bits or none; inputs of fp8 are not rounded in fp32."""
    model = model_in(form)
    logits, products = logits_of(kernels, model, 11)
    right = widened(model)(torch.tensor(prompts((11,)))).logits[0].detach()
    assert products == ran
    torch.testing.assert_close(logits, right, rtol=2e-4, atol=2e-4 * right.abs().max().item())


@pytest.mark.parametrize(("tokens", "options", "ran"), [
    (2, {}, {"gemv": 8}), (4, {}, {"gemv": 8}), (2, {"batch_invariant": True}, {"tile": 8}), (11, {}, {"round": 8}),
])  # fmt: skip
def test_fp8_on_cards_that_have_its_products(kernels: Any, tokens: int, options: Any, ran: dict[str, int]) -> None:
    """More than four rows are rounded, as in the modules; without invariance few rows have a kernel of their own."""
    model = model_in("fp8", torch.bfloat16)
    with mock.patch.object(float8, "has_scaled_product", lambda device: True):
        logits, products = logits_of(kernels, model, tokens, **options)
        modules = model(torch.tensor(prompts((tokens,)))).logits[0].detach().float()
    exact = widened(model).float()(torch.tensor(prompts((tokens,)))).logits[0].detach()
    noise = (modules - exact).abs().max()  # of rounded inputs, which this toy makes large
    products.pop("gemv", None) if "gemv" not in ran else None  # of the head, in bf16
    assert {name: products[name] for name in ran} == ran or products["gemv"] == 9, products
    assert (logits.float() - (modules if "round" in ran else exact)).abs().max() <= 0.5 * noise


def test_tokens_of_fp8_are_the_modules_but_for_its_noise(kernels: Any) -> None:
    """Where the modules prefer another token, they do so by less than what rounded inputs change."""
    model, (text,) = model_in("fp8", torch.bfloat16), prompts((9,))
    with mock.patch.object(float8, "has_scaled_product", lambda device: True):
        generator = Generator(model, cache_bytes=1 << 18)
        assert type(generator._executor) is PackedDecoder
        (tokens,) = generator.generate([text], GREEDY)
        whole = torch.tensor([text + tokens[:-1]])
        rounded = model(whole).logits[0, len(text) - 1 :].detach().float()
        with float8.inputs_as_they_are():
            exact = model(whole).logits[0, len(text) - 1 :].detach().float()
    noise = (rounded - exact).abs().amax(-1)
    for logits in (rounded, exact):
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert bool((logits.amax(-1) - chosen <= 2 * noise).all())


def test_a_scaled_product_has_the_bits_of_the_module() -> None:
    torch.manual_seed(0)
    layer = Float8Linear(torch.randn(32, 48).bfloat16(), torch.nn.Parameter(torch.randn(32).bfloat16()))
    x, kernels = torch.randn(5, 48).bfloat16(), ReferenceKernels()
    with mock.patch.object(float8, "has_scaled_product", lambda device: True):
        wanted = layer(x)
        matrix = device_matrices.packed_matrix(layer, layer.bias)
    (out,) = matrix(kernels, x, 0)
    assert torch.equal(out, wanted) and [name for name, _ in kernels.launches] == ["round_rows_bf16_block4096"]
    with float8.inputs_as_they_are():
        (out,) = matrix(kernels, x, 0)
        torch.testing.assert_close(out, layer(x), rtol=0.02, atol=0.02)
        assert (out - wanted).abs().max() > 0.1
    assert "tile_product" in kernels.launches[-1][0]


def late_rows(values: torch.Tensor, scales: torch.Tensor) -> None:
    scales[10:].mul_(100)


def last_columns(values: torch.Tensor, scales: torch.Tensor) -> None:
    values[:, -16:] = 0


@pytest.mark.parametrize("plant", [lambda _, scales: scales.mul_(0.5), late_rows, last_columns])
def test_a_rounding_kernel_that_is_wrong_is_not_used(kernels: Any, plant: Any) -> None:
    real = ReferenceKernels.launch

    def launch(self: Any, variant: Any, grid: Any, arguments: Any) -> None:
        real(self, variant, grid, arguments)
        if variant.kernel == "round_rows":
            plant(*arguments[1:3])

    with (
        mock.patch.object(float8, "has_scaled_product", lambda device: True),
        mock.patch.object(ReferenceKernels, "launch", launch),
    ):
        generator = Generator(model_in("fp8", torch.bfloat16), cache_bytes=1 << 18)
    assert "rounded to other numbers" in generator._executor.unfused and generator._executor.ways


@pytest.mark.parametrize("form", [None, *PACK])
def test_the_start_runs_the_product_of_one_row(kernels: Any, form: str | None) -> None:
    real = ReferenceKernels.launch

    def launch(self: Any, variant: Any, grid: Any, arguments: Any) -> None:
        real(self, variant, grid, arguments)
        if variant.kernel == "gemv" and variant.constants["ROWS"] == 1:
            arguments[5].mul_(-3)

    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = llama(**sizes).bfloat16() if form is None else model_in(form, torch.bfloat16)
    with mock.patch.object(ReferenceKernels, "launch", launch):
        generator = Generator(model, cache_bytes=1 << 18)
    assert "logits of mixed rows" in generator._executor.unfused


@pytest.mark.parametrize(("kernel", "written"), [("gemv_add", 7), ("gemv_gate", 6), ("gemv_rotate", 9)])
def test_the_start_runs_the_kernels_of_single_rows(kernels: Any, kernel: str, written: int) -> None:
    real = ReferenceKernels.launch

    def launch(self: Any, variant: Any, grid: Any, arguments: Any) -> None:
        real(self, variant, grid, arguments)
        if variant.kernel == kernel:
            arguments[written].mul_(-3)

    with mock.patch.object(ReferenceKernels, "launch", launch):
        generator = Generator(model_in("int8", torch.bfloat16), cache_bytes=1 << 18)
    assert "logits of mixed rows" in generator._executor.unfused


@pytest.mark.parametrize(("options", "used"), [({}, True), ({"batch_invariant": True}, False)])
def test_kernels_of_single_rows_are_used_unless_bits_are_those_of_batches(
    kernels: Any, options: dict[str, Any], used: bool
) -> None:
    single_rows = {"gemv_rotate", "gemv_add", "gemv_gate"}
    model = model_in("int8", torch.bfloat16)
    logits_of(kernels, model, 1, **options)
    assert single_rows & {name.split("_bf16")[0] for name, _ in kernels.launches} == (single_rows if used else set())
    with mock.patch.object(ReferenceKernels, "has", lambda self, variant: variant.kernel not in single_rows):
        executor = Generator(model, cache_bytes=1 << 18, **options)._executor
    assert (type(executor) is PackedDecoder) != used


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("form", [None, *PACK])
def test_kernels_get_addresses_that_they_are_compiled_for(form: str | None, rows: int) -> None:
    """A bias and inputs that begin in the middle of 16 bytes, and one row of a wider matrix."""
    torch.manual_seed(0)
    weight, bias = torch.randn(32, 64).bfloat16(), torch.randn(33).bfloat16()[1:]
    inputs = torch.randn(rows * 70 + 1).bfloat16()[1:].view(rows, 70)[:, :64]
    if form is None:
        matrix, wanted = (
            device_matrices.DenseMatrix(weight, bias, (32,)),
            torch.nn.functional.linear(inputs, weight, bias),
        )
    else:
        layer: Any = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
        layer[0].weight.data, layer[0].bias.data = weight, bias
        PACK[form](layer)
        packed = layer[0] if form == "fp8" else layer[0].packed
        matrix = device_matrices.packed_matrix(packed, bias)
        with float8.inputs_as_they_are():
            wanted = layer(inputs)
    seen = list[tuple[Any, ...]]()

    class Watched(ReferenceKernels):
        def launch(self, variant: Any, grid: Any, arguments: Any) -> None:
            seen.append(arguments)
            super().launch(variant, grid, arguments)

    with float8.inputs_as_they_are():
        (out,) = matrix(Watched(), inputs, 0)
    torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.05)
    tensors = [each for arguments in seen for each in arguments if isinstance(each, torch.Tensor)]
    assert bool(tensors) is (form is not None or rows <= 2) and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    if rows <= 2:
        assert next(each for each in seen[0] if isinstance(each, int)) % 16 == 0  # the stride of rows


@pytest.mark.parametrize("form", PACK)
def test_matrices_that_read_the_same_rows_are_one_in_memory(kernels: Any, form: str) -> None:
    model = model_in(form)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = Generator(model, cache_bytes=1 << 18)
    attention = model.model.layers[0].self_attn
    parts = [
        next((layer.packed if form != "fp8" else layer).parameters()) for layer in (attention.q_proj, attention.v_proj)
    ]
    assert parts[0].untyped_storage().data_ptr() == parts[1].untyped_storage().data_ptr()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    text, executor = prompts((9,)), generator._executor
    first, version = generator.generate(text, GREEDY), executor.version
    assert generator.generate(text, GREEDY) == first and executor.version == version
    for part in attention.q_proj.parameters() if form == "fp8" else attention.q_proj.packed.parameters():
        part.data = part.data.clone()  # moved away: read again, and joined no more
    assert generator.generate(text, GREEDY) == first and executor.version > version
    assert len(executor.structure.layers[0].qkv.parts) == 3


@pytest.mark.parametrize("form", PACK)
def test_matrices_that_are_stored_as_one(kernels: Any, form: str) -> None:
    model = phi3()
    PACK[form](model)
    logits, _ = logits_of(kernels, model, 7)
    right = widened(model)(torch.tensor(prompts((7,)))).logits[0].detach()
    torch.testing.assert_close(logits, right, rtol=2e-4, atol=2e-4 * right.abs().max().item())


def test_biases_of_fp8(kernels: Any) -> None:
    model = toy("Qwen2")
    float8_linears(model)
    logits, _ = logits_of(kernels, model, 7)
    right = widened(model)(torch.tensor(prompts((7,)))).logits[0].detach()
    torch.testing.assert_close(logits, right, rtol=2e-4, atol=2e-4 * right.abs().max().item())


def test_few_rows_of_16_bits_have_a_kernel_of_their_own(kernels: Any) -> None:
    """One or two rows, in matrices that are not large."""
    model = llama(hidden_size=64, intermediate_size=64).bfloat16()
    right = model(torch.tensor(prompts((2,)))).logits[0].detach().float()
    for tokens, largest, ran in ((2, 1 << 20, 9), (3, 1 << 20, 0), (2, 64 * 128 * 2 - 1, 4)):
        with mock.patch.object(device_matrices, "LARGEST_GEMV", largest):
            logits, products = logits_of(kernels, model, tokens)
        assert products["gemv"] == ran, (tokens, largest)
        torch.testing.assert_close(logits[:2].float(), right, rtol=0.05, atol=0.05 * right.abs().max().item())
