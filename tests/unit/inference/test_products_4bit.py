"""Products of 4-bit matrices: long groups, no offsets, values that are not finite, ends of memory, whole models."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from deepspeed.inference.executors.native_tensors import matrix_of
from deepspeed.inference.quantization.packed_weight import PackedWeight, PackingFormat
from deepspeed.inference.quantization.quantization import quantize_linears
from tests.unit.inference.products import product, product_in_torch
from tests.unit.inference.test_native import all_ways, native
from tests.unit.inference.toys import llama, phi3

pytestmark = native


@pytest.mark.parametrize(("group", "inputs"), [(544, 1088), (800, 1600), (1024, 3072), (160, 2080), (0, 8192)])
def test_groups_of_any_length(form, group: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = PackedWeight(torch.randn(35, inputs), PackingFormat(4, group, 1, False))
    x = torch.randn(9, inputs)
    ours, twin = product(matrix_of(weight), x, 1), product_in_torch(weight, x, None)
    assert float((ours - twin).abs().max()) < 2e-4 * float(twin.abs().max())


def test_a_matrix_without_offsets(form) -> None:
    torch.manual_seed(0)
    weight = PackedWeight(torch.randn(35, 544), PackingFormat(4, 32, 1, False))
    weight.offset.data.zero_()
    x = torch.randn(9, 544)
    matrix, bare = matrix_of(weight), matrix_of(weight)
    bare.offset = None
    assert torch.allclose(product(bare, x, 1), product(matrix, x, 1), rtol=1e-6)


@pytest.mark.parametrize("rows", [2, 130])
def test_what_is_not_finite_shows_in_4_bits(form, rows: int) -> None:
    weight = PackedWeight(torch.randn(40, 64), PackingFormat(4, 32, 1, False))
    for bad in (float("nan"), float("inf")):
        x = torch.ones(rows, 64)
        x[rows // 2, 3] = bad
        ours, whole = product(matrix_of(weight), x, 1), torch.arange(rows) != rows // 2
        assert not ours[~whole].isfinite().any() and ours[whole].isfinite().all()


@pytest.mark.parametrize("make", [llama, phi3])
def test_logits_in_4_bits_do_not_depend_on_the_batch(make) -> None:
    model = make(max_position_embeddings=512)
    quantize_linears(model, 4, 1, torch.float32)
    all_ways(model, 32, 60, 6, 300, ("32 at once", "chunks", "guesses", "preempted"))


def before_a_guard(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last one before a page that nobody may read."""
    page = mmap.PAGESIZE
    size = -(-tensor.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(page), 0) == 0
    whole = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=size - tensor.nbytes)
    return whole.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(("outputs", "group", "inputs"), [(1, 32, 32), (17, 96, 672), (33, 160, 1120), (40, 0, 544)])
def test_nothing_is_read_past_the_end(form, outputs: int, group: int, inputs: int) -> None:
    torch.manual_seed(0)
    weight = PackedWeight(torch.randn(outputs, inputs), PackingFormat(4, group, 1, False))
    for part in (weight.integers, weight.scale, weight.offset):
        part.data = before_a_guard(part.data)
    x = before_a_guard(torch.randn(3, inputs))
    ours, twin = product(matrix_of(weight), x, 1), product_in_torch(weight, x, None)
    assert float((ours - twin).abs().max()) < 2e-4 * float(twin.abs().max())
