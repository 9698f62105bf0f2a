"""The distributed loader, the repeating one, and loops of equal length; ranks are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.engine.metrics import tokens_in
from deepspeed.engine.train_loop import count_samples, equal_steps
from deepspeed.errors import DataError


class Numbers(Dataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        return iter(range(self.size))


def read(loader: Iterable[torch.Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_an_epoch(world: int) -> None:
    loaders = [DeepSpeedDataLoader(Numbers(12), 2, rank=rank, world=world) for rank in range(world)]
    first = [flat(read(loader)) for loader in loaders]
    assert sorted(flat(first)) == list(range(12))
    second = [flat(read(loader)) for loader in loaders]
    assert sorted(flat(second)) == list(range(12)) and first != second
    loaders[0].set_epoch(0)
    assert flat(read(loaders[0])) == first[0]
    assert flat(read(loaders[0])) == second[0]
    assert {len(loader) for loader in loaders} == {12 // world // 2}


def test_order_and_last_batch() -> None:
    def made(**arguments: Any) -> list[list[list[int]]]:
        return [read(DeepSpeedDataLoader(Numbers(9), 2, rank=r, world=2, shuffle=False, **arguments)) for r in (0, 1)]

    assert made() == [[[0, 2], [4, 6], [8]], [[1, 3], [5, 7], [0]]]
    assert made(drop_last=True) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def test_arguments_reach_the_loader() -> None:
    loader = DeepSpeedDataLoader(Numbers(4), 2, sampler=torch.utils.data.SequentialSampler(Numbers(4)), collate_fn=sum)
    assert list(loader) == [1, 5]
    assert (loader.batch_size, loader.dataset.size) == (2, 4)


def test_a_stream_is_split_by_position_into_equal_shares() -> None:
    shares = [read(DeepSpeedDataLoader(Stream(8), 2, rank=rank, world=3)) for rank in range(3)]
    assert shares == [[[0, 3]], [[1, 4]], [[2, 5]]]
    assert read(DeepSpeedDataLoader(Stream(3), 2)) == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: DeepSpeedDataLoader(DataLoader(Numbers(4)), 2), "pass its dataset"),
        (lambda: DeepSpeedDataLoader(Numbers(0), 2), "no samples"),
        (lambda: DeepSpeedDataLoader(Numbers(3), 2, rank=0, world=2, drop_last=True), "no rank gets a full batch"),
        (lambda: DeepSpeedDataLoader(Stream(3), 2, sampler=[0]), "chooses indices"),
    ],
)
def test_loader_errors(make: Callable[[], object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        make()


def test_repeating_loader() -> None:
    batches = RepeatingLoader(DeepSpeedDataLoader(Numbers(4), 2))
    epochs = [flat([next(batches).tolist(), next(batches).tolist()]) for _ in range(8)]
    assert all(sorted(epoch) == [0, 1, 2, 3] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert iter(batches) is batches
    once = RepeatingLoader(iter([1]))
    assert next(once) == 1
    with pytest.raises(DataError, match="iterator or generator"):
        next(once)


def test_count_samples() -> None:
    @dataclass
    class Batch:
        names: list[str]
        inputs: torch.Tensor

    tensor = torch.zeros(3, 2)
    nests = [tensor, {"a": "x", "b": [tensor]}, ("x", (tensor,)), Batch(["x"], tensor), {"x": tensor.numpy()}]
    assert [count_samples(nest) for nest in nests] == [3, 3, 3, 3, 3]
    assert [count_samples(nest) for nest in (torch.tensor(1.0), "x", {})] == [1, 1, 1]


def on_ranks(loaders: list[Iterable[Any]], policy: str) -> tuple[list[Any], int]:
    """What each rank's loop did, (value, weight) for each step or the error that ended it, and the exchanges made."""
    world = len(loaders)
    barrier = threading.Barrier(world)
    flags = [0] * world
    exchanges = [0] * world
    results: list[Any] = [None] * world

    def rank_main(rank: int) -> None:
        weights: list[float] = []

        def agree(flag: int) -> tuple[int, int]:
            flags[rank] = flag
            exchanges[rank] += 1
            barrier.wait(10)
            agreed = min(flags), max(flags)
            barrier.wait(10)
            return agreed

        try:
            steps = equal_steps(loaders[rank], agree=agree, policy=policy, weigh=weights.append)
            results[rank] = [(batch[0].item(), weights[-1]) for batch in steps]
        except Exception as problem:
            results[rank] = problem

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(set(exchanges)) == 1
    return results, exchanges[0]


def batches(count: int, size: int = 2) -> list[torch.Tensor]:
    return [torch.full((size,), index) for index in range(count)]


def test_drop_ends_with_the_shortest() -> None:
    results, exchanges = on_ranks([batches(4), batches(8), batches(4)], "drop")
    assert results == [[(i, 2.0) for i in range(4)]] * 3
    assert exchanges == 5


def test_pad_repeats_the_last_batch_with_no_weight() -> None:
    results, exchanges = on_ranks([batches(2), batches(4, size=3)], "pad")
    assert results == [[(0, 2.0), (1, 2.0), (1, 0.0), (1, 0.0)], [(i, 3.0) for i in range(4)]]
    assert exchanges == 5


def test_cycle_starts_again() -> None:
    results, exchanges = on_ranks([batches(2), batches(5), batches(5)], "cycle")
    assert results[0] == [(i, 2.0) for i in (0, 1, 0, 1, 0)]
    assert results[1] == results[2] == [(i, 2.0) for i in range(5)]
    assert exchanges == 7  # five steps, the end, and one when the first rank started again


@pytest.mark.parametrize("policy", ["drop", "pad", "cycle"])
def test_equal_loaders_are_read_once(policy: str) -> None:
    results, exchanges = on_ranks([batches(3), batches(3)], policy)
    assert results == [[(i, 2.0) for i in range(3)]] * 2
    assert exchanges == 4


@pytest.mark.parametrize("policy", ["drop", "pad", "cycle"])
def test_an_empty_loader_ends_all_ranks_by_name(policy: str) -> None:
    results, _ = on_ranks([batches(3), []], policy)
    assert all(isinstance(result, DataError) for result in results)
    assert "another rank gives no batch" in str(results[0]) and "this rank gives no batch" in str(results[1])


@pytest.mark.parametrize("policy", ["drop", "pad", "cycle"])
def test_a_failing_loader_ends_all_ranks(policy: str) -> None:
    def broken() -> Iterable[torch.Tensor]:
        yield from batches(2)
        raise OSError("disk gone")

    results, _ = on_ranks([batches(5), broken(), batches(1) if policy != "drop" else batches(5)], policy)
    assert isinstance(results[1], OSError)
    assert isinstance(results[0], DataError) and "another rank failed at batch 2" in str(results[0])


def test_cycling_an_iterator_fails_on_all_ranks() -> None:
    results, _ = on_ranks([iter(batches(2)), batches(5)], "cycle")
    assert "gives no batch when started again" in str(results[0])
    assert "another rank failed" in str(results[1])


def test_unknown_policy() -> None:
    with pytest.raises(DataError, match="did you mean 'drop'"):
        list(equal_steps([], agree=lambda flag: (flag, flag), policy="dorp", weigh=print))


@pytest.mark.parametrize(("world", "other"), [(2, 2), (2, 3), (4, 1)])
@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_pass_goes_on_from_a_saved_position(kind: Any, world: int, other: int) -> None:
    before = [DeepSpeedDataLoader(kind(24), 2, rank=r, world=world) for r in range(world)]
    passes = [iter(loader) for loader in before]
    first = flat([next(batches).tolist() for batches in passes])
    state = before[0].state_dict()
    assert state == {"epoch": 0, "seen": 2 * world} | ({"samples": 24} if kind is Numbers else {})
    after = [DeepSpeedDataLoader(kind(24), 2, rank=r, world=other) for r in range(other)]
    for loader in after:
        loader.load_state_dict(state)
    rest = [flat(read(loader)) for loader in after]
    if kind is Numbers:  # the last round is filled up; a stream drops it
        assert set(first + flat(rest)) == set(range(24)) and len(first + flat(rest)) - 24 < other
    if world == other:
        assert rest == [flat([batch.tolist() for batch in batches]) for batches in passes]
    assert sorted(flat([flat(read(loader)) for loader in after])) == list(range(24 // other * other))


def test_positions() -> None:
    loader = DeepSpeedDataLoader(Numbers(8), 2)
    batches = RepeatingLoader(loader)
    seen = [next(batches).tolist() for _ in range(6)]
    assert loader.state_dict() == {"epoch": 1, "seen": 4, "samples": 8}
    loader.rewind(1, 2, 1)
    assert next(batches).tolist() == seen[5]  # the pass under way goes back too
    loader.rewind(3, 2, 1)
    assert [next(batches).tolist() for _ in range(3)] == seen[3:]
    loader.load_state_dict({"epoch": 0, "seen": 8})
    assert next(batches).tolist() == seen[4]  # that epoch is over
    assert len(loader) == 4
    own = DeepSpeedDataLoader(Numbers(4), 1, sampler=torch.utils.data.SequentialSampler(Numbers(4)))
    own.load_state_dict({"epoch": 0, "seen": 3})
    assert read(own) == [[3]] and read(own) == [[0], [1], [2], [3]]


def test_a_resumed_pass_draws_no_random_number() -> None:
    loader = DeepSpeedDataLoader(Numbers(8), 2)
    loader.load_state_dict({"epoch": 0, "seen": 2})
    before = torch.get_rng_state()
    next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_tokens_are_those_of_the_ids_whatever_stands_before_them() -> None:
    ids, mask = torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 9, 9, dtype=torch.bool)
    assert (
        tokens_in([ids]) == tokens_in([mask, torch.ones(2, 3), ids]) == tokens_in([{"mask": mask}, {"ids": ids}]) == 10
    )
    assert tokens_in([mask, torch.ones(2, 3), torch.zeros(2, dtype=torch.long)]) == 0
