"""Files of an analysis: what the workers of a map step write, and the result files that a reduce step makes of them.

A worker writes one pair of files for each metric: int64 ids and values, and a record of the threads that have finished.
A reduce step sorts them into upstream's result files, each a pair of Megatron's, and removes the workers' files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed.data.analysis_map import ACCUMULATED, SINGLE, Metric, Sum
from deepspeed.data.index_lists import Array, stable_order
from deepspeed.data.indexed_dataset import data_file_path, find_fit_int_dtype, index_file_path, write_index
from deepspeed.errors import DataError

RESULTS = {
    SINGLE: ("sample_to_metric", "index_to_metric", "index_to_sample", "index_to_sample_percentile_merged"),
    ACCUMULATED: ("metric_value",),
}
_PERCENTILES = 100


@dataclass(frozen=True)
class Shape:
    """Division of an analysis; equal for all workers that belong together.

    Attributes:
        samples: number of samples of the dataset.
        workers: number of workers.
        threads: number of processes of each worker.
    """

    samples: int
    workers: int
    threads: int

    def splits(self, worker: int) -> list[tuple[int, int]]:
        """Return the range of positions of each thread of a worker."""
        return split_index(*split_index(0, self.samples, self.workers)[worker], self.threads)


def split_index(start_idx: int, end_idx: int, num_partitions: int) -> list[tuple[int, int]]:
    """Divide a range into consecutive parts of nearly equal size.

    Args:
        start_idx: first index.
        end_idx: index after the last one.
        num_partitions: number of parts; some are empty if there are more than indices.

    Returns:
        First index, and index after the last one, of each part.
    """
    cuts = np.linspace(start_idx, end_idx, num_partitions + 1, dtype=np.int64).tolist()
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def split_dataset(
    dataset: Any, num_workers: int, worker_id: int, num_threads: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Divide the samples of a dataset among workers, and the part of one worker among its threads.

    Returns:
        First index, and index after the last one: of each worker, and of each thread of `worker_id`.
    """
    worker_splits = split_index(0, len(dataset), num_workers)
    return worker_splits, split_index(*worker_splits[worker_id], num_threads)


def result_prefix(save_path: str | os.PathLike[str], metric: str, result: str) -> Path:
    """Return the prefix of a pair of result files, such as `<save_path>/<metric>/<metric>_index_to_sample`."""
    return Path(save_path) / metric / f"{metric}_{result}"


def _exists(prefix: Path) -> bool:
    return os.path.exists(index_file_path(prefix)) or os.path.exists(data_file_path(prefix))


def check_folder(save_path: str | os.PathLike[str], metric: Metric) -> None:
    """Check that a folder has no results of a metric of this name with another type.

    Raises:
        DataError: it has.
    """
    other = next(kind for kind in RESULTS if kind != metric.kind)
    paths = [path for result in RESULTS[other] if _exists(path := result_prefix(save_path, metric.name, result))]
    if paths:
        raise DataError(
            f"{paths[0]} is a result of a metric {metric.name!r} of type {other}, and this analysis has one of type "
            f"{metric.kind}: remove the folder, or choose another save_path or name"
        )


class MapFiles:
    """The pair of files of one worker and one metric.

    Of single values, the data are the ids and then the values of the worker's samples; of sums, a row for each thread.
    """

    def __init__(self, save_path: str | os.PathLike[str], metric: Metric, shape: Shape, worker: int) -> None:
        self.metric, self.shape, self.worker = metric, shape, worker
        self.folder = Path(save_path) / metric.name
        self.data = self.folder / f"{metric.name}_map_worker{worker}.bin"
        self.record = self.data.with_suffix(".json")

    def _description(self) -> dict[str, Any]:
        return asdict(self.shape) | {"type": self.metric.kind}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, Any]]:
        """Read the record, and write its changes; calls with other threads of the same worker may run beside."""
        with open(self.record, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            try:
                content = json.loads(file.read())
            except ValueError:  # it is new, or its writer was killed
                content = {}
            yield content
            file.seek(0)
            file.truncate()
            file.write(json.dumps(content))

    def begin(self, threads: list[int]) -> None:
        """Note that threads are about to run; results that they had before are void.

        If the record is of another division of the samples, all of it is void.

        Raises:
            DataError: the folder has results of a metric of the same name and another type.
        """
        check_folder(self.folder.parent, self.metric)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as content:
            if {key: content.get(key) for key in self._description()} != self._description():
                content.clear()
                content |= self._description() | {"done": {}, "shape": None}
            for thread in threads:
                content["done"].pop(str(thread), None)

    def write(self, thread: int, ids: Array, values: Array | None, digest: str | None = None) -> None:
        """Write the results of one thread.

        Args:
            thread: its number.
            ids: int64 ids of its samples.
            values: its int64 values in the same order, or its sum.
            digest: of the dataset (see `sample_digest`).

        Raises:
            DataError: its sum has another shape than that of another thread.
        """
        with self._locked() as content:
            if self.metric.kind == SINGLE:
                splits = self.shape.splits(self.worker)
                first, share = splits[0][0], splits[-1][1] - splits[0][0]
                start = splits[thread][0] - first
                self._put([(start, ids), (share + start, values)])
            elif values is not None:
                if content["shape"] is None or not content["done"]:
                    content["shape"] = list(values.shape)
                if content["shape"] != list(values.shape):
                    raise DataError(_shapes(self.metric, content["shape"], values.shape))
                self._put([(thread * values.size, values.ravel())])
            done = {"samples": len(ids), "summed": values is not None}
            content["done"][str(thread)] = done | {"function": self.metric.function_name, "digest": digest}

    def _put(self, parts: list[tuple[int, Array | None]]) -> None:
        with open(os.open(self.data, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            for place, array in parts:
                file.seek(8 * place)
                file.write(np.ascontiguousarray(array, np.int64).data)

    def digests(self) -> list[str]:
        """Return the digests of the dataset that the threads noted; none if the record cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            rows = json.loads(self.record.read_text()).get("done", {}).values()
            return [digest for row in rows if (digest := row.get("digest"))]
        return []

    def problem(self, digest: str | None) -> str:
        """Return what keeps the files from being reduced; "" if nothing does.

        Args:
            digest: of the dataset (see `sample_digest`); None: it is not compared.
        """
        name = f"worker {self.worker}"
        try:
            content = json.loads(self.record.read_text())
        except FileNotFoundError:
            return f"{name} has not run"
        except ValueError:
            return f"{name} did not finish ({self.record} is damaged)"
        if {key: content.get(key) for key in self._description()} != self._description():
            was = ", ".join(f"{key} {content.get(key)}" for key in self._description())
            return f"{self.record} is of another run ({was}): run {name} again, or remove the file"
        threads = [thread for thread in range(self.shape.threads) if str(thread) not in content["done"]]
        if threads:
            return f"{name} did not finish thread(s) {', '.join(map(str, threads))} (it died, or still runs)"
        if strange := self._strange(content["done"], digest):
            return strange
        counts = [content["done"][str(thread)]["samples"] for thread in range(self.shape.threads)]
        sizes = [stop - start for start, stop in self.shape.splits(self.worker)]
        if counts != sizes:
            return f"{name} has {counts} samples by thread, its parts have {sizes}"
        size = os.path.getsize(self.data) if self.data.exists() else 0
        if size < self._elements(content) * 8:
            return f"{self.data} has {size} bytes of {8 * self._elements(content)}: it is truncated"
        return ""

    def _strange(self, done: Mapping[str, Any], digest: str | None) -> str:
        """Return which thread is of another run, by its function or dataset; "" if none is."""
        for thread, row in sorted(done.items()):
            what = ""
            if row.get("function") != self.metric.function_name:
                what = f"its function was {row.get('function')}, and is {self.metric.function_name} now"
            elif digest and row.get("digest") not in (None, digest):
                what = "the first, middle or last sample of its dataset was another one"
            if what:
                again = f"run worker {self.worker} again, or remove the file"
                return f"thread {thread} in {self.record} is of another run ({what}): {again}"
        return ""

    def _elements(self, content: Mapping[str, Any]) -> int:
        splits = self.shape.splits(self.worker)
        if self.metric.kind == SINGLE:
            return 2 * (splits[-1][1] - splits[0][0])
        rows = [int(thread) + 1 for thread, done in content["done"].items() if done["summed"]]
        return max(rows, default=0) * int(np.prod(content["shape"] or [], dtype=np.int64))

    def read(self) -> tuple[Array, Array]:
        """Return the int64 ids and values of the worker's samples."""
        splits = self.shape.splits(self.worker)
        share = splits[-1][1] - splits[0][0]
        elements = np.fromfile(self.data, np.int64, 2 * share) if share else np.empty(0, np.int64)
        return elements[:share], elements[share:]

    def sums(self) -> Iterator[Array]:
        """Yield the sum of each thread that had samples."""
        content = json.loads(self.record.read_text())
        size = int(np.prod(content["shape"] or [], dtype=np.int64))
        for thread, done in content["done"].items():
            if done["summed"]:
                yield np.fromfile(self.data, np.int64, size, offset=8 * size * int(thread)).reshape(content["shape"])

    def remove(self) -> None:
        """Remove both files."""
        self.record.unlink(missing_ok=True)
        self.data.unlink(missing_ok=True)


def _shapes(metric: Metric, shape: Any, other: Any) -> str:
    return (
        f"metric {metric.name!r} has sums of shapes {tuple(shape)} and {tuple(other)}; {ACCUMULATED} needs one shape "
        "for all batches, also for a smaller last one: reduce over the samples of the batch"
    )


def read_map(
    save_path: str | os.PathLike[str], metric: Metric, shape: Shape, digest: str | None
) -> tuple[list[MapFiles], tuple[Array, Array] | Array]:
    """Return the files of all workers, and ids and values of all samples, or the sum.

    Args:
        save_path: folder of the analysis.
        metric: the metric.
        shape: division of the samples.
        digest: of the dataset (see `sample_digest`); None: the digests of the workers are compared with each other.

    Raises:
        DataError: a worker has not run, did not finish, or has files of another run; the message names each.
    """
    folder = Path(save_path) / metric.name
    files = [MapFiles(save_path, metric, shape, worker) for worker in range(shape.workers)]
    names = {part.record for part in files}
    strange = sorted(path for path in folder.glob(f"{metric.name}_map_worker*.json") if path not in names)
    digest = digest or next((noted for part in files for noted in part.digests()), None)
    problems = [problem for part in files if (problem := part.problem(digest))]
    problems += [f"{path} is of a run with more workers: remove it" for path in strange]
    if problems:
        raise DataError(f"metric {metric.name!r} cannot be reduced: {'; '.join(problems)}")
    if metric.kind == SINGLE:
        parts = [part.read() for part in files]
        return files, (np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts]))
    total = Sum(metric.name)
    for part in files:
        for values in part.sums():
            total.add(values)
    if total.total is None:
        raise DataError(f"metric {metric.name!r} has no values")
    return files, total.total


def check_ids(ids: Array, samples: int, sample_indices: Array | None) -> None:
    """Check that each sample has its own id.

    Args:
        ids: int64 ids of all samples.
        samples: number of samples.
        sample_indices: ids that there may be instead of 0 to `samples` - 1; None: no others.

    Raises:
        DataError: an id is missing, occurs twice, or lies outside.
    """
    order = np.arange(samples)
    present = np.sort(ids)
    if np.array_equal(present, order):
        return
    if sample_indices is not None:
        order = np.sort(sample_indices)
        if np.array_equal(present, order):
            return
    twice = present[1:][present[1:] == present[:-1]]
    missing = np.setdiff1d(order, present)
    strange = np.setdiff1d(present, order)
    texts = [
        f"{len(values):,} ids {what}, such as {int(values[0])}"
        for values, what in ((twice, "occur twice"), (missing, "are missing"), (strange, "are no samples"))
        if len(values)
    ]
    raise DataError(
        f"the {len(ids):,} ids of {samples:,} samples are not each sample once: {', '.join(texts)}. Ids come from the "
        "field 'index' of a batch, else from sample_indices, else from the position in the dataset; if they are others "
        f"than 0 to {samples - 1:,}, pass sample_indices"
    )


class Results:
    """Writer of the result files of one metric. None is replaced before the block has ended without an error."""

    def __init__(self, save_path: str | os.PathLike[str], metric: Metric) -> None:
        self._folder = Path(save_path) / metric.name
        self._save_path, self._metric = save_path, metric

    def __enter__(self) -> Results:
        check_folder(self._save_path, self._metric)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._staging = Path(tempfile.mkdtemp(prefix=".reduce-", dir=self._folder))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            for path in self._staging.iterdir():
                os.replace(path, self._folder / path.name)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _write(self, result: str, values: Array, lengths: Any, documents: int = 1) -> None:
        """Write rows of the given lengths, which follow each other in `values`; all belong to the first document."""
        prefix = self._staging / f"{self._metric.name}_{result}"
        dtype = find_fit_int_dtype(int(values.min()), int(values.max())) if values.size else np.uint8
        values.astype(dtype).tofile(data_file_path(prefix))
        write_index(index_file_path(prefix), lengths, [0, *[len(lengths)] * documents], dtype)

    def single(self, ids: Array, values: Array) -> None:
        """Write the four results of single values; samples of equal value stay in their order.

        Args:
            ids: int64 id of each sample, in order of position.
            values: int64 value of each sample, in the same order.
        """
        low, high = int(values.min()), int(values.max())
        if high - low < 2**63:
            order = stable_order(values - low)
        else:  # the difference does not fit
            order = np.argsort(values, kind="stable")
        distinct, counts = _runs(values[order])
        step = max(1, len(distinct) // _PERCENTILES)
        merged = np.add.reduceat(counts, np.arange(0, len(counts), step))
        samples = ids[order]
        # upstream's files have an empty second document, too, but for the merged percentiles
        self._write("sample_to_metric", values, np.ones(len(values), np.int64), documents=2)
        self._write("index_to_metric", distinct, np.ones(len(distinct), np.int64), documents=2)
        self._write("index_to_sample", samples, counts, documents=2)
        self._write("index_to_sample_percentile_merged", samples, merged)

    def sum(self, total: Array) -> None:
        """Write the result of a sum."""
        self._write("metric_value", total.ravel(), [total.size])


def _runs(ordered: Array) -> tuple[Array, Array]:
    """Return the distinct values of an ascending array, and how often each occurs."""
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[starts], np.diff(np.append(starts, len(ordered)))
