"""Analysis of a dataset: the values of metrics for all samples, and indices that sort the samples by them.

Each worker computes the metrics of its samples (map), in several processes if wanted; then one worker sorts them into
index files (reduce). `DataAnalyzer` passes the results through files, `DistributedDataAnalyzer` through messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed import comm
from deepspeed.comm.collectives.same_error import raise_together
from deepspeed.comm.process_groups.axis import Axis, group_axis, world_axis
from deepspeed.data.analysis_files import MapFiles, Results, Shape, check_folder, check_ids, read_map
from deepspeed.data.analysis_map import (
    ACCUMULATED,
    SINGLE,
    Analysis,
    MapResult,
    Metric,
    Report,
    Sum,
    in_processes,
    joined,
    sample_digest,
)
from deepspeed.data.indexed_dataset import StrPath
from deepspeed.errors import ArgumentError, DataError, UsageError
from deepspeed.foundation.progress_line import CountLine

KINDS = (SINGLE, ACCUMULATED)


class _CustomMap(NamedTuple):
    """Functions in place of the package's own map step."""

    init: Callable[..., Any]
    update: Callable[..., Any]
    finalize: Callable[..., Any]


class DataAnalyzer:
    """Analyzer whose workers are independent calls: each runs `run_map`, and one runs `run_reduce` when all have ended.

    For each metric, the folder `<save_path>/<metric>` then has pairs of files (see `MMapIndexedDataset`) with the names
    `<metric>_<result>`. For `single_value_per_sample`: `sample_to_metric` (row i: the value of `dataset[i]`),
    `index_to_metric` (row i: the i-th distinct value, ascending), `index_to_sample` (row i: the ids of the samples with
    that value) and `index_to_sample_percentile_merged` (the same, up to 199 rows of several values each). For
    `accumulate_value_over_samples`: `metric_value` (one row: the sum). All have the smallest integer dtype.

    The id of a sample is its element of the batch's field `index` if the batch is a dict that has one, else of
    `sample_indices`, else its position in the dataset.

    Args:
        dataset: map-style dataset, the same for all workers.
        num_workers: number of workers that divide the samples.
        worker_id: number of this worker.
        num_threads: number of processes that divide this worker's samples.
        num_threads_reduce: has no effect: the reduce step is one sort.
        specific_threads: only these of the `num_threads` processes run; others run in other calls. Empty: all.
        batch_size: number of samples that a metric function gets at once.
        metric_names: names of folders and files.
        metric_functions: functions of a batch.
        metric_types: "single_value_per_sample": the function returns one integer per sample, shape [batch];
            "accumulate_value_over_samples": a tensor of one shape for all batches; they are summed.
        metric_dtypes: integer dtypes (torch or numpy) that the functions return.
        save_path: folder of the results, shared by all workers.
        collate_fn: makes a batch of a list of samples; None: torch's default.
        custom_map_init: replaces the map step, together with the next two. Called for each process with
            `(thread_id, metric_names, metric_types, metric_dtypes, save_path, worker_id)`; returns an object.
        custom_map_update: called for each batch with `(batch, metric_types, metric_dtypes, metric_functions,
            object, position)`; `position` is that of its first sample.
        custom_map_finalize: called with `(metric_types, metric_dtypes, object)`.
        custom_reduce: replaces the reduce step. Called with `(dataset, metric_names, metric_types, save_path,
            num_workers, num_threads, num_threads_reduce)`.
        sample_indices: id of the sample at each position, each once; None: the position.

    Raises:
        ArgumentError: arguments contradict each other or are out of range, or a dtype is no integer.
        DataError: the dataset has no length or no samples.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: StrPath = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: Callable[..., Any] | None = None,
        custom_map_update: Callable[..., Any] | None = None,
        custom_map_finalize: Callable[..., Any] | None = None,
        custom_reduce: Callable[..., Any] | None = None,
        sample_indices: Any = None,
    ) -> None:
        self.dataset, self.save_path = dataset, save_path
        self.num_workers, self.worker_id = num_workers, worker_id
        self.num_threads, self.num_threads_reduce = num_threads, num_threads_reduce
        self.metric_names, self.metric_functions = list(metric_names), list(metric_functions)
        self.metric_types, self.metric_dtypes = list(metric_types), list(metric_dtypes)
        metrics = _metrics(self.metric_names, self.metric_functions, self.metric_types, self.metric_dtypes)
        self._analysis = _analysis(dataset, metrics, batch_size, collate_fn, sample_indices)
        self._shape = _shape(len(dataset), num_workers, worker_id, num_threads)
        self._threads = list(specific_threads) or list(range(num_threads))
        if len(set(self._threads)) < len(self._threads) or not set(self._threads) <= set(range(num_threads)):
            raise ArgumentError(f"specific_threads {self._threads}: pass different numbers from 0 to {num_threads - 1}")
        self._custom = _custom(custom_map_init, custom_map_update, custom_map_finalize)
        self._custom_reduce = custom_reduce

    def run_map(self) -> None:
        """Compute the metrics of this worker's samples, and write them to the folder of each metric.

        Results of an earlier call of the same worker and processes are replaced.

        Raises:
            DataError: a metric returned wrong values or shapes, a process failed or was killed, or a folder has results
                of a metric of the same name and another type.
        """
        splits = self._shape.splits(self.worker_id)
        if self._custom is not None:
            run = [partial(self._run_custom, self._custom, thread) for thread in range(self.num_threads)]
            deliver: Callable[[int, Any], None] = _ignore
        else:
            files = [MapFiles(self.save_path, m, self._shape, self.worker_id) for m in self._analysis.metrics]
            for pair in files:
                pair.begin(self._threads)
            run = [self._run_map] * self.num_threads
            deliver = partial(_write, files)
        tasks = {thread: partial(run[thread], *splits[thread]) for thread in self._threads}
        samples = sum(stop - start for start, stop in (splits[thread] for thread in self._threads))
        _run(tasks, self.worker_id, samples, deliver)

    def _run_map(self, start: int, stop: int, report: Report) -> tuple[MapResult, str | None]:
        """Return the results of a range, and the digest of the dataset as this process has it."""
        # the digest comes last, so that it changes no random numbers that the dataset draws
        return self._analysis.run(start, stop, report), sample_digest(self.dataset)

    def _run_custom(self, custom: _CustomMap, thread: int, start: int, stop: int, report: Report) -> None:
        results = custom.init(
            thread, self.metric_names, self.metric_types, self.metric_dtypes, self.save_path, self.worker_id
        )
        for position, count, batch in self._analysis.batches(start, stop):
            custom.update(batch, self.metric_types, self.metric_dtypes, self.metric_functions, results, position)
            report(position + count - start)
        custom.finalize(self.metric_types, self.metric_dtypes, results)

    def run_reduce(self) -> None:
        """Sort the values of all workers into the result files of each metric, and remove the workers' files.

        Earlier results of the same metric are replaced.

        Files of another run are refused if they differ in one of these: number of samples, workers or threads; type of
        the metric; name of its function (of its class if it is an object); first, middle or last sample of the dataset,
        as far as they consist of tensors, arrays, numbers, strings and bytes. Samples that cannot be read, or are
        others each time, are not compared. Nothing else can be noticed, such as another sample in between or a change
        inside a function: remove the folder after such a change.

        Raises:
            DataError: a worker has not run, did not finish or has files of another run (see above), or an id is missing
                or occurs twice.
        """
        if self._custom_reduce is not None:
            sizes = self.num_workers, self.num_threads, self.num_threads_reduce
            self._custom_reduce(self.dataset, self.metric_names, self.metric_types, self.save_path, *sizes)
            return
        obsolete: list[MapFiles] = []
        digest = sample_digest(self.dataset)
        for metric in self._analysis.metrics:
            files, values = read_map(self.save_path, metric, self._shape, digest)
            _reduce(self.save_path, self._analysis, metric, values)
            obsolete += files
        for pair in obsolete:  # after all metrics, so that a failed reduce can be repeated
            pair.remove()

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Run both steps; with several workers, each is a rank, and worker 0 reduces. Collective over the ranks.

        Ranks wait for the slowest one, at most for the timeout of the process group (`DEEPSPEED_TIMEOUT`).

        Args:
            comm_group: process group of the workers; None: all ranks.

        Raises:
            UsageError: there are several workers and no process group.
            DataError: as `run_map` and `run_reduce`; other ranks raise DataError with the failed rank's message.
        """
        if not comm.is_initialized():
            if self.num_workers > 1:
                raise UsageError(
                    f"run_map_reduce with {self.num_workers} workers needs a process group: call "
                    "deepspeed.init_distributed(), or run_map in each worker and then run_reduce in one"
                )
            self.run_map()
            self.run_reduce()
            return
        axis = _axis(comm_group)
        raise_together(axis, self.run_map, _elsewhere)
        raise_together(axis, self.run_reduce if self.worker_id == 0 else _nothing, _elsewhere)


class DistributedDataAnalyzer:
    """Analyzer whose workers are the ranks of a process group. The results are those of `DataAnalyzer`.

    The ranks send their values to the first one, which sorts them and writes the files; no others are written.

    All ranks create it; a process group is created if there is none.

    Args:
        dataset, num_threads, batch_size, collate_fn, sample_indices: as those of `DataAnalyzer`.
        metric_names, metric_functions, metric_types: as those of `DataAnalyzer`; all integer dtypes are accepted.
        num_workers, worker_id: the number of ranks and this rank, or the defaults, which mean the same.
        save_path: folder of the results; only that of the first rank is used.
        device: has no effect: values are sent from host memory.
        comm_group: process group of the workers; None: all ranks.

    Raises:
        ArgumentError: as `DataAnalyzer`, or `num_workers` and `worker_id` are not those of the group.
        DataError: the dataset has no length or no samples.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        num_threads: int = 1,
        worker_id: int = 0,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: StrPath = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: str = "cuda",
        comm_group: Any = None,
        sample_indices: Any = None,
    ) -> None:
        if not comm.is_initialized():
            comm.init_distributed()
        self._axis = _axis(comm_group)
        self.num_workers, self.worker_id = self._axis.size, self._axis.rank
        if (num_workers, worker_id) not in ((1, 0), (self.num_workers, self.worker_id)):
            raise ArgumentError(
                f"worker_id {worker_id} of num_workers {num_workers}, but this is rank {self.worker_id} of "
                f"{self.num_workers}: leave both out"
            )
        self.dataset, self.save_path = dataset, save_path
        metrics = _metrics(metric_names, metric_functions, metric_types, [None] * len(metric_names))
        self._analysis = _analysis(dataset, metrics, batch_size, collate_fn, sample_indices)
        self._shape = _shape(len(dataset), self.num_workers, self.worker_id, num_threads)

    def run_map_reduce(self) -> None:
        """Compute the metrics of this rank's samples, and write the result files on the first rank. Collective.

        Ranks wait for the slowest one, at most for the timeout of the process group (`DEEPSPEED_TIMEOUT`).

        Raises:
            DataError: as `DataAnalyzer.run_map` and `run_reduce`; other ranks raise it with the failed rank's message.
        """
        results = raise_together(self._axis, self._map, _elsewhere)
        by_rank = _gathered(self._axis, results)
        raise_together(self._axis, partial(self._write, by_rank), _elsewhere)

    def _map(self) -> list[MapResult]:
        if self.worker_id == 0:
            for metric in self._analysis.metrics:
                check_folder(self.save_path, metric)
        results: dict[int, MapResult] = {}
        splits = self._shape.splits(self.worker_id)
        tasks = {thread: partial(self._analysis.run, *split) for thread, split in enumerate(splits)}
        _run(tasks, self.worker_id, splits[-1][1] - splits[0][0], results.__setitem__)
        return [results[thread] for thread in tasks]

    def _write(self, by_rank: list[list[MapResult]]) -> None:
        """Write the results of all ranks; does nothing on others than the first."""
        parts = [result for results in by_rank for result in results]
        for metric in self._analysis.metrics if parts else ():
            values = [array for part in parts if (array := part.values[metric.name]) is not None]
            if metric.kind == SINGLE:
                _reduce(self.save_path, self._analysis, metric, (joined([part.ids for part in parts]), joined(values)))
                continue
            total = Sum(metric.name)
            for array in values:
                total.add(array)
            _reduce(self.save_path, self._analysis, metric, total.total)


def _metrics(
    names: Sequence[str], functions: Sequence[Any], kinds: Sequence[str], dtypes: Sequence[Any]
) -> tuple[Metric, ...]:
    counts = {len(names), len(functions), len(kinds), len(dtypes)}
    if counts != {len(names)} or not names:
        raise ArgumentError(
            f"{len(names)} metric_names, {len(functions)} metric_functions, {len(kinds)} metric_types and "
            f"{len(dtypes)} metric_dtypes: pass at least one metric, and as many of each"
        )
    if len(set(names)) < len(names) or not all(_is_folder_name(name) for name in names):
        raise ArgumentError(f"metric_names {list(names)} are names of folders: they must differ and have no separator")
    for name, function, kind in zip(names, functions, kinds, strict=True):
        if kind not in KINDS:
            raise ArgumentError(f"metric {name!r} has type {kind!r}; types are {' and '.join(KINDS)}")
        if not callable(function):
            raise ArgumentError(f"the function of metric {name!r} is a {type(function).__name__}; pass a function")
    rows = zip(names, functions, kinds, dtypes, strict=True)
    return tuple(Metric(name, function, kind, _dtype(name, dtype)) for name, function, kind, dtype in rows)


def _is_folder_name(name: str) -> bool:
    return os.path.basename(name) == name and name not in ("", ".", "..")


def _dtype(name: str, dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    text = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    try:
        converted = np.dtype(text)
    except TypeError:  # such as bfloat16
        converted = None
    if converted is None or converted.kind not in "iu":
        raise ArgumentError(f"metric {name!r} has dtype {text} in metric_dtypes; the values of a metric are integers")
    return converted


def _analysis(
    dataset: Any,
    metrics: tuple[Metric, ...],
    batch_size: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    sample_indices: Any,
) -> Analysis:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(f"the dataset is a {type(dataset).__name__}; the analysis needs one with a length and indices")
    samples = len(dataset)
    if not samples:
        raise DataError("the dataset has no samples")
    if batch_size < 1:
        raise ArgumentError(f"batch_size {batch_size} must be at least 1")
    if sample_indices is None:
        return Analysis(dataset, metrics, batch_size, collate_fn, None)
    ids = np.asarray(sample_indices)
    if ids.shape != (samples,) or ids.dtype.kind not in "iu" or ids.min() < 0 or len(np.unique(ids)) < samples:
        raise ArgumentError(
            f"sample_indices has {ids.dtype.name} of shape {ids.shape}; pass different integers of at least 0, one for "
            f"each of the {samples} samples"
        )
    return Analysis(dataset, metrics, batch_size, collate_fn, ids.astype(np.int64))


def _shape(samples: int, num_workers: int, worker_id: int, num_threads: int) -> Shape:
    if num_workers < 1 or num_threads < 1 or not 0 <= worker_id < num_workers:
        raise ArgumentError(
            f"worker_id {worker_id} of num_workers {num_workers} with num_threads {num_threads}: workers are numbered "
            "from 0, and there is at least one of each"
        )
    return Shape(samples, num_workers, num_threads)


def _custom(*functions: Callable[..., Any] | None) -> _CustomMap | None:
    present = [function for function in functions if function is not None]
    if not present:
        return None
    if len(present) < len(functions):
        raise ArgumentError(
            "custom_map_init, custom_map_update and custom_map_finalize replace the map step together: pass all three"
        )
    return _CustomMap(*present)


def _run(tasks: dict[int, Any], worker: int, samples: int, deliver: Callable[[int, Any], None]) -> None:
    """Run the tasks of a worker; a single one in this process. Worker 0 shows a progress line on a terminal."""
    line = CountLine("analysis", "samples", samples) if worker == 0 else None
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done = count
        if line is not None:
            line.update(count)

    if len(tasks) == 1:
        ((thread, task),) = tasks.items()
        deliver(thread, task(report))
    else:
        in_processes(tasks, worker, report, deliver)
    if line is not None:
        line.close(samples)


def _ignore(thread: int, result: object) -> None:
    """Stand for the writing of results: custom functions write their own."""


def _write(files: list[MapFiles], thread: int, delivered: tuple[MapResult, str | None]) -> None:
    result, digest = delivered
    for pair in files:
        pair.write(thread, result.ids, result.values[pair.metric.name], digest)


def _reduce(save_path: StrPath, analysis: Analysis, metric: Metric, values: Any) -> None:
    """Write the results of one metric: of ids and values, or of a sum."""
    if metric.kind == SINGLE:
        check_ids(values[0], len(analysis.dataset), analysis.sample_indices)
    with Results(save_path, metric) as results:
        if metric.kind == SINGLE:
            results.single(*values)
        else:
            results.sum(values)


def _gathered(axis: Axis, results: list[MapResult]) -> list[list[MapResult]]:
    """Return the results of all ranks on the first rank, in rank order; nothing on the others."""
    if axis.size == 1:
        return [results]
    gathered: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    comm.gather_object(results, gathered, dst=axis.ranks[0], group=axis.group)
    return gathered or []


def _axis(group: Any) -> Axis:
    return world_axis("workers") if group is None else group_axis("workers", group)


def _elsewhere(rank: int, text: str) -> DataError:
    return DataError(f"rank {rank} could not analyze its samples: {text}")


def _nothing() -> None:
    """Stand for the work of another rank."""
