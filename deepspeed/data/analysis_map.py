"""The map step of an analysis: metric functions over the batches of a range of samples, in one process or in several.

Ids and values are int64 throughout. A batch is made here from consecutive samples, so the number of its samples is
known whatever its form is: tensor, dict or tuple.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, get_all_start_methods, get_context
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from deepspeed.data.index_lists import Array
from deepspeed.errors import ArgumentError, DataError

Report = Callable[[int], None]

SINGLE, ACCUMULATED = "single_value_per_sample", "accumulate_value_over_samples"
_REPORT_S = 0.1  # between two reports of a process
_LARGEST = 2**63 - 1
_READS = 3  # of the samples of a digest: random ones are rarely three times the same


@dataclass(frozen=True)
class Metric:
    """A metric of an analysis.

    Attributes:
        name: name of its folder and files.
        function: returns, for a batch, one integer per sample [batch], or a tensor of integers to be summed.
        kind: `SINGLE` or `ACCUMULATED`.
        dtype: dtype that the function returns; None: any integer.
    """

    name: str
    function: Callable[[Any], Any]
    kind: str
    dtype: np.dtype[Any] | None = None

    @property
    def function_name(self) -> str:
        """Return the name of the function, or of its class if it is an object."""
        function = self.function
        while isinstance(function, partial):
            function = function.func
        return getattr(function, "__qualname__", type(function).__qualname__)

    def values(self, batch: Any, samples: int) -> Array:
        """Return the function's values for a batch, as int64.

        Raises:
            DataError: they have another dtype or shape than they must have, or do not fit int64.
        """
        result = self.function(batch)
        dtype = _dtype_name(result)
        if self.dtype is not None and dtype != self.dtype.name:
            raise DataError(f"metric {self.name!r} returned {dtype}, but metric_dtypes says {self.dtype.name}")
        if not dtype.startswith(("int", "uint")):
            raise DataError(f"metric {self.name!r} returned {dtype}; the values of a metric are integers")
        array = result.detach().cpu().numpy() if isinstance(result, torch.Tensor) else np.asarray(result)
        if array.dtype == np.uint64 and array.size and int(array.max()) > _LARGEST:
            raise DataError(f"metric {self.name!r} returned {int(array.max())}, which does not fit int64")
        if self.kind == SINGLE and array.shape != (samples,):
            raise DataError(
                f"metric {self.name!r} returned values of shape {array.shape} for a batch of {samples} samples; "
                f"{SINGLE} is one value for each, shape ({samples},)"
            )
        return array.astype(np.int64)


def _dtype_name(values: Any) -> str:
    return str(values.dtype).removeprefix("torch.") if hasattr(values, "dtype") else np.asarray(values).dtype.name


class Sum:
    """Sum of equally shaped int64 arrays of a metric."""

    def __init__(self, metric: str) -> None:
        self._metric = metric
        self._total: Array | None = None
        self._bound = 0  # no element of the sum is larger

    @property
    def total(self) -> Array | None:
        """Return the sum; None if nothing was added."""
        return self._total

    def add(self, values: Array) -> None:
        """Add an array.

        Raises:
            DataError: it has another shape than those before, or the sum does not fit int64.
        """
        if self._total is None:
            self._total, self._bound = values.copy(), _magnitude(values)
            return
        if values.shape != self._total.shape:
            raise DataError(
                f"metric {self._metric!r} returned shape {values.shape} after shape {self._total.shape}; "
                f"{ACCUMULATED} needs one shape for all batches, also for a smaller last one: reduce over the samples "
                "of the batch"
            )
        self._bound += _magnitude(values)
        if self._bound > _LARGEST:
            self._bound = _magnitude(self._total) + _magnitude(values)
            if self._bound > _LARGEST:
                raise DataError(f"the sum of metric {self._metric!r} does not fit int64")
        self._total += values


def _magnitude(values: Array) -> int:
    return max(abs(int(values.max())), abs(int(values.min()))) if values.size else 0


@dataclass
class MapResult:
    """Results of the samples of a range.

    Attributes:
        ids: int64 id of each sample, in order of position.
        values: by metric: int64 values in the order of `ids`, or the sum; None: a sum of no batches.
    """

    ids: Array
    values: dict[str, Array | None]


@dataclass(frozen=True)
class Analysis:
    """What is computed over which samples.

    Attributes:
        dataset: map-style dataset.
        metrics: the metrics.
        batch_size: number of samples of a batch.
        collate_fn: makes a batch of a list of samples; None: torch's default.
        sample_indices: int64 id of the sample at each position; None: the position.
    """

    dataset: Any
    metrics: tuple[Metric, ...]
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None
    sample_indices: Array | None

    def batches(self, start: int, stop: int) -> Iterator[tuple[int, int, Any]]:
        """Yield the position of the first sample, the number of samples, and the batch, for a range of positions."""
        loader = DataLoader(
            Subset(self.dataset, range(start, stop)),  # type: ignore[arg-type]
            self.batch_size,
            shuffle=False,
            collate_fn=self.collate_fn,
            generator=torch.Generator(),  # else the loader would draw a seed from the caller's generator
        )
        position = start
        for batch in loader:
            count = min(self.batch_size, stop - position)
            yield position, count, batch
            position += count

    def ids(self, batch: Any, position: int, count: int) -> Array:
        """Return the ids of a batch's samples: of its field `index`, else of `sample_indices`, else the positions.

        Raises:
            DataError: `index` has not one integer for each sample.
        """
        if isinstance(batch, Mapping) and "index" in batch:
            index = batch["index"]
            array = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
            if array.dtype.kind not in "iu" or array.size != count:
                raise DataError(
                    f"the field 'index' of a batch of {count} samples has {array.dtype.name} of shape {array.shape}; "
                    "it must have one integer id for each sample"
                )
            return array.reshape(-1).astype(np.int64)
        positions = np.arange(position, position + count, dtype=np.int64)
        return positions if self.sample_indices is None else self.sample_indices[positions]

    def run(self, start: int, stop: int, report: Report) -> MapResult:
        """Return the results of a range of positions.

        Args:
            start, stop: the range.
            report: called after each batch with the number of samples so far.

        Raises:
            DataError: a metric or `index` has wrong values (see `Metric.values`).
        """
        ids: list[Array] = []
        lists: dict[str, list[Array]] = {metric.name: [] for metric in self.metrics if metric.kind == SINGLE}
        sums = {metric.name: Sum(metric.name) for metric in self.metrics if metric.kind == ACCUMULATED}
        for position, count, batch in self.batches(start, stop):
            ids.append(self.ids(batch, position, count))
            for metric in self.metrics:
                values = metric.values(batch, count)
                if metric.kind == SINGLE:
                    lists[metric.name].append(values)
                else:
                    sums[metric.name].add(values)
            report(position + count - start)
        results: dict[str, Array | None] = {name: joined(parts) for name, parts in lists.items()}
        return MapResult(joined(ids), results | {name: part.total for name, part in sums.items()})


def sample_digest(dataset: Any) -> str | None:
    """Return a digest of the first, the middle and the last sample of a dataset: one for all processes that have it.

    Tensors, arrays, numbers, strings and bytes count, also in mappings, lists and tuples; of other objects, their type.

    Returns:
        Hexadecimal digits; None if the samples cannot be read here, or are others each time.
    """
    positions = sorted({0, len(dataset) // 2, len(dataset) - 1})
    digests = set()
    for _ in range(_READS):
        digest = hashlib.blake2b(digest_size=16)
        try:
            for position in positions:
                _update(digest, dataset[position])
        except Exception:  # a worker needs to read its own samples only
            return None
        digests.add(digest.hexdigest())
    return digests.pop() if len(digests) == 1 else None


def _update(digest: Any, sample: Any) -> None:
    """Add a sample to a digest; each part with its type and size, so that the parts cannot be confused."""
    content = b""
    if isinstance(sample, Mapping):
        sample = sorted(sample.items(), key=lambda item: str(item[0]))
    if isinstance(sample, torch.Tensor):
        sample = sample.detach().cpu()
        kind = f"{sample.dtype} {tuple(sample.shape)}"
        content = sample.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(sample, (np.ndarray, np.generic)) and not sample.dtype.hasobject:
        kind, content = f"{sample.dtype} {sample.shape}", sample.tobytes()
    elif isinstance(sample, (list, tuple, np.ndarray)):
        kind = f"list {len(sample)}"
        for element in sample:
            _update(digest, element)
    else:
        kind = type(sample).__name__
        if isinstance(sample, (str, bytes, bool, int, float, complex)):
            content = repr(sample).encode(errors="surrogatepass")
    digest.update(f"{kind} {len(content)}\n".encode() + content)


def joined(parts: Sequence[Array]) -> Array:
    """Return int64 arrays one after the other; an empty one if there are none."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


Task = Callable[[Report], Any]


def in_processes(tasks: Mapping[int, Task], worker: int, report: Report, deliver: Callable[[int, Any], None]) -> None:
    """Run tasks at the same time, each in a process of its own.

    Processes are forked, so tasks need not be picklable; without fork they are spawned. If a process fails, the others
    are ended.

    Args:
        tasks: by thread number; each is called with a report function and returns a picklable result.
        worker: number of the worker, for errors.
        report: called now and then with the number of samples of all processes so far.
        deliver: called with the thread number and the result of each task, when it is there.

    Raises:
        ArgumentError: a task cannot be sent to a spawned process.
        DataError: a task raised an error, or its process ended.
    """
    context: Any = get_context("fork" if "fork" in get_all_start_methods() else "spawn")
    pending: dict[Any, int] = {}
    processes: dict[int, Any] = {}
    counts = dict.fromkeys(tasks, 0)
    try:
        for thread, task in tasks.items():
            receiver, sender = context.Pipe(duplex=False)
            pending[receiver] = thread
            processes[thread] = context.Process(target=_child, args=(sender, task), daemon=True)
            _start(processes[thread])
            sender.close()  # else the end of the process would not end the pipe
        while pending:
            for receiver in connection.wait(list(pending)):
                thread = pending[receiver]  # type: ignore[index]
                state, content = _receive(receiver, processes[thread])
                if state == "failed":
                    raise DataError(f"worker {worker}, thread {thread}: {content}")
                if state == "done":
                    deliver(thread, content)
                    del pending[receiver]  # type: ignore[arg-type]
                else:
                    counts[thread] = content
            report(sum(counts.values()))
    finally:
        for process in processes.values():
            if process.pid is not None:
                if pending:
                    process.kill()  # terminate() would call a handler that the process has inherited
                process.join()


def _start(process: Any) -> None:
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            f"num_threads > 1 starts processes, and here only what can be pickled can be sent to them: {error}. Define "
            "the metric functions at the top of a module, or pass num_threads=1"
        ) from error


def _receive(receiver: Any, process: Any) -> tuple[str, Any]:
    """Return the next message of a process; "failed" with a text if it ended without a result."""
    try:
        return receiver.recv()
    except (EOFError, ConnectionResetError):
        process.join()
        code = process.exitcode
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "failed", f"the process {reason} before it had analyzed its samples"


def _child(sender: Any, task: Task) -> None:
    """Run a task in a process, and send reports and the result."""
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    reported = time.monotonic()

    def report(samples: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _REPORT_S:
            reported = time.monotonic()
            sender.send(("samples", samples))  # also ends a process whose parent has ended

    try:
        message = ("done", task(report))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        last = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
        message = ("failed", f"{last} ({os.path.basename(place.filename)}:{place.lineno}, in {place.name})")
    sender.send(message)
    sender.close()
