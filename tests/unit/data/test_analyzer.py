"""The analysis of a dataset, against files that this file writes by the format's table; workers that fail."""

from __future__ import annotations

import io
import itertools
import os
import signal
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed.data.analysis_files import check_ids
from deepspeed.data.analysis_map import Metric, sample_digest
from deepspeed.data.analyzer import DataAnalyzer, DistributedDataAnalyzer
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.data.metrics import SequenceLength, TokenCounts, VocabularyRarity
from deepspeed.errors import ArgumentError, DataError, UsageError
from deepspeed.foundation.progress_line import CountLine

SINGLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"
CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 6, "u4": 7, "u8": 8}
VOCABULARY = 50
ENDS = ("bin", "idx")


# -- what the files must be, by the table --------------------------------------------------------------------------


def pair(rows: list[list[int]], documents: list[int]) -> tuple[bytes, bytes]:
    """Bytes of `.bin` and `.idx`, of the smallest dtype."""
    low, high = (bound(itertools.chain(*rows)) for bound in (min, max))
    dtype = next(
        name for name in (("u1", "u2", "u4", "u8") if low >= 0 else ("i1", "i2", "i4", "i8"))
        if np.iinfo(name).min <= low and high <= np.iinfo(name).max
    )  # fmt: skip
    lengths, size = [len(row) for row in rows], np.dtype(dtype).itemsize
    offsets = [sum(lengths[:row]) * size for row in range(len(rows))]
    numbers = f"<{len(rows)}i{len(rows)}q{len(documents)}q"
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(rows), len(documents))
    return np.array(list(itertools.chain(*rows)), dtype).tobytes(), head + struct.pack(
        numbers, *lengths, *offsets, *documents
    )


def single_files(name: str, values: list[int], ids: list[int]) -> dict[str, bytes]:
    distinct = sorted(set(values))
    groups = [[sample for sample, value in zip(ids, values, strict=True) if value == row] for row in distinct]
    step = max(1, len(distinct) // 100)
    merged = [sum(groups[start : start + step], []) for start in range(0, len(groups), step)]
    rows = {
        "sample_to_metric": [[value] for value in values],
        "index_to_metric": [[value] for value in distinct],
        "index_to_sample": groups,
        "index_to_sample_percentile_merged": merged,
    }
    pairs = {key: pair(part, [0, len(part)] + [len(part)] * ("merged" not in key)) for key, part in rows.items()}
    return {f"{name}_{key}.{end}": data for key, both in pairs.items() for end, data in zip(ENDS, both, strict=True)}


def sum_files(name: str, total: list[int]) -> dict[str, bytes]:
    return {f"{name}_metric_value.{end}": data for end, data in zip(ENDS, pair([total], [0, 1]), strict=True)}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- datasets ------------------------------------------------------------------------------------------------------


def tokens_of(batch: Any) -> torch.Tensor:
    return batch["tokens"] if isinstance(batch, dict) else batch[0] if isinstance(batch, (tuple, list)) else batch


def largest(batch: Any) -> torch.Tensor:
    return tokens_of(batch).amax(1)


def histogram(batch: Any) -> torch.Tensor:
    return torch.bincount(tokens_of(batch).flatten(), minlength=VOCABULARY)


def stacked(samples: list[Any]) -> dict[str, Any]:
    return {"tokens": torch.stack(samples), "count": len(samples), "name": "a batch"}


KINDS = ("tensor", "tuple", "dict", "index", "permuted index", "ids", "far ids", "collate")


def make(kind: str, samples: int) -> tuple[list[Any], dict[str, Any], list[int], torch.Tensor]:
    """Dataset, arguments, ids, and tokens [samples, 3]."""
    draw = torch.Generator().manual_seed(samples)
    tokens = torch.randint(0, VOCABULARY, (samples, 3), generator=draw)
    ids, arguments, rows = list(range(samples)), {}, list(tokens)
    if kind in ("permuted index", "ids"):
        ids = torch.randperm(samples, generator=draw).tolist()
    if kind == "far ids":
        ids = [2**40 + 3 * position for position in range(samples)]
    if kind in ("ids", "far ids"):
        arguments["sample_indices"] = ids
    if kind == "collate":
        arguments["collate_fn"] = stacked
    dataset: list[Any] = {
        "tuple": [(row, row.sum(), torch.zeros(2)) for row in rows],
        "dict": [{"tokens": row, "mask": row > 0, "labels": row} for row in rows],
        "index": [{"index": torch.tensor([position]), "tokens": row} for position, row in enumerate(rows)],
        "permuted index": [{"tokens": row, "index": number} for number, row in zip(ids, rows, strict=True)],
    }.get(kind, rows)
    return dataset, arguments, ids, tokens


def analyzer(dataset: Any, folder: Path, **arguments: Any) -> DataAnalyzer:
    metrics = {
        "metric_names": ["a", "c"],
        "metric_functions": [largest, histogram],
        "metric_types": [SINGLE, ACCUMULATED],
        "metric_dtypes": [torch.int64, np.int64],
        "batch_size": 4,
    }
    return DataAnalyzer(dataset, save_path=folder, **(metrics | arguments))


def one(function: Any, dataset: Any, folder: Path, **arguments: Any) -> DataAnalyzer:
    """With one metric."""
    kind = arguments.pop("metric_types", [SINGLE])
    metric = {"metric_names": ["a"], "metric_functions": [function], "metric_types": kind}
    return analyzer(dataset, folder, **(metric | {"metric_dtypes": [torch.int64]} | arguments))


def expected(ids: list[int], tokens: torch.Tensor) -> dict[str, dict[str, bytes]]:
    total = torch.bincount(tokens.flatten(), minlength=VOCABULARY).tolist()
    return {"a": single_files("a", tokens.amax(1).tolist(), ids), "c": sum_files("c", total)}


CELLS = [(kind, workers, threads) for kind in KINDS for workers in (1, 2, 3, 4) for threads in (1, 3)]


@pytest.mark.drawn(6)
@pytest.mark.parametrize(("kind", "workers", "threads"), CELLS)
def test_files_are_those_of_the_table(kind: str, workers: int, threads: int, tmp_path: Path) -> None:
    dataset, arguments, ids, tokens = make(kind, 103)
    arguments |= {"num_workers": workers, "num_threads": threads}
    for worker in range(workers):
        analyzer(dataset, tmp_path, worker_id=worker, **arguments).run_map()
    assert len(os.listdir(tmp_path / "a")) == 2 * workers
    analyzer(dataset, tmp_path, **arguments).run_reduce()
    assert {name: files(tmp_path / name) for name in ("a", "c")} == expected(ids, tokens)
    assert len(os.listdir(tmp_path / "a")) == 8 and len(os.listdir(tmp_path / "c")) == 2


@pytest.mark.parametrize(
    ("samples", "values"),
    [
        (1, [7]),
        (256, list(range(256))),  # ids and values still fit uint8
        (257, list(range(257))),
        (401, [position * 3 for position in range(401)]),  # 101 rows of percentiles
        (199, [-position for position in range(199)]),
        (4, [2**62, -(2**62), 2**62 + 1, 2**53 + 1]),  # the difference does not fit int64
        (3, [2**62 + 1, -(2**62), 5 - 2**62]),
        (3, [2**63 - 1, 2**53 + 1, 0]),
    ],
)
def test_dtypes_and_percentiles(samples: int, values: list[int], tmp_path: Path) -> None:
    dataset = [torch.tensor(value) for value in values]
    one(lambda batch: batch, dataset, tmp_path).run_map_reduce()
    assert files(tmp_path / "a") == single_files("a", values, list(range(samples)))


def test_more_threads_than_samples(tmp_path: Path) -> None:
    dataset, _, ids, tokens = make("dict", 2)
    analyzer(dataset, tmp_path, num_threads=3).run_map_reduce()
    assert {name: files(tmp_path / name) for name in ("a", "c")} == expected(ids, tokens)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_processes(threads: int, tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 12)
    one(lambda batch: torch.full((len(batch),), os.getpid()), dataset, tmp_path, num_threads=threads).run_map_reduce()
    row = MMapIndexedDataset(tmp_path / "a" / "a_index_to_metric")
    pids = {int(row[position][0]) for position in range(len(row))}
    assert len(pids) == threads and (os.getpid() in pids) == (threads == 1)


def test_random_numbers_of_the_caller_are_left(tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 8)
    before = torch.get_rng_state()
    analyzer(dataset, tmp_path).run_map_reduce()
    assert torch.equal(torch.get_rng_state(), before)


# -- ranks ---------------------------------------------------------------------------------------------------------


def on_ranks(kind: str, folder: str, distributed: bool, threads: int) -> None:
    import deepspeed.comm as dist

    dataset, arguments, *_ = make(kind, 103)
    metrics: dict[str, Any] = {"metric_names": ["a", "c"], "metric_functions": [largest, histogram]}
    metrics |= {"metric_types": [SINGLE, ACCUMULATED], "batch_size": 4, "save_path": folder, "num_threads": threads}
    if distributed:
        DistributedDataAnalyzer(dataset, **metrics, **arguments, device="cpu").run_map_reduce()
        return
    place = {"num_workers": dist.get_world_size(), "worker_id": dist.get_rank()}
    DataAnalyzer(dataset, **place, **metrics, **arguments, metric_dtypes=[torch.int64] * 2).run_map_reduce()


@pytest.mark.parametrize(
    ("kind", "ranks", "distributed", "threads"),
    [
        ("far ids", 2, True, 2),
        ("dict", 2, False, 1),
        pytest.param("permuted index", 3, True, 1, marks=pytest.mark.slow),
        pytest.param("tuple", 3, False, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_write_the_same_files(
    kind: str, ranks: int, distributed: bool, threads: int, tmp_path: Path, workers: Any
) -> None:
    *_, ids, tokens = make(kind, 103)
    workers(ranks).run(on_ranks, kind, str(tmp_path), distributed, threads)
    assert {name: files(tmp_path / name) for name in ("a", "c")} == expected(ids, tokens)


def fails_on_a_rank(folder: str, distributed: bool, in_reduce: bool) -> str:
    import deepspeed.comm as dist

    def metric(batch: Any) -> Any:
        if dist.get_rank() == 1 and not in_reduce:
            raise KeyError("no such field")
        return batch["index"][:, 0]

    ids = [0] * 6 if in_reduce else list(range(6))
    dataset = [{"index": torch.tensor([number])} for number in ids]
    arguments: dict[str, Any] = {"metric_names": ["a"], "metric_functions": [metric], "metric_types": [SINGLE]}
    if distributed:
        analysis: Any = DistributedDataAnalyzer(dataset, save_path=folder, **arguments)
    else:
        arguments |= {"num_workers": 2, "worker_id": dist.get_rank(), "metric_dtypes": [torch.int64]}
        analysis = DataAnalyzer(dataset, save_path=folder, **arguments)
    try:
        analysis.run_map_reduce()
    except (KeyError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("distributed", [True, False])
def test_an_error_of_one_rank_is_raised_on_all(distributed: bool, tmp_path: Path, workers: Any) -> None:
    first, second = workers(2).run(fails_on_a_rank, str(tmp_path), distributed, False)
    assert first.startswith("DataError: rank 1 could not analyze its samples: KeyError") and second[:8] == "KeyError"
    first, second = workers(2).run(fails_on_a_rank, str(tmp_path), distributed, True)
    assert "5 ids are missing" in first and second.startswith("DataError: rank 0 could not") and first[11:] in second
    assert not list(tmp_path.glob("a/*metric*"))


def test_ranks_and_workers_contradict(without_group: None, alone: None, tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 8)
    with pytest.raises(UsageError, match="with 2 workers needs a process group"):
        analyzer(dataset, tmp_path, num_workers=2).run_map_reduce()
    metric: dict[str, Any] = {"metric_names": ["a"], "metric_functions": [largest], "metric_types": [SINGLE]}
    with pytest.raises(ArgumentError, match="worker_id 1 of num_workers 2, but this is rank 0 of 1"):
        DistributedDataAnalyzer(dataset, 2, worker_id=1, save_path=tmp_path, **metric)
    DistributedDataAnalyzer(dataset, save_path=tmp_path, **metric).run_map_reduce()
    assert len(os.listdir(tmp_path / "a")) == 8


# -- workers that fail ---------------------------------------------------------------------------------------------


def breaking(how: str, batch: Any) -> Any:
    if 0 in batch["index"]:  # of the first process; the others would never end
        if how == "raise":
            raise ValueError("a sample\nwithout tokens")
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
    time.sleep(100)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"worker 0, thread 0: without tokens \(test_analyzer.py:\d+, in breaking\)"),
        ("kill", "worker 0, thread 0: the process was killed by SIGKILL before it had analyzed its samples"),
        ("exit", "worker 0, thread 0: the process ended with exit code 3 before"),
    ],
)
def test_a_process_that_fails_ends_all(how: str, message: str, tmp_path: Path) -> None:
    dataset = [{"index": position} for position in range(6)]
    start = time.monotonic()
    analysis = one(partial(breaking, how), dataset, tmp_path, num_threads=3)
    with pytest.raises(DataError, match=message):
        analysis.run_map()
    assert time.monotonic() - start < 60
    with pytest.raises(DataError, match=r"worker 0 did not finish thread\(s\) 0, 1, 2"):
        analysis.run_reduce()


def test_workers_that_have_not_finished_are_named(tmp_path: Path) -> None:
    dataset, arguments, ids, tokens = make("tuple", 50)
    arguments |= {"num_workers": 3, "num_threads": 4}
    analyzer(dataset, tmp_path, worker_id=1, specific_threads=[2], **arguments).run_map()
    first = analyzer(dataset, tmp_path, **arguments)
    first.run_map()
    with pytest.raises(DataError, match=r"worker 1 did not finish thread\(s\) 0, 1, 3 .*; worker 2 has not run$"):
        first.run_reduce()
    analyzer(dataset, tmp_path, worker_id=1, specific_threads=[3, 0, 1], **arguments).run_map()
    analyzer(dataset, tmp_path, worker_id=2, **arguments).run_map()
    for name in ("a", "c"):
        data = tmp_path / name / f"{name}_map_worker2.bin"
        whole = data.read_bytes()
        data.write_bytes(whole[:-8])
        with pytest.raises(DataError, match=rf"{name}_map_worker2.bin has \d+ bytes of \d+: it is truncated"):
            first.run_reduce()
        data.write_bytes(whole)
    broken = {"metric_functions": [largest, int], "worker_id": 1, "specific_threads": [2]}
    with pytest.raises(TypeError):  # results that the process had before are void
        analyzer(dataset, tmp_path, **arguments, **broken).run_map()
    with pytest.raises(DataError, match=r"reduced: worker 1 did not finish thread\(s\) 2 \(it died"):
        first.run_reduce()
    analyzer(dataset, tmp_path, worker_id=1, specific_threads=[2], **arguments).run_map()
    first.run_reduce()
    assert {name: files(tmp_path / name) for name in ("a", "c")} == expected(ids, tokens)
    with pytest.raises(DataError, match="worker 0 has not run; worker 1 has not run; worker 2 has not run"):
        first.run_reduce()


def test_files_of_another_run(tmp_path: Path) -> None:
    other, *_ = make("tensor", 30)
    dataset, _, ids, tokens = make("tensor", 50)
    for worker in range(3):
        analyzer(other, tmp_path, num_workers=3, worker_id=worker).run_map()
    for worker in range(2):  # these are replaced, that of the third worker stays
        analyzer(dataset, tmp_path, num_workers=2, worker_id=worker).run_map()
    reducer = analyzer(dataset, tmp_path, num_workers=2)
    with pytest.raises(DataError, match=r"a_map_worker2.json is of a run with more workers: remove it"):
        reducer.run_reduce()
    for name in ("a", "c"):
        (tmp_path / name / f"{name}_map_worker2.json").unlink()
        (tmp_path / name / f"{name}_map_worker2.bin").unlink()
    analyzer(other, tmp_path, num_workers=2, worker_id=1).run_map()
    with pytest.raises(DataError, match=r"a_map_worker1.json is of another run \(samples 30, workers 2"):
        reducer.run_reduce()
    analyzer(dataset, tmp_path, num_workers=2, worker_id=1).run_map()
    analyzer(other, tmp_path / "x").run_map_reduce()
    reducer.run_reduce()
    assert {name: files(tmp_path / name) for name in ("a", "c")} == expected(ids, tokens)
    analyzer(other, tmp_path).run_map_reduce()  # earlier results of the same metrics are replaced
    assert files(tmp_path / "a") == files(tmp_path / "x" / "a")
    for kind, function in ((ACCUMULATED, histogram), (SINGLE, largest)):
        names = ["a"] if kind == ACCUMULATED else ["c"]
        with pytest.raises(DataError, match=rf"{names[0]}_\w+ is a result of a metric '{names[0]}' of type"):
            one(function, dataset, tmp_path, metric_types=[kind], metric_names=names).run_map()


@pytest.mark.parametrize("threads", [1, 2])
def test_files_of_another_dataset_of_equal_size(threads: int, tmp_path: Path) -> None:
    dataset, _, ids, tokens = make("dict", 40)
    arguments: dict[str, Any] = {"num_workers": 2, "num_threads": threads}
    stale = [{**row, "labels": row["labels"] + 1} for row in dataset]  # the metrics do not even use it
    analyzer(stale, tmp_path, worker_id=0, **arguments).run_map()
    analyzer(dataset, tmp_path, worker_id=1, **arguments).run_map()
    message = (
        r"thread 0 in .*a_map_worker{}.json is of another run \(the first, middle or last sample .*: run worker {}"
    )
    with pytest.raises(DataError, match=message.format(0, 0)):
        analyzer(dataset, tmp_path, **arguments).run_reduce()
    with pytest.raises(DataError, match=message.format(1, 1)):
        analyzer(stale, tmp_path, **arguments).run_reduce()
    unread = Unreadable(dataset)  # a reducer that has no samples still compares the workers
    with pytest.raises(DataError, match=message.format(1, 1)):
        analyzer(unread, tmp_path, **arguments).run_reduce()
    analyzer(dataset, tmp_path, worker_id=0, **arguments).run_map()
    analyzer(unread, tmp_path, **arguments).run_reduce()
    assert {name: files(tmp_path / name) for name in ("a", "c")} == expected(ids, tokens)


class Unreadable(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError("the samples are on another machine")


def smallest(batch: Any) -> torch.Tensor:
    return tokens_of(batch).amin(1)


def test_files_of_another_function(tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 10)
    one(smallest, dataset, tmp_path, num_workers=2, worker_id=0).run_map()
    one(largest, dataset, tmp_path, num_workers=2, worker_id=1).run_map()
    with pytest.raises(DataError, match="its function was smallest, and is largest now"):
        one(largest, dataset, tmp_path, num_workers=2).run_reduce()
    assert Metric("a", partial(largest), SINGLE).function_name == "largest"
    assert Metric("a", SequenceLength(), SINGLE).function_name == "SequenceLength"


class Random(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(0, VOCABULARY, (3,))


def test_random_samples_are_not_compared(tmp_path: Path) -> None:
    for worker in range(2):
        one(largest, Random(), tmp_path, num_workers=2, worker_id=worker).run_map()
    one(largest, Random(), tmp_path, num_workers=2).run_reduce()
    assert len(os.listdir(tmp_path / "a")) == 8


def test_digests_of_samples() -> None:
    samples: list[Any] = [
        1, 2, 1.0, True, None, "1", b"1", [1], [[1]], [1, 1], {"a": 1}, {"b": 1}, np.arange(2), np.arange(2.0),
        torch.arange(2), torch.arange(2)[None], torch.ones(2).bfloat16(), torch.zeros(2).bfloat16(), torch.ones(()),
        np.float32(1), np.array(["a", 1], object), ["ab", "c"], ["a", "bc"],
    ]  # fmt: skip
    digests = [sample_digest([sample]) for sample in samples]
    assert None not in digests and len(set(digests)) == len(samples)
    assert sample_digest([{"a": 1, "b": torch.ones(2)}]) == sample_digest([{"b": torch.ones(2), "a": 1}])
    dataset = list(range(9))
    changed = [
        sample_digest([*dataset[:place], -1, *dataset[place + 1 :]]) != sample_digest(dataset) for place in dataset
    ]
    assert [place for place in dataset if changed[place]] == [0, 4, 8]
    assert sample_digest(Unreadable(dataset)) is None and sample_digest(Random()) is None


def test_a_failed_reduce_leaves_what_there_was(tmp_path: Path) -> None:
    dataset, _, ids, tokens = make("index", 20)
    analyzer(dataset, tmp_path).run_map_reduce()
    twice = [*dataset[:-1], dataset[0]]
    again = analyzer(twice, tmp_path)
    again.run_map()
    for _ in range(2):
        with pytest.raises(DataError, match="1 ids occur twice, such as 0, 1 ids are missing, such as 19"):
            again.run_reduce()
    for name in ("a_map_worker0.bin", "a_map_worker0.json"):
        (tmp_path / "a" / name).unlink()
    assert files(tmp_path / "a") == expected(ids, tokens)["a"]


def test_results_are_replaced_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, _, ids, tokens = make("tensor", 40)
    analyzer(dataset, tmp_path).run_map_reduce()
    other, *_ = make("tensor", 41)
    again = analyzer(other, tmp_path)
    monkeypatch.setattr("deepspeed.data.indexed_dataset.LONGEST_ROW", 1)  # rows of ids have more, those before do not
    with pytest.raises(DataError, match="a row has .* elements; lengths are stored as int32"):
        again.run_map_reduce()
    for name in ("a_map_worker0.bin", "a_map_worker0.json"):
        (tmp_path / "a" / name).unlink()
    assert files(tmp_path / "a") == expected(ids, tokens)["a"]


# -- metrics that are wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda batch: batch.sum(1).float(), SINGLE, "metric 'a' returned float32, but metric_dtypes says int64"),
        (lambda batch: batch.sum(1).int(), SINGLE, "metric 'a' returned int32, but metric_dtypes says int64"),
        (lambda batch: batch.sum(), SINGLE, r"shape \(\) for a batch of 4 samples; .* shape \(4,\)"),
        (lambda batch: batch.sum(1)[:, None], SINGLE, r"shape \(4, 1\)"),
        (lambda batch: batch.sum(1)[:2], SINGLE, r"shape \(2,\)"),
        (
            lambda batch: batch.sum(1),
            ACCUMULATED,
            r"metric 'a' returned shape \(2,\) after shape \(4,\); .* reduce over",
        ),
        (lambda batch: batch[0] * 0 + 2**62, ACCUMULATED, "the sum of metric 'a' does not fit int64"),
    ],
)
def test_wrong_values_are_refused(function: Any, kind: str, message: str, tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 10)
    with pytest.raises(DataError, match=message):
        one(function, dataset, tmp_path, metric_types=[kind]).run_map()


def test_shapes_of_two_processes_must_agree(tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 6)
    analysis = one(lambda batch: batch.sum(1), dataset, tmp_path, metric_types=[ACCUMULATED], num_threads=2)
    analysis.run_map()  # of 3 samples each
    with pytest.raises(DataError, match=r"shapes \(3,\) and \(2,\)|shapes \(2,\) and \(3,\)"):
        one(lambda batch: batch.sum(1), dataset[:5], tmp_path, metric_types=[ACCUMULATED], num_threads=2).run_map()


def test_values_of_unsigned_integers(tmp_path: Path) -> None:
    values = np.array([2**63, 1], np.uint64)
    analysis = one(lambda batch: values, [0, 1], tmp_path, metric_dtypes=[np.uint64], collate_fn=list)
    with pytest.raises(DataError, match="returned 9223372036854775808, which does not fit int64"):
        analysis.run_map()


@pytest.mark.parametrize("index", [[0.5, 1.5], [[0, 1], [2, 3]], ["a", "b"]])
def test_an_index_that_is_none(index: Any, tmp_path: Path) -> None:
    analysis = one(lambda batch: torch.ones(2).long(), [0, 1], tmp_path, collate_fn=lambda _: {"index": index})
    with pytest.raises(DataError, match="the field 'index' of a batch of 2 samples has"):
        analysis.run_map()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metric_names": []}, "0 metric_names, 2 metric_functions"),
        ({"metric_dtypes": [torch.int64]}, "1 metric_dtypes"),
        ({"metric_dtypes": [torch.int64, torch.bfloat16]}, "metric 'c' has dtype bfloat16"),
        ({"metric_dtypes": [np.float32, torch.int64]}, "metric 'a' has dtype .*float32"),
        ({"metric_types": [SINGLE, "mean"]}, "metric 'c' has type 'mean'"),
        ({"metric_names": ["a", "a"]}, "must differ"),
        ({"metric_names": ["a", "b/c"]}, "have no separator"),
        ({"metric_functions": [largest, None]}, "the function of metric 'c' is a NoneType"),
        ({"num_workers": 2, "worker_id": 2}, "worker_id 2 of num_workers 2"),
        ({"num_threads": 0}, "num_threads 0"),
        ({"num_threads": 2, "specific_threads": [2]}, r"specific_threads \[2\]: pass different numbers from 0 to 1"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"sample_indices": [0, 0, 1, 2]}, r"sample_indices has int64 of shape \(4,\)"),
        ({"sample_indices": [0, 1]}, r"shape \(2,\); .* each of the 4 samples"),
        ({"custom_map_init": print}, "pass all three"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    dataset, *_ = make("tensor", 4)
    with pytest.raises(ArgumentError, match=message):
        analyzer(dataset, tmp_path, **arguments)


def test_wrong_datasets_are_refused(tmp_path: Path) -> None:
    for dataset, message in (([], "has no samples"), (iter([1]), "is a list_iterator; the analysis needs")):
        with pytest.raises(DataError, match=message):
            analyzer(dataset, tmp_path)


def test_ids_that_are_none() -> None:
    check_ids(np.array([2, 0, 1]), 3, None)
    check_ids(np.array([7, 5, 9]), 3, np.array([5, 7, 9]))
    with pytest.raises(DataError, match="1 ids are missing, such as 1, 1 ids are no samples, such as 3"):
        check_ids(np.array([0, 2, 3]), 3, None)


# -- the rest ------------------------------------------------------------------------------------------------------


def test_custom_functions_replace_both_steps(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []
    state = object()

    def begin(*arguments: Any) -> Any:
        calls.append(arguments)
        return state

    def note(*arguments: Any) -> None:
        calls.append(arguments)

    dataset = [torch.tensor([position]) for position in range(5)]
    arguments = {"num_workers": 2, "worker_id": 1, "batch_size": 2, "num_threads_reduce": 7, "custom_reduce": note}
    maps = {"custom_map_init": begin, "custom_map_update": note, "custom_map_finalize": note}
    analysis = one(largest, dataset, tmp_path, **arguments, **maps)
    analysis.run_map()
    analysis.run_reduce()
    assert calls[0] == (0, ["a"], [SINGLE], [torch.int64], tmp_path, 1)
    assert [call[0].tolist() for call in calls[1:3]] == [[[2], [3]], [[4]]]
    assert [call[1:] for call in calls[1:3]] == [([SINGLE], [torch.int64], [largest], state, place) for place in (2, 4)]
    assert calls[3:] == [([SINGLE], [torch.int64], state), (dataset, ["a"], [SINGLE], tmp_path, 2, 1, 7)]
    assert not list(tmp_path.iterdir())


def test_a_line_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    from deepspeed.foundation import progress_line

    dataset, *_ = make("tensor", 20)
    monkeypatch.setattr(progress_line, "PLAIN_S", 0.0)
    analyzer(dataset, tmp_path, num_threads=2).run_map_reduce()
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setenv(progress_line.VARIABLE, "1")
    analyzer(dataset, tmp_path / "b", num_workers=2, worker_id=1).run_map()
    assert capsys.readouterr().err == ""  # not worker 0
    analyzer(dataset, tmp_path, num_threads=2).run_map_reduce()
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("analysis: 20 of 20 samples · ")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    line = CountLine("analysis", "samples", 100, stream, every=0)
    line.update(50)
    line.close(100)
    first, last = stream.getvalue().split("\x1b[K")[:2]
    assert first.startswith("\ranalysis: 50 of 100 samples · ") and first.endswith(" left")
    assert "100 of 100" in last and stream.getvalue().endswith("\n")


def test_ready_metrics(tmp_path: Path) -> None:
    sequences = [[1, 2, 2], [3], [2, 1, 1, 1]]
    assert SequenceLength()(sequences).tolist() == [3, 1, 4]
    assert SequenceLength(truncate_to=3)(sequences).tolist() == [3, 1, 3]
    padded = torch.tensor([[1, 2, 2, 0], [3, 0, 0, 0], [2, 1, 1, 1]])
    assert SequenceLength(pad_token_id=0)(padded).tolist() == [3, 1, 4]
    masked = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    assert SequenceLength()(masked).tolist() == [3, 1, 4]
    counts = TokenCounts(4)(masked)
    assert counts.tolist() == [0, 4, 3, 1]
    rarity = VocabularyRarity(counts)(masked).tolist()
    parts = [[-np.log(int(counts[token]) / 8) for token in row] for row in sequences]
    assert rarity == [int(sum(row)) for row in parts] and len(set(rarity)) > 1
    with pytest.raises(DataError, match="token 0 does not occur in the data"):
        VocabularyRarity(counts)(padded)
    with pytest.raises(DataError, match="token 3 is outside of the vocabulary of 3"):
        TokenCounts(3)(padded)
    with pytest.raises(DataError, match="the batch has no input_ids, only tokens"):
        SequenceLength()({"tokens": padded})
    with pytest.raises(DataError, match=r"a sample has float32 of shape \(4,\)"):
        SequenceLength()(padded.float())
    for counts_of_none in ([0, 0], [-1, 2], [0.5]):
        with pytest.raises(ArgumentError, match="counts must be integers of at least 0"):
            VocabularyRarity(counts_of_none)
    metrics = {"metric_names": ["seqlen"], "metric_functions": [SequenceLength()], "metric_types": [SINGLE]}
    DataAnalyzer(
        sequences, batch_size=2, collate_fn=list, metric_dtypes=[torch.int64], save_path=tmp_path, **metrics
    ).run_map_reduce()
    assert files(tmp_path / "seqlen") == single_files("seqlen", [3, 1, 4], [0, 1, 2])


@pytest.mark.slow
def test_time_grows_with_the_number_of_samples(tmp_path: Path) -> None:
    class Numbers(torch.utils.data.Dataset[Any]):
        def __init__(self, samples: int) -> None:
            self.values = torch.from_numpy(np.random.default_rng(0).integers(0, samples // 2, samples))

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, index: int) -> torch.Tensor:
            return self.values[index]

    def seconds(samples: int) -> float:
        times = []
        for _ in range(3):
            start = time.process_time()
            one(lambda batch: batch, Numbers(samples), tmp_path, batch_size=256).run_map_reduce()
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(400_000) / seconds(100_000) <= 2.3**2
