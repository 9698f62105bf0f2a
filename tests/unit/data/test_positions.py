"""The stream of samples over kills and other numbers of ranks: each global batch equals that of a run without kills."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.data.mixture import Mixture
from deepspeed.errors import DataError

GLOBAL_BATCH = 12


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(index)


class Stream(IterableDataset):
    """A stream with another order in each epoch, as `datasets` has them."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.epoch).shuffle(order)
        return iter(order)


def dataset(kind: str, size: int) -> Any:
    if kind == "mixture":
        return Mixture([Numbers(size // 3), Numbers(size - size // 3)], [1, 3], by="samples")
    return Stream(size) if kind == "stream" else Numbers(size)


class Run:
    """Loaders of all ranks, read batch by batch."""

    def __init__(self, data: Any, world: int, workers: int, state: dict[str, int] | None, **options: Any) -> None:
        self.loaders = [
            DeepSpeedDataLoader(
                data, GLOBAL_BATCH // world, rank=rank, world=world, num_workers=workers, collate_fn=list, **options
            )
            for rank in range(world)
        ]
        for loader in self.loaders:
            if state is not None:
                loader.load_state_dict(state)
        self.passes = [iter(loader) for loader in self.loaders]

    def step(self) -> list[int]:
        """The samples of one global batch, sorted."""
        samples: list[int] = []
        for rank, batches in enumerate(self.passes):
            batch = next(batches, None)
            if batch is None:  # the pass has ended: on all ranks at once
                assert rank == 0
                assert all(next(other, None) is None for other in self.passes[1:])
                self.passes = [iter(loader) for loader in self.loaders]
                return self.step()
            samples += batch
        return sorted(samples)

    def state(self) -> dict[str, int]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["numbers", "mixture", "stream"])
@pytest.mark.parametrize("size", [60, 47, 7])
def test_every_global_batch_is_that_of_a_run_without_kills(kind: str, size: int, workers: int) -> None:
    data = dataset(kind, size)
    steps, draw = 26, random.Random(size)
    whole = Run(data, 1, 0, None, carry_last=True)
    expected = [whole.step() for _ in range(steps)]
    if kind != "mixture":  # every sample once an epoch
        counts = Counter(sample for batch in expected for sample in batch)
        assert max(counts.values()) - min(counts[sample] for sample in range(size)) <= 1
    kills = [draw.randrange(1, 8) for _ in range(4)] if workers else sorted(draw.choices(range(1, 8), k=8))
    taken: list[list[int]] = []
    state, worlds = None, [1, 2, 4, 3]
    for number, length in enumerate(kills):
        run = Run(data, worlds[number % 4], workers, state, carry_last=True)
        for _ in range(min(length, steps - len(taken))):
            taken.append(run.step())
        state = run.state()
        del run
    assert taken == expected[: len(taken)] and len(taken) > 10


@pytest.mark.parametrize("size", [60, 47])
def test_without_carrying_over_nothing_is_lost_within_an_epoch(size: int) -> None:
    data, state = Numbers(size), None
    samples: list[int] = []
    for world, batches in ((1, 1), (2, 1), (4, 1), (3, 100)):
        loaders = [DeepSpeedDataLoader(data, GLOBAL_BATCH // world, rank=r, world=world) for r in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        passes = [iter(loader) for loader in loaders]
        for _ in range(batches):
            together = [next(batch, None) for batch in passes]
            samples += [sample for batch in together if batch is not None for sample in batch.tolist()]
        state = loaders[0].state_dict()
    assert set(samples) == set(range(size)) and len(samples) - size < 3


def test_a_pass_that_carries_over_has_whole_batches_only() -> None:
    loader = DeepSpeedDataLoader(Numbers(10), 4, carry_last=True)
    passes = [[len(batch) for batch in loader] for _ in range(4)]
    assert passes == [[4, 4, 4], [4, 4], [4, 4, 4], [4, 4]]
    assert loader.state_dict() == {"epoch": 4, "seen": 0, "samples": 10}
    again = [batch.tolist() for batch in loader]
    loader.set_epoch(4)  # another epoch than the next one: from its beginning
    assert [batch.tolist() for batch in loader] == again
    assert loader.state_dict() == {"epoch": 5, "seen": 2, "samples": 10}
    loader.set_epoch(5)  # the next one: it goes on
    assert len(next(iter(loader))) == 4 and loader.state_dict()["seen"] == 6


@pytest.mark.parametrize("workers", [0, 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_stream_is_read_once_whatever_the_number_of_processes(workers: int) -> None:
    loader = DeepSpeedDataLoader(Stream(9), 2, collate_fn=list, num_workers=workers)
    passes = [[sample for batch in loader for sample in batch] for _ in range(2)]
    assert [sorted(samples) for samples in passes] == [list(range(9))] * 2 and passes[0] != passes[1]


def test_another_number_of_samples_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    loader = DeepSpeedDataLoader(Numbers(10), 2)
    loader.load_state_dict({"epoch": 1, "seen": 4, "samples": 12})
    assert "the dataset has 10 samples, and had 12" in "".join(capfd.readouterr())
    assert loader.state_dict() == {"epoch": 1, "seen": 4, "samples": 10}


def test_dropping_and_carrying_exclude_each_other() -> None:
    with pytest.raises(DataError, match="exclude each other"):
        DeepSpeedDataLoader(Numbers(10), 2, drop_last=True, carry_last=True)


def test_an_empty_stream_that_is_carried_over_ends() -> None:
    assert list(DeepSpeedDataLoader(Stream(0), 2, carry_last=True)) == []
