"""Orders and mixtures: permutations, shares at every position, parts that equal the whole."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from deepspeed.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from deepspeed.data.mixture import Mixture
from deepspeed.data.positions import OrderedPosition
from deepspeed.data.sample_order import ComputedPermutation, EpochOrder
from deepspeed.errors import ArgumentError, DataError


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 1000, 65_537])
def test_a_computed_permutation_is_one(count: int) -> None:
    orders = [ComputedPermutation(count, 7, epoch)(np.arange(count)) for epoch in (0, 1)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(count))
    part = np.array([count - 1, 0, count // 2])
    assert np.array_equal(ComputedPermutation(count, 7, 1)(part), orders[1][part])
    assert count < 64 or not np.array_equal(*orders)


def test_a_computed_permutation_looks_random() -> None:
    order = ComputedPermutation(100_000, 1)(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 0.02
    # where samples 0 and 1 stand, over keys: as often before as after each other
    firsts = [ComputedPermutation(10, key)(np.arange(10)) for key in range(2000)]
    before = np.mean([np.flatnonzero(order == 0)[0] < np.flatnonzero(order == 1)[0] for order in firsts])
    assert abs(before - 0.5) < 0.05
    places = np.bincount([int(order[0]) for order in firsts], minlength=10)
    assert ((places - 200) ** 2 / 200).sum() < 30  # chi-square with 9 degrees of freedom, p about 4e-4


@pytest.mark.parametrize(("samples", "world"), [(12, 3), (13, 3), (2, 5)])
@pytest.mark.parametrize("drop", [False, True])
def test_the_order_is_that_of_torch(samples: int, world: int, drop: bool) -> None:
    for epoch in (0, 3):
        for rank in range(world):
            theirs = DistributedSampler(range(samples), world, rank, seed=5, drop_last=drop)  # type: ignore[arg-type]
            theirs.set_epoch(epoch)
            ours = OrderedPosition(EpochOrder(samples, 5), rank, world, 1, "drop" if drop else "pad")
            ours.set_epoch(epoch)
            assert list(ours) == list(theirs) and len(ours) == len(theirs)


def test_parts_of_an_order_go_on_over_epochs() -> None:
    order = EpochOrder(5, 3)
    whole = np.concatenate([order.indices(epoch, 0, 5) for epoch in range(4)])
    assert np.array_equal(order.indices(0, 3, 17), whole[3:17])
    assert np.array_equal(order.indices(1, 0, 0), np.empty(0))


SHARES = ([0.5, 0.5], [0.7, 0.2, 0.1], [0.999, 0.001], [0.25] * 4, [0.0, 1.0], [1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize("weights", SHARES)
def test_shares_of_a_mixture_are_exact_at_every_position(weights: list[float]) -> None:
    mixture = Mixture([range(100 + 7 * i) for i in range(len(weights))], weights, by="samples")
    order = mixture.sample_order(seed=1, shuffle=True)
    sources = np.array([mixture.source_of(index) for index in order.indices(0, 0, 3000)])
    for source, share in enumerate(weights):
        taken = np.cumsum(sources == source)
        assert np.abs(taken - share * np.arange(1, 3001)).max() <= len(weights) / 2 + 1


@pytest.mark.parametrize("weights", SHARES)
def test_any_part_of_a_mixture_equals_the_whole(weights: list[float]) -> None:
    mixture = Mixture([range(11 + 7 * i) for i in range(len(weights))], weights, by="samples")
    order = mixture.sample_order(seed=1, shuffle=True)
    whole = order.indices(0, 0, 2000)
    draw = np.random.default_rng(0)
    for start in draw.integers(0, 1990, 60).tolist():
        stop = start + int(draw.integers(1, 10))
        assert np.array_equal(order.indices(0, start, stop), whole[start:stop])
    far = 10**12 // len(order)
    near = order.indices(far, 0, 50)
    assert np.array_equal(np.concatenate([order.indices(far, p, p + 1) for p in range(50)]), near)


def test_a_source_is_read_whole_before_it_starts_again() -> None:
    mixture = Mixture({"small": range(4), "large": range(1000)}, {"small": 0.5, "large": 0.5}, by="samples")
    order = mixture.sample_order(seed=1, shuffle=True)
    indices = order.indices(0, 0, 64)
    small = indices[indices < 4]
    assert len(small) == 32
    rounds = small.reshape(8, 4)
    assert all(sorted(samples) == [0, 1, 2, 3] for samples in rounds.tolist())
    assert len({tuple(samples) for samples in rounds.tolist()}) > 2
    plain = mixture.sample_order(seed=1, shuffle=False).indices(0, 0, 6).tolist()
    assert plain == [0, 4, 1, 5, 2, 6]


def indexed(path: str, lengths: list[int]) -> MMapIndexedDataset:
    builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize(f"{path}.idx")
    return MMapIndexedDataset(path)


def test_shares_of_tokens(tmp_path) -> None:
    long, short = indexed(f"{tmp_path}/long", [90, 110]), indexed(f"{tmp_path}/short", [10] * 40)
    mixture = Mixture([long, short], [0.5, 0.5])
    indices = mixture.sample_order(0, True).indices(0, 0, 1100)
    tokens = np.array([len(mixture[index]) for index in indices])
    share = tokens[indices < 2].sum() / tokens.sum()
    assert abs(share - 0.5) < 0.01
    by_size = Mixture([long, short]).weights
    assert np.allclose(by_size, [1 / 3, 2 / 3])
    assert np.allclose(Mixture([long, short], temperature=2).weights, np.array([1, 2**0.5]) / (1 + 2**0.5))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (dict(sources=[]), "needs sources"),
        (dict(sources={"a": [1], "b": []}), "empty: b"),
        (dict(sources=[[1], [2]]), "number of tokens of source 0, source 1 is unknown"),
        (dict(sources=[[1], [2]], by="samples", weights=[1, -1]), "at least 0"),
        (dict(sources=[[1], [2]], by="samples", weights=[1, float("nan")]), "at least 0"),
        (dict(sources=[[1], [2]], by="samples", weights=[1]), "1 weights for 2 sources"),
        (dict(sources=[[1], [2]], by="samples", temperature=0), "number above 0"),
        (
            dict(sources={"a": [1], "b": [2]}, by="samples", weights={"a": 1, "c": 2}),
            r"unknown \['c'\], missing \['b'\]",
        ),
        (dict(sources=[[1], [2]], by="bytes"), "tokens' or 'samples"),
        (dict(sources=[[1], [2]], tokens=[1]), "1 numbers for 2"),
    ],
)
def test_wrong_mixtures(arguments: dict, text: str) -> None:
    with pytest.raises((ArgumentError, DataError), match=text):
        Mixture(**arguments)


MEMORY = """
import sys, time
import numpy, torch
from torch.utils.data import DistributedSampler
from deepspeed.data.positions import OrderedPosition
from deepspeed.data.sample_order import EpochOrder

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

kind, count = sys.argv[1], int(sys.argv[2])
torch.randperm(10, generator=torch.Generator())
before = kib("VmRSS:")
if kind == "order":
    indices = OrderedPosition(EpochOrder(count, 3), 0, 2, 4, "pad")
else:
    indices = DistributedSampler(range(count), 2, 0, seed=3)
began = time.perf_counter()
for _, index in zip(range(1_000_000), indices):
    assert index >= 0
print(f"{time.perf_counter() - began:.2f} s for a million indices", file=sys.stderr)
print((kib("VmHWM:") - before) / 1024)
"""


@pytest.mark.slow
def test_ten_million_samples_take_less_than_100_mb() -> None:
    def growth(kind: str, count: int) -> float:
        # a process of its own, and VmHWM: the peak of ru_maxrss is inherited from the parent
        program = [sys.executable, "-c", MEMORY, kind, str(count)]
        done = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
        return float(done.stdout)

    assert growth("order", 10_000_000) < 100
    assert growth("order", (1 << 25) + 1) < 40
    assert growth("sampler", 10_000_000) > 200  # torch's, as a control
