"""The stream of samples over kills and other numbers of ranks: each global batch equals that of a run without kills."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

from deepspeed.data.dynamic_batches import TokenBatchSampler
from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.data.mixture import Mixture
from deepspeed.errors import ArgumentError, DataError

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


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"carry_last": True}], ids=["pad", "drop", "carry"])
@pytest.mark.parametrize("kind", ["numbers", "stream"])
def test_a_rewind_goes_back_over_ends_of_epochs(kind: str, options: dict[str, bool]) -> None:
    draw = random.Random(5)
    for _ in range(60):
        size, batch, steps = draw.randint(1, 40), draw.randint(1, 12), draw.randint(1, 12)
        if options.get("drop_last") and size < batch:
            continue
        loader = DeepSpeedDataLoader(dataset(kind, size), batch, collate_fn=list, **options)
        batches = RepeatingLoader(loader)
        read = [next(batches) for _ in range(steps)]
        back = draw.randint(1, steps)
        if kind == "stream" and loader.epoch < 2:  # its length is not known before its end
            back = min(back, loader.state_dict()["seen"] // batch)
        loader.rewind(back, batch, 1)
        assert [next(batches) for _ in range(back)] == read[steps - back :]


def test_streams_that_divide_themselves_among_readers_have_one_order() -> None:
    source = pytest.importorskip("datasets").Dataset.from_dict({"n": list(range(30))})
    stream = source.to_iterable_dataset(num_shards=3).shuffle(seed=1, buffer_size=4)

    def samples(workers: int) -> list[int]:
        loader = DeepSpeedDataLoader(stream, 2, collate_fn=list, num_workers=workers)
        return [sample["n"] for _ in range(2) for batch in loader for sample in batch]

    assert samples(0) == samples(1) and len(samples(0)) == 60


def test_a_stream_needs_a_new_reader_in_each_pass() -> None:
    loader = DeepSpeedDataLoader(Stream(9), 2, num_workers=1, persistent_workers=True, collate_fn=list)
    loader.load_state_dict({"epoch": 0, "seen": 4})
    passes = [[sample for batch in loader for sample in batch] for _ in range(3)]
    assert [len(samples) for samples in passes] == [5, 9, 9] and passes[1] != passes[2]


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (dict(rank=1), ArgumentError, "pass both"),
        (dict(rank=5, world=2), ArgumentError, "rank 5 of world 2"),
        (dict(in_order=False, num_workers=2), DataError, "in any order"),
        (dict(sampler=iter([1])), DataError, "has no length"),
    ],
)
def test_wrong_arguments(arguments: dict, kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        DeepSpeedDataLoader(Numbers(10), 2, **arguments)


def test_a_position_of_another_unit_is_refused() -> None:
    tokens = DeepSpeedDataLoader(Numbers(10), 2, sampler=TokenBatchSampler([3] * 10, 6))
    with pytest.raises(DataError, match="counts micro-batches and this loader samples"):
        DeepSpeedDataLoader(Numbers(10), 2).load_state_dict(tokens.state_dict())


def test_a_rank_far_beyond_a_tiny_dataset_gets_a_repeated_sample() -> None:
    loaders = [DeepSpeedDataLoader(Numbers(2), 1, rank=r, world=2000) for r in (0, 1, 1999)]
    assert [batch.tolist() for loader in loaders for batch in loader] in ([[0], [1], [1]], [[1], [0], [0]])


def test_the_last_indices_are_what_was_handed_out() -> None:
    loader = DeepSpeedDataLoader(Numbers(10), 4, shuffle=False)
    assert [loader.last_indices() for _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert loader.last_indices() == []


@pytest.mark.parametrize("order", ["random", "dataloader", "bucketed", "seqlen"])
def test_token_batches_go_on_with_other_ranks_and_steps(order: Any) -> None:
    lengths = [random.Random(seed).randint(1, 30) for seed in range(200)]

    def loaders(world: int, accumulation: int) -> list[DeepSpeedDataLoader]:
        samplers = [TokenBatchSampler(lengths, 60, r, world, accumulation, order=order) for r in range(world)]
        return [
            DeepSpeedDataLoader(Numbers(200), 1, rank=r, world=world, sampler=sampler, collate_fn=list)
            for r, sampler in enumerate(samplers)
        ]

    for shapes in ([(4, 8), (1, 1)], [(1, 1), (4, 8)], [(4, 2), (3, 2), (2, 1)], [(1, 4), (2, 2), (4, 1)]):
        state, samples = None, list[int]()
        for number, (world, accumulation) in enumerate(shapes):
            together = loaders(world, accumulation)
            for loader in together:
                if state is not None:
                    loader.load_state_dict(state)
            passes = [iter(loader) for loader in together]
            last = number == len(shapes) - 1
            for _ in range(1000 if last else accumulation):
                batches = [next(batches, None) for batches in passes]
                if batches[0] is None:
                    assert batches == [None] * world
                    break
                samples += [sample for batch in batches if batch is not None for sample in batch]
            state = together[0].state_dict()
        assert sorted(samples) == list(range(200)), shapes


def test_what_remains_counts_from_where_the_next_pass_begins() -> None:
    loader = DeepSpeedDataLoader(Numbers(10), 4, carry_last=True)
    for left in (3, 2, 3):
        assert loader.remaining() == left and len(loader) == 3
        batches = iter(loader)
        for number in range(left):
            next(batches)
            assert loader.remaining() == left - number - 1
        assert next(batches, None) is None


def test_the_size_of_a_step_is_that_of_the_batches_after_a_change_of_ranks() -> None:
    lengths = [random.Random(seed).randint(1, 30) for seed in range(200)]
    first = DeepSpeedDataLoader(Numbers(200), 1, rank=0, world=4, sampler=TokenBatchSampler(lengths, 60, 0, 4, 2))
    batches = iter(first)
    for _ in range(2):
        next(batches)
    sampler = TokenBatchSampler(lengths, 60, 0, 1, 3)
    loader = DeepSpeedDataLoader(Numbers(200), 1, rank=0, world=1, sampler=sampler, collate_fn=list)
    loader.next_step_size()
    loader.load_state_dict(first.state_dict())
    passes = iter(loader)
    while loader.remaining():
        announced = loader.next_step_size()
        assert announced == sum(len(next(passes)) for _ in range(3))


def test_batches_of_tokens_in_which_no_sample_fits_are_refused() -> None:
    with pytest.raises(DataError, match="none of 5 samples is in a micro-batch of 4 tokens"):
        TokenBatchSampler([9] * 5, 4)
