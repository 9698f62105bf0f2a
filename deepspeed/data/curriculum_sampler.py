"""Sampling by difficulty: each step draws from the samples that its difficulties allow, by indexes of an analysis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from deepspeed.data.curriculum import CurriculumScheduler, Difficulty
from deepspeed.data.index_lists import Array
from deepspeed.data.indexed_dataset import MMapIndexedDataset, data_file_path
from deepspeed.data.sample_order import ComputedPermutation
from deepspeed.errors import DataError, DeepSpeedConfigError, UsageError
from deepspeed.foundation.log import log_rank0

TYPES = ("value", "percentile")


class DifficultyIndex:
    """One measure of difficulty: its schedule, and which samples a difficulty allows.

    Args:
        name: name of the metric.
        config: its block of `curriculum_metrics`.
        samples: number of samples of the dataset.

    Raises:
        DeepSpeedConfigError: a key is missing or wrong.
        FileNotFoundError, DataError: an index is missing, damaged or of another dataset.
    """

    def __init__(self, name: str, config: Mapping[str, Any], samples: int) -> None:
        self.name, self.scheduler = name, CurriculumScheduler(config)
        self.max_difficulty = config["max_difficulty"]
        self.single_cluster = config.get("clustering_type", "schedule_based") == "single_cluster"
        self.by = config.get("difficulty_type")
        self._rows: Any = ()
        self._bounds, self._values = np.zeros(1, np.int64), np.empty(0, np.int64)
        if self.single_cluster:
            return
        if self.by not in TYPES:
            raise DeepSpeedConfigError(
                f"curriculum metric {name}: `difficulty_type` is {self.by!r}; it has to be one of {', '.join(TYPES)}"
            )
        self._rows_path = self._path(config, "index_to_sample_path")
        self._rows = MMapIndexedDataset(self._rows_path)
        self._check_ids(samples)
        self._bounds = np.concatenate([[0], np.cumsum(self._rows.sizes, dtype=np.int64)])
        if self.by == "value":
            values = MMapIndexedDataset(self._path(config, "index_to_metric_path"))
            self._values = np.array([int(values[row][0]) for row in range(len(values))], np.int64)
            if len(self._values) != len(self._rows) or (np.diff(self._values) <= 0).any():
                raise DataError(
                    f"curriculum metric {name}: `index_to_metric_path` has {len(self._values)} values for "
                    f"{len(self._rows)} rows of `index_to_sample_path`; it needs one for each, in ascending order"
                )

    def _check_ids(self, samples: int) -> None:
        count = int(self._rows.sizes.sum(dtype=np.int64))
        path = data_file_path(self._rows_path)
        ids = np.memmap(path, self._rows.dtype, "r", shape=(count,)) if count else np.zeros(1, np.int64)
        low, high = int(ids.min()), int(ids.max())
        if count > samples or low < 0 or high >= samples:
            raise DataError(
                f"curriculum metric {self.name}: the index has {count} samples, with ids from {low} to {high}, and the "
                f"dataset {samples}; it was made of another dataset"
            )
        if count < samples:
            log_rank0(f"curriculum metric {self.name}: {samples - count} samples of the dataset are not in it")

    def _path(self, config: Mapping[str, Any], key: str) -> str:
        if not config.get(key):
            raise DeepSpeedConfigError(f"curriculum metric {self.name}: `{key}` is missing")
        return config[key]

    def __len__(self) -> int:
        """Return the number of samples in the index."""
        return int(self._bounds[-1])

    def position(self, difficulty: Difficulty | None) -> int:
        """Return how many samples of the index, from the easiest on, a difficulty allows; None allows none."""
        if difficulty is None:
            return 0
        if self.by == "value":
            return int(self._bounds[np.searchsorted(self._values, difficulty, side="right")])
        share = len(self) // int(self.max_difficulty)  # samples of each percentile; the last one has the rest
        return len(self) if difficulty >= self.max_difficulty else min(len(self), int(difficulty * share))

    def samples(self, start: int, stop: int) -> Array:
        """Return samples of the index, from the easiest on."""
        parts = []
        first = int(np.searchsorted(self._bounds, start, side="right")) - 1
        for row in range(first, len(self._rows)):
            low, high = max(start, int(self._bounds[row])), min(stop, int(self._bounds[row + 1]))
            if low >= stop:
                break
            parts.append(self._rows[row][low - self._bounds[row] : high - self._bounds[row]])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def easiest(self) -> str:
        """Return a description of the easiest samples, for errors."""
        if len(self._values):
            return f"its smallest value is {self._values[0]}"
        return (
            f"{len(self)} samples give {len(self) // int(self.max_difficulty)} for each of {self.max_difficulty} points"
        )


@dataclass(frozen=True)
class SamplerProgress:
    """State of a sampler between two global batches.

    Attributes:
        step: number of global batches so far.
        consumed: number of samples in them.
        positions: for each cluster, how many samples were taken from it.
        size: samples of a global batch.
    """

    step: int = 0
    consumed: int = 0
    positions: tuple[int, ...] = field(default=())
    size: int = 0


class _Clusters:
    """Samples that a step newly allows, in the order of the steps; the same on all ranks, computed from the indexes."""

    def __init__(self, metrics: list[DifficultyIndex], samples: int, seed: int) -> None:
        self.metrics, self.samples, self.seed = metrics, samples, seed
        self.ids: list[Array] = []
        self._begun: list[int] = []  # step at which each cluster was formed
        self._step, self._difficulties = 0, dict[str, Difficulty]()
        self._used = np.zeros(samples, bool)
        self._scheduled = [metric for metric in metrics if not metric.single_cluster]

    def difficulties(self, step: int) -> dict[str, Difficulty]:
        """Return the difficulty of each metric at a step, from 1 on."""
        return {metric.name: metric.scheduler.get_difficulty(step) for metric in self.metrics}

    def count(self, step: int) -> int:
        """Return how many clusters there are at a step; forms those that are missing."""
        while self._step < step:
            self._step += 1
            difficulties = self.difficulties(self._step)
            if difficulties != self._difficulties:
                self._form(difficulties)
                self._difficulties = difficulties
        return int(np.searchsorted(self._begun, step, side="right"))

    def _form(self, difficulties: dict[str, Difficulty]) -> None:
        if not self._scheduled:
            new = np.arange(0 if self.ids else self.samples)
        elif len(self._scheduled) == 1:
            (metric,) = self._scheduled
            before = metric.position(self._difficulties.get(metric.name))
            new = metric.samples(before, max(before, metric.position(difficulties[metric.name])))
            new = new[~self._used[new]]
        else:
            allowed = ~self._used
            for metric in self._scheduled:
                of_metric = np.zeros(self.samples, bool)
                of_metric[metric.samples(0, metric.position(difficulties[metric.name]))] = True
                allowed &= of_metric
            new = np.flatnonzero(allowed)
        self._used[new] = True
        if len(new):
            self.ids.append(new)
            self._begun.append(self._step)
        elif not self.ids:
            smallest = "; ".join(
                f"{metric.name} {difficulties[metric.name]} ({metric.easiest()})" for metric in self._scheduled
            )
            raise DataError(f"curriculum: no sample is as easy as the first difficulty: {smallest}")

    def take(self, cluster: int, position: int, count: int) -> Array:
        """Return samples of a cluster, which starts again in another order when it is at its end."""
        ids = self.ids[cluster]
        cycles, places = np.divmod(np.arange(position, position + count), len(ids))
        taken = np.empty(count, np.int64)
        for cycle in np.unique(cycles):
            of_cycle = cycles == cycle
            order = ComputedPermutation(len(ids), self.seed, cluster, int(cycle))
            taken[of_cycle] = ids[order(places[of_cycle])]
        return taken


class CurriculumSampler(Sampler[list[int]]):
    """Batch sampler of one rank: micro-batches from clusters of samples, which are added as difficulties grow.

    Each global batch takes from every cluster a number drawn by the clusters' sizes. All ranks compute the same batch,
    without communication; the position counts samples, so a run goes on with another number of ranks.

    Args:
        metrics: blocks of `curriculum_metrics` by name.
        samples: number of samples of the dataset.
        micro: samples of a micro-batch on one rank.
        rank: data-parallel rank.
        world: number of data-parallel ranks.
        accumulation: micro-batches of each rank in a step.
        seed: seed of all draws.
        epochs: the sampler ends after this many times the samples.

    Attributes:
        start: number of samples that all ranks together have read before the next pass.

    Raises:
        DeepSpeedConfigError: a metric has a missing or wrong key, or there is none.
        DataError: an index does not fit the dataset or is damaged, or there are too few samples.
        FileNotFoundError: an index is missing.
    """

    def __init__(
        self,
        metrics: Mapping[str, Mapping[str, Any]],
        samples: int,
        micro: int,
        rank: int = 0,
        world: int = 1,
        accumulation: int = 1,
        seed: int = 1234,
        epochs: int = 1,
    ) -> None:
        if not metrics:
            raise DeepSpeedConfigError("curriculum_learning: `curriculum_metrics` is missing")
        self.metrics = {name: DifficultyIndex(name, config, samples) for name, config in metrics.items()}
        self._clusters = _Clusters(list(self.metrics.values()), samples, seed)
        self.micro, self.rank, self.world, self.seed = micro, rank, world, seed
        self.total, self._size = samples * epochs, micro * world * accumulation
        if self.total < self._size:
            raise DataError(f"{samples} samples in {epochs} epochs are fewer than a global batch of {self._size}")
        self.start = 0
        self._base = self._latest = SamplerProgress(size=self._size)
        if not any(metric.scheduler.kind == "custom" for metric in self.metrics.values()):
            self._clusters.count(1)  # a first difficulty without samples is refused now

    def set_schedules(self, functions: Mapping[str, Callable[[int], Difficulty]]) -> None:
        """Set the functions from step to difficulty of metrics with the schedule "custom".

        Raises:
            UsageError: a metric does not exist, or has another schedule.
        """
        for name, function in functions.items():
            if name not in self.metrics:
                raise UsageError(f"there is no curriculum metric {name!r}; metrics are {', '.join(self.metrics)}")
            self.metrics[name].scheduler.set_custom_get_difficulty(function)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the sampler is one stream over all epochs."""

    def after(self, seen: int) -> tuple[int, int]:
        """Return where a pass goes on after its end: at its beginning."""
        self._base = self._latest = SamplerProgress(size=self._size)
        return 1, 0

    def before(self, epoch: int, seen: int, batches: int, size: int) -> tuple[int, int]:
        """Return epoch and position `batches` batches before a position; `size`: samples of each, of all ranks."""
        return epoch, max(0, seen - batches * size)

    def __len__(self) -> int:
        """Return the number of micro-batches of a pass on each rank."""
        return max(0, self._stop() - self.start) // (self.micro * self.world)

    def _stop(self) -> int:
        """Return where the stream ends: after the last whole global batch, from the one that is under way on."""
        begun = self._base.consumed if self._base.consumed <= self.start else 0
        if begun < self.start and begun + self._base.size > self.start:  # in a batch, perhaps of another size
            begun += self._base.size
        return begun + max(0, self.total - begun) // self._size * self._size

    def _batch(self, progress: SamplerProgress) -> tuple[Array, SamplerProgress]:
        """Return the samples of the global batch after a progress, and the progress after it."""
        step = progress.step + 1
        count = self._clusters.count(step)
        sizes = np.array([len(ids) for ids in self._clusters.ids[:count]], np.float64)
        draw = np.random.default_rng([self.seed, step])
        numbers = draw.multinomial(progress.size, sizes / sizes.sum())
        positions = [*progress.positions, *[0] * (count - len(progress.positions))]
        parts = [self._clusters.take(i, positions[i], int(n)) for i, n in enumerate(numbers) if n]
        after = tuple(position + int(number) for position, number in zip(positions, numbers, strict=True))
        return draw.permutation(np.concatenate(parts)), SamplerProgress(
            step, progress.consumed + progress.size, after, self._size
        )

    def _at(self, seen: int) -> SamplerProgress:
        """Return the progress before the global batch that has sample number `seen`."""
        progress = self._latest if self._latest.consumed <= seen else self._base
        if progress.consumed > seen:
            progress = SamplerProgress(size=self._size)
        while progress.consumed < seen and progress.consumed + progress.size <= seen:
            progress = self._batch(progress)[1]
        if progress.consumed == seen:  # no sample of the next batch is used: it has this run's size
            progress = replace(progress, size=self._size)
        self._latest = progress
        return progress

    def __iter__(self) -> Iterator[list[int]]:
        progress = self._at(self.start)
        stop, offset = self._stop(), self.start - progress.consumed
        together = self.micro * self.world
        while progress.consumed + progress.size <= stop:
            ids, progress = self._batch(progress)
            for first in range(offset, len(ids) - together + 1, together):
                start = first + self.rank * self.micro
                yield ids[start : start + self.micro].tolist()
            offset = 0

    def state_at(self, seen: int) -> dict[str, Any]:
        """Return the state after `seen` samples, which scripts read, and which `load` takes."""
        progress = self._at(seen)
        step = progress.step + (1 if seen > progress.consumed or not progress.step else 0)
        return {
            "batch": progress.size,
            "consumed_samples": progress.consumed,
            "curriculum_step": progress.step,
            "current_difficulties": self._clusters.difficulties(max(1, step)),
            "data_cluster_current_position": list(progress.positions),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_at`."""
        self._base = self._latest = SamplerProgress(
            state["curriculum_step"],
            state["consumed_samples"],
            tuple(state["data_cluster_current_position"]),
            state["batch"],
        )
