"""Block quantisation against its formulas in float64, in plain torch and on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed.comm.collectives import block_codec
from deepspeed.comm.collectives.block_codec import BlockCodec, BlockLayout
from deepspeed.comm.collectives.collectives import sum_in_rank_order
from deepspeed.errors import ArgumentError
from deepspeed.native import INSTRUCTION_SETS, library
from tests.harness.kernels import forms

TORCH = "torch"
WAYS = [TORCH, *forms()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [[1], [2], [255], [256], [257], [769], [512, 256], [1, 1, 1], [300, 7, 256, 1, 515], [255, 257, 2]]
LENGTHS += [[int(n) for n in np.random.default_rng(seed).integers(1, 600, 1 + seed % 6)] for seed in range(12)]
KINDS = ["normal", "zeros", "inf", "nan", "-inf", "inf and nan", "subnormal", "constant", "all sizes", "most finite"]


@contextmanager
def using(way: str) -> Iterator[None]:
    found = library()
    with pytest.MonkeyPatch.context() as patch:
        if found is None or way == TORCH:
            patch.setattr(block_codec, "library", lambda: None)
        else:
            found.ds_instruction_set(INSTRUCTION_SETS.index(way))
        try:
            yield
        finally:
            if found is not None:
                found.ds_instruction_set(len(INSTRUCTION_SETS))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


# -- the formulas -----------------------------------------------------------------------------------------------------


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Numbers of eight significant bits or multiples of 2^-133, ties to even, in float64."""
    unit = np.maximum(np.frexp(values)[1] - 8, -133)
    rounded = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
    return np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded)


def rounded_to(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.bfloat16:
        return to_bfloat16(values)
    return values.astype(np.float16 if dtype == torch.float16 else np.float32).astype(np.float64)


@dataclass
class Encoded:
    """One block: bits of the scale, codes, and what they are decoded to."""

    scale_bits: int
    codes: np.ndarray
    decoded: np.ndarray
    scale: float  # 0 for zeros and for what is not finite


def formula(x: np.ndarray, bits: int) -> Encoded:
    """The block of these values, which are fp32 numbers in float64."""
    limit, finite = 2 ** (bits - 1) - 1, np.isfinite(x)
    if not finite.all():
        codes = np.where(np.isnan(x), -limit - 1, np.where(np.isinf(x), np.sign(x), 0))
        return Encoded(0x7FC0 if np.isnan(x).any() else 0x7F80, codes.astype(int), np.where(finite, 0.0, x), 0.0)
    quotient = np.float64(np.float32(np.abs(x).max() / limit))  # a quotient of fp32 numbers is rounded once by this
    scale = float(to_bfloat16(quotient)) if quotient else 0.0
    if scale < 2.0**-126:
        return Encoded(0, np.zeros(len(x), int), np.zeros(len(x)), 0.0)
    inverse = np.float64(np.float32(1 / np.float64(scale)))
    codes = np.rint((x * inverse).astype(np.float32)).astype(int)
    codes = np.clip(codes, -limit, limit)
    return Encoded(int(np.float32(scale).view(np.uint32)) >> 16, codes, codes * scale, scale)


def payload_of(x: np.ndarray, lengths: list[int], bits: int) -> tuple[bytes, np.ndarray]:
    """The whole payload and the decoded values, by the rules of the format; also sees to the bound of the error."""
    scales, codes, decoded, start = b"", b"", [], 0
    for length in lengths:
        segment = x[start : start + length]
        blocks = [formula(segment[at : at + 256], bits) for at in range(0, length, 256)]
        scales += b"".join(block.scale_bits.to_bytes(2, "little") for block in blocks)
        numbers = [int(code) for block in blocks for code in block.codes]
        if bits == 8:
            codes += bytes(number & 255 for number in numbers)
        else:
            numbers += [0] * (length % 2)
            codes += bytes(a & 15 | (b & 15) << 4 for a, b in zip(numbers[::2], numbers[1::2], strict=True))
        for index, block in enumerate(blocks):
            values = segment[256 * index : 256 * (index + 1)]
            if block.scale:  # neither special nor zeros
                assert (np.abs(values - block.decoded) <= block.scale / 2 + 2.0**-23 * np.abs(values)).all()
            decoded.append(block.decoded)
        start += length
    return scales + codes, np.concatenate(decoded)


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.float().numpy().astype(np.float64)


def borders_of(lengths: list[int]) -> tuple[int, ...]:
    return (0, *(int(end) for end in np.cumsum(lengths)))


def drawn_values(source: np.random.Generator, kind: str, lengths: list[int], dtype: torch.dtype) -> Tensor:
    numel = sum(lengths)
    values = source.standard_normal(numel) * 10.0 ** source.uniform(-30, 3)
    if kind == "all sizes":
        values = source.standard_normal(numel) * np.repeat(10.0 ** source.uniform(-44, 38, len(lengths)), lengths)
    if kind == "zeros":
        values[:] = 0.0 if source.random() < 0.5 else -0.0
    if kind == "subnormal":
        values = source.standard_normal(numel) * 10.0 ** source.uniform(-44, -35)
    if kind == "constant":
        values[:] = values[0]
    if kind == "most finite":
        values[:] = source.choice([-1.0, 1.0], numel) * 3.4028234663852886e38
    for name, value in {"-inf": -math.inf, "nan": math.nan, "inf": math.inf}.items():
        if name in kind:
            values[source.integers(numel)] = value
    with np.errstate(over="ignore"):
        return torch.from_numpy(values.astype(np.float32)).to(dtype)


# -- every form against them ------------------------------------------------------------------------------------------


def check_tensors(numbers: range) -> None:
    for number in numbers:
        source = np.random.default_rng(number)
        bits, dtype = (8, 4)[number % 2], DTYPES[number // 2 % 3]
        lengths, kind = LENGTHS[source.integers(len(LENGTHS))], KINDS[number // 6 % len(KINDS)]
        values = drawn_values(source, kind, lengths, dtype)
        wanted, decoded = payload_of(wide(values), lengths, bits)
        layout = BlockCodec(bits).layout(borders_of(lengths))
        assert layout.nbytes == len(wanted) and layout.numel == len(values)
        where = f"tensor {number}: int{bits}, {kind}, {dtype}, {lengths}"
        out_dtype = DTYPES[source.integers(3)]
        with np.errstate(over="ignore"):
            expected = torch.from_numpy(rounded_to(decoded, out_dtype))
        for way in WAYS:
            with using(way):
                payload = torch.full((2 + layout.nbytes + 2,), 0xA5, dtype=torch.uint8)[2:]
                layout.encode(values, payload)
                assert payload[: layout.nbytes].numpy().tobytes() == wanted, f"{way}, {where}"
                assert payload[layout.nbytes :].tolist() == [0xA5, 0xA5], f"{way} writes beyond the end, {where}"
                out = torch.full((layout.numel + 1,), 7.0, dtype=out_dtype)
                layout.decode(payload, out[:-1])
                assert same(out[:-1].double(), expected) and out[-1] == 7.0, f"{way} to {out_dtype}, {where}"


def same(a: Tensor, b: Tensor) -> bool:
    """Equal numbers, signs of zeros and places of NaN."""
    signs = [tensor.signbit() & ~tensor.isnan() for tensor in (a, b)]
    return torch.allclose(a, b, 0.0, 0.0, equal_nan=True) and torch.equal(*signs)


def test_random_tensors_in_every_form() -> None:
    check_tensors(range(300))


@pytest.mark.slow
def test_ten_thousand_random_tensors_in_every_form() -> None:
    check_tensors(range(300, 10_300))


@pytest.mark.parametrize("bits", [8, 4])
def test_lossless_codes_and_ties(bits: int, way: str) -> None:
    """All codes with scale 1 come back; halves between them go to the even one."""
    limit = 2 ** (bits - 1) - 1
    values = torch.arange(-limit, limit + 0.5, 0.5)
    payload, out, layout = buffers(values, BlockCodec(bits))
    layout.encode(values, payload)
    layout.decode(payload, out)
    assert torch.equal(out, torch.tensor([float(round(value)) for value in values.tolist()]))
    layout.encode(out, payload)
    layout.decode(payload, values)
    assert torch.equal(out, values)


def buffers(values: Tensor, codec: BlockCodec, *cuts: int) -> tuple[Tensor, Tensor, BlockLayout]:
    layout = codec.layout((0, *cuts, len(values)))
    return torch.zeros(layout.nbytes, dtype=torch.uint8), torch.empty_like(values), layout


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("block", [2, 64, 1024])
def test_other_blocks_have_the_same_rules(bits: int, block: int) -> None:
    values = torch.randn(3001, generator=torch.Generator().manual_seed(block))
    results = []
    for way in WAYS:
        with using(way):
            payload, out, layout = buffers(values, BlockCodec(bits, block), 1000)
            layout.encode(values, payload)
            layout.decode(payload, out)
            results.append((payload, out))
    assert all(torch.equal(payload, results[0][0]) and torch.equal(out, results[0][1]) for payload, out in results)
    for part in (slice(0, min(block, 1000)), slice(1000, 1000 + block), slice(3001 - 2001 % block, 3001)):
        most = values[part].abs().max()
        assert (values[part] - out[part]).abs().max() <= most * 0.502 / (2 ** (bits - 1) - 1)


def test_threads_and_places_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    for bits in (8, 4):
        layout = BlockCodec(bits).layout((0, 77, 77_000, 300_001))
        results = []
        for count, offset in ((1, 0), (2, 2), (3, 6), (7, 30)):
            monkeypatch.setattr(block_codec, "threads", lambda count=count: count)
            payload = torch.zeros(layout.nbytes + offset, dtype=torch.uint8)[offset:]
            moved = torch.cat([torch.zeros(offset), values])[offset:]
            out, memory = torch.empty_like(values), torch.zeros(len(values), dtype=torch.bfloat16)
            layout.encode(moved, payload, memory, 0.5)
            layout.sum([payload, moved, payload], out, 0.5, False)
            results.append((payload, memory, out))
        assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


# -- error memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_error_memory_over_steps(bits: int, dtype: torch.dtype, way: str) -> None:
    lengths, beta = [300, 7, 513], 0.8
    layout, source = BlockCodec(bits).layout(borders_of(lengths)), np.random.default_rng(bits)
    memory = torch.zeros(layout.numel, dtype=torch.bfloat16)
    expected = np.zeros(layout.numel)
    payload = torch.empty(layout.nbytes, dtype=torch.uint8)
    kept, renewed = np.float32(beta), np.float32(1 - beta)
    for step in range(20):
        values = torch.from_numpy(source.standard_normal(layout.numel) * 10.0 ** (step % 4 - 3)).to(dtype)
        if step in (5, 11):
            values[301] = (math.inf, math.nan)[step // 6]
        h = wide(values).astype(np.float32) + expected.astype(np.float32)
        wanted, decoded = payload_of(h.astype(np.float64), lengths, bits)
        layout.encode(values, payload, memory, beta)
        assert payload.numpy().tobytes() == wanted, f"step {step}"
        with np.errstate(invalid="ignore"):
            error = kept * expected.astype(np.float32) + renewed * (h - decoded.astype(np.float32))
        if step in (5, 11):
            error[300:307] = 0.0  # the block of the infinity, which is the whole segment
        expected = to_bfloat16(error.astype(np.float64))
        assert (wide(memory) == expected).all(), f"step {step}"
        assert np.abs(expected).max() > 0


def test_plain_error_memory_loses_nothing_in_the_long_run(way: str) -> None:
    """With beta 0, all that was sent and the last error are all values, but for the error's own rounding."""
    source = torch.Generator().manual_seed(3)
    values = torch.zeros(1000)
    payload, out, layout = buffers(values, BlockCodec(4))
    memory = torch.zeros(1000, dtype=torch.bfloat16)
    total, sent = torch.zeros(1000), torch.zeros(1000)
    for _ in range(50):
        values = torch.randn(1000, generator=source) + 0.01
        layout.encode(values, payload, memory)
        layout.decode(payload, out)
        total, sent = total + values, sent + out
    assert (total - sent - memory.float()).abs().max() < 0.02
    assert (total - sent).abs().max() < 0.5  # 50 encodings without memory lose up to 10 here


def test_an_overflow_of_the_sum_with_the_memory_is_seen(way: str) -> None:
    values = torch.full((300,), 3.0e38)
    memory = torch.full((300,), 1.0e38, dtype=torch.bfloat16)
    payload, out, layout = buffers(values, BlockCodec())
    memory[256:] = 0
    layout.encode(values, payload, memory, 0.5)
    layout.decode(payload, out)
    assert out[:256].isposinf().all() and out[256:].isfinite().all()
    assert not memory[:256].any()


# -- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_sums_are_those_of_decoded_values(bits: int, add: bool, way: str) -> None:
    layout, source = BlockCodec(bits).layout((0, 255, 600, 601, 1400)), torch.Generator().manual_seed(bits)
    values = [torch.randn(1400, generator=source) * 10.0**n for n in range(4)]
    values[2][700], values[1][1399] = math.inf, math.nan
    encoded = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in values]
    decoded = [torch.empty(1400) for _ in values]
    for tensor, payload, out in zip(values, encoded, decoded, strict=True):
        layout.encode(tensor, payload)
        layout.decode(payload, out)
    mixtures: list[tuple[list[Tensor], list[Tensor]]] = [(encoded[:1], decoded[:1]), (encoded, decoded)]
    for dtype in DTYPES:
        own = values[1].to(dtype)
        mixtures += [([own], [own]), ([encoded[0], own, encoded[2]], [decoded[0], own, decoded[2]])]
        mixtures += [([own, encoded[3]], [own, decoded[3]])]
    for parts, plain in mixtures:
        for dtype in DTYPES:
            for scale in (1.0, 1 / 3):
                out = values[0].to(dtype)
                wanted = out.clone()
                layout.sum(parts, out, scale, add)
                sum_in_rank_order(plain, wanted, scale, add)
                assert same(out, wanted)


def test_a_sum_may_take_the_place_of_the_own_part(way: str) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    payload, decoded, layout = buffers(values, BlockCodec())
    layout.encode(values * 3, payload)
    layout.decode(payload, decoded)
    for place in range(3):
        own = values.clone()
        parts = [payload, payload]
        parts.insert(place, own)
        wanted = torch.empty(1000)
        sum_in_rank_order([values if part is own else decoded for part in parts], wanted, 0.5, add=False)
        layout.sum(parts, own, 0.5, False)
        assert torch.equal(own, wanted)


# -- the interface ----------------------------------------------------------------------------------------------------


def test_layouts_are_shared_and_count_their_bytes() -> None:
    codec = BlockCodec(4)
    assert codec.layout([0, 3, 600]) is BlockCodec(bits=4).layout((0, 3, 600))
    assert codec == BlockCodec(4, 256) and hash(codec) == hash(BlockCodec(4, 256)) and codec != BlockCodec()
    assert (codec.name, BlockCodec().name) == ("int4", "int8")
    layout = codec.layout((0, 3, 600))
    assert (layout.blocks, layout.nbytes, layout.numel) == (4, 8 + 2 + 299, 600)
    assert BlockCodec().layout((0, 3, 600)).nbytes == 8 + 600
    assert layout.codec is not None and layout.borders == (0, 3, 600)


@pytest.mark.parametrize("borders", [(0,), (0, 0)])
def test_no_values_at_all(borders: tuple[int, ...], way: str) -> None:
    layout = BlockCodec(4).layout(borders)
    nothing, payload = torch.empty(0), torch.empty(0, dtype=torch.uint8)
    assert layout.nbytes == layout.blocks == layout.numel == 0
    layout.encode(nothing, payload, torch.empty(0, dtype=torch.bfloat16), 0.5)
    layout.decode(payload, nothing)
    layout.sum([payload, nothing], nothing, 0.5, True)


def test_segments_without_elements_have_no_block(way: str) -> None:
    values = torch.randn(600, generator=torch.Generator().manual_seed(0))
    payload, out, layout = buffers(values, BlockCodec(4), 0, 301, 301, 600)
    plain, _, bare = buffers(values, BlockCodec(4), 301)
    layout.encode(values, payload)
    bare.encode(values, plain)
    assert torch.equal(payload, plain)
    layout.decode(payload, out)
    assert (out - values).abs().max() < 0.5


def test_the_relative_error_is_that_of_the_formula() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for bits, low, high in ((8, 0.003, 0.008), (4, 0.06, 0.14)):
        payload, out, layout = buffers(values, BlockCodec(bits))
        layout.encode(values, payload)
        layout.decode(payload, out)
        error = layout.relative_error(values, payload).item()
        difference = (values.double() - out.double()).norm() / values.double().norm()
        assert low < error < high and error == pytest.approx(difference.item(), rel=1e-12)
    payload, out, layout = buffers(torch.zeros(9), BlockCodec())
    assert layout.relative_error(torch.zeros(9), payload).item() == 0.0


F32 = torch.zeros(10)
BYTES = torch.zeros(64, dtype=torch.uint8)
TEN = BlockCodec().layout((0, 10))
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "bits": (lambda: BlockCodec(2), "8 or 4 bits"),
    "odd block": (lambda: BlockCodec(8, 255), "even number"),
    "large block": (lambda: BlockCodec(8, 2048), "even number"),
    "no borders": (lambda: BlockCodec().layout(()), "start at 0"),
    "first border": (lambda: BlockCodec().layout((1, 10)), "start at 0"),
    "descending borders": (lambda: BlockCodec().layout((0, 10, 5)), "ascend"),
    "length": (lambda: TEN.encode(torch.zeros(9), BYTES), "10 contiguous elements"),
    "dimensions": (lambda: TEN.encode(torch.zeros(2, 5), BYTES), "10 contiguous elements"),
    "strides": (lambda: TEN.decode(BYTES, torch.zeros(20)[::2]), "10 contiguous elements"),
    "dtype": (lambda: TEN.encode(F32.double(), BYTES), "float64"),
    "short payload": (lambda: TEN.encode(F32, BYTES[:11]), "12 bytes"),
    "odd place": (lambda: TEN.decode(BYTES[1:], F32), "even offset"),
    "payload's dtype": (lambda: TEN.decode(BYTES.view(torch.int8), F32), "uint8"),
    "memory's length": (lambda: TEN.encode(F32, BYTES, torch.zeros(9, dtype=torch.bfloat16)), "memory"),
    "memory's dtype": (lambda: TEN.encode(F32, BYTES, torch.zeros(10)), "bfloat16"),
    "beta": (lambda: TEN.encode(F32, BYTES, beta=1.0), "beta"),
    "no parts": (lambda: TEN.sum([], F32, 1.0, False), "at least one"),
    "part's length": (lambda: TEN.sum([BYTES, torch.zeros(9)], F32, 1.0, False), "10 contiguous elements"),
    "part's bytes": (lambda: TEN.sum([BYTES[:4]], F32, 1.0, False), "12 bytes"),
    "device": (lambda: TEN.encode(F32, BYTES.to("meta")), "meta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ArgumentError, match=message):
        call()
