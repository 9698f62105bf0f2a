"""Encoded messages for many ranks at once: the bits of one slice after the other, whatever encodes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from deepspeed.comm.collectives import block_codec, block_table, encoded
from deepspeed.comm.collectives.block_codec import BlockCodec
from deepspeed.comm.collectives.block_table import BlockTable, Parts
from deepspeed.comm.collectives.encoded import CastCodec, EncodedSlices
from deepspeed.comm.watchdog.comms_logger import comms_logger
from deepspeed.errors import CheckpointCorruptError
from deepspeed.ops.triton import blocks, load
from deepspeed.ops.triton.row_variants import block_variant, block_variants
from tests.parallel.tiny import said

CUTS, BORDERS = [0, 700, 700, 1401, 2048], [0, 300, 301, 1400, 2048]


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without the native library, and in small chunks."""
    monkeypatch.setattr(block_codec, "library", lambda: None)
    monkeypatch.setattr(block_table, "_CHUNK", 3 * 256)
    yield


def sides(slices: EncodedSlices, memory: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload of all slices but the first, error memory, and the values of a payload of all."""
    source = torch.Generator().manual_seed(0)
    flat = torch.randn(CUTS[-1], generator=source)
    errors = (torch.randn(CUTS[-1], generator=source) / 8).bfloat16()
    payload, full = torch.zeros(slices.nbytes, dtype=torch.uint8), torch.zeros(CUTS[-1])
    slices.encode([1, 2, 3], flat, payload, "reduce of a group", errors if memory else None, 0.5)
    partial = payload.clone()
    slices.encode_slice(0, flat[: CUTS[1]], slices.bytes_of(payload, 0), "reduce of a group")
    slices.decode(payload, full)
    return partial, errors, full


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize("codec", [BlockCodec(8), BlockCodec(4), CastCodec()], ids=lambda codec: codec.name)
def test_all_slices_at_once_have_the_bits_of_each(codec: Any, alike: bool, memory: bool, request: Any) -> None:
    expected = sides(EncodedSlices(codec, CUTS, BORDERS, alike), memory)
    request.getfixturevalue("in_torch")
    actual = sides(EncodedSlices(codec, CUTS, BORDERS, alike), memory)
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    assert not torch.equal(expected[2], torch.zeros(CUTS[-1]))


def test_slices_that_are_alike_have_one_length() -> None:
    cuts = EncodedSlices(BlockCodec(), CUTS, BORDERS, True).byte_cuts
    lengths = {stop - start for start, stop in itertools.pairwise(cuts)}
    assert lengths == {768}  # three blocks of 701 elements, in units of 64 bytes


def test_time_and_errors_of_all_slices_are_logged(in_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    comms_logger.reset()
    monkeypatch.setattr(comms_logger, "enabled", True)
    monkeypatch.setattr(comms_logger, "prof_all", True)
    encoded.error_sample.take()
    sides(EncodedSlices(BlockCodec(), CUTS, BORDERS), True)
    row = comms_logger.encoded["reduce"]
    assert row.count == 3 and row.bytes_before == 4 * CUTS[-1] and row.milliseconds > 0  # an empty slice is no message
    assert 0 < row.relative_error < 0.01
    sampled = encoded.error_sample.take()
    assert sampled is not None and 0 < sampled < 0.01
    comms_logger.reset()


@pytest.mark.parametrize("own", [0, 2, None])
def test_contributions_at_equal_distances_are_seen(own: int | None) -> None:
    whole, plain = torch.zeros(3 * 128, dtype=torch.uint8), torch.zeros(5)
    parts = [plain if rank == own else whole[rank * 128 :][:100] for rank in range(3)]
    stacked = Parts.of(parts, 100)
    assert stacked is not None and stacked.count == 3 and stacked.stride == 128
    assert stacked.own == (-1 if own is None else own) and (stacked.values is plain) == (own is not None)
    assert stacked.payload.data_ptr() == whole.data_ptr()


def test_contributions_elsewhere_are_not() -> None:
    whole, plain = torch.zeros(512, dtype=torch.uint8), torch.zeros(5)
    other = torch.zeros(100, dtype=torch.uint8)
    for parts in (
        [plain, plain, whole[:100]],  # two plain ones
        [whole[:100], plain],  # one distance cannot be seen
        [whole[:100], whole[128:228], other],  # another tensor
        [whole[:100], whole[128:228], whole[260:360]],  # another distance
        [whole[:100], whole[64:164]],  # they overlap
        [plain, whole[:100], whole[128:228]],  # the first would be before the tensor
    ):
        assert Parts.of(parts, 100) is None


class Fake:
    """Kernels that only note their launches."""

    def __init__(self, names: set[str]) -> None:
        self.names, self.prepared, self.launches = names, [], []

    def has(self, variant: Any) -> bool:
        return variant.kernel in self.names

    def prepare(self, variants: Any) -> None:
        self.prepared += variants

    def launch(self, variant: Any, grid: Any, arguments: Any) -> None:
        self.launches.append((variant.name, grid, arguments))


@pytest.fixture
def no_kernels() -> Iterator[None]:
    with block_table.kernels.replaced(None):
        yield


def test_kernels_are_used_where_they_are_built(no_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake({"encode_blocks", "decode_blocks"})
    monkeypatch.setattr(load, "load_kernels", lambda device: fake)
    blocks.use_block_kernels(torch.device("cpu"))
    assert block_table.kernels.current is None
    blocks.use_block_kernels(torch.device("cuda", 0))
    assert len(fake.prepared) == 18  # of 24: sums were not built
    table = BlockTable(8, 256, [([300, 1], 0, 0)])
    values, payload = torch.empty(301, dtype=torch.bfloat16), torch.empty(table.nbytes, dtype=torch.uint8)
    launcher = block_table.kernels.current
    assert isinstance(launcher, blocks.BlockKernelLauncher)
    assert launcher.encode(table, values, payload, torch.empty_like(values), 0.5)
    assert launcher.decode(table, payload, values)
    names = [name for name, _, _ in fake.launches]
    assert names == [
        "encode_blocks_bf16_block256_rows4_bits8_memory1", "decode_blocks_bf16_block256_rows4_bits8",
    ]  # fmt: skip
    assert [grid for _, grid, _ in fake.launches] == [(1, 1, 1)] * 2
    assert not launcher.encode(table, values, payload, torch.empty(301), 0.5)  # memory of another dtype
    assert not launcher.decode(BlockTable(8, 64, [([300], 0, 0)]), payload, values)  # another size of blocks
    assert len(fake.launches) == 2


@pytest.mark.parametrize("reason", [CheckpointCorruptError("damaged"), AssertionError("no CUDA"), None])
def test_without_kernels_a_line_says_so(
    no_kernels: None, monkeypatch: pytest.MonkeyPatch, reason: Exception | None
) -> None:
    def load_kernels(device: torch.device) -> Fake:
        if reason is not None:
            raise reason
        return Fake({"norm_rows"})

    monkeypatch.setattr(load, "load_kernels", load_kernels)
    with said() as lines:
        blocks.use_block_kernels(torch.device("cuda", 0))
    assert block_table.kernels.current is None
    assert f"by torch operators, many small ones: {reason or 'the built kernels lack'}" in "".join(lines)


def test_bytes_of_launches_by_formula() -> None:
    values, memory = torch.empty(1024, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.bfloat16)
    payload, out = torch.empty(1, dtype=torch.uint8), torch.empty(1024)
    rows, scales = [out] * 4 + [4], payload
    encode, decode, total = (block_variant(name, torch.bfloat16, 4, name == "encode_blocks")
                             for name in ("encode_blocks", "decode_blocks", "sum_blocks"))  # fmt: skip
    assert encode is not None and decode is not None and total is not None
    once = 512 + 4 * 2  # codes and scales
    assert blocks.traffic(encode, (values, memory, payload, scales, *rows, 0.5, 0.5)) == 64 + 3 * 2048 + once
    assert blocks.traffic(decode, (payload, scales, values, *rows)) == 64 + 2048 + once
    numbers = (8, 3, 576, 1.0, 1)
    assert blocks.traffic(total, (payload, scales, values, out, *rows, *numbers)) == 64 + 7 * once + 2048 + 2 * 4096
    assert len({variant.name for variant in block_variants()}) == 24
