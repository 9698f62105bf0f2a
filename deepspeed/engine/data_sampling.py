"""Loaders by the block `data_efficiency.data_sampling`: samples by difficulty, batches of equal tokens."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, default_collate

from deepspeed.comm.collectives.same_error import raise_together
from deepspeed.config.sections.data import DataSampling, DynamicBatching
from deepspeed.data.analyzer import DistributedDataAnalyzer
from deepspeed.data.curriculum_sampler import CurriculumSampler
from deepspeed.data.dynamic_batches import TokenBatchSampler, VariableBatchSizeLR
from deepspeed.data.index_lists import Array
from deepspeed.data.indexed_dataset import MMapIndexedDataset
from deepspeed.data.loader import DeepSpeedDataLoader, own_loader
from deepspeed.engine.engine_state import EngineState
from deepspeed.errors import DataError, DeepSpeedConfigError, UsageError
from deepspeed.foundation.log import warn_once

_FUNCTION = "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"


def sampling_of(state: EngineState) -> DataSampling | None:
    """Return the block `data_efficiency.data_sampling`, unless it or the block around it is switched off."""
    block = state.ds_config.top.data_efficiency
    sampling = block.data_sampling
    if False not in (block.enabled, sampling.enabled):
        return sampling
    if sampling.curriculum_learning.enabled or sampling.dynamic_batching.enabled:
        off = "data_efficiency" if block.enabled is False else "data_efficiency.data_sampling"
        warn_once(f"samplers of data_efficiency.data_sampling have no effect, since {off}.enabled is false")
    return None


def configured_sampler(state: EngineState, dataset: Any, micro: int) -> CurriculumSampler | TokenBatchSampler | None:
    """Return the sampler that the JSON asks for, or None. All ranks must call this.

    Raises:
        DeepSpeedConfigError: a key is missing or wrong, or two samplers are enabled.
        DataError: the dataset has no length, its lengths are unknown, an index does not fit it, or another rank failed.
        FileNotFoundError: an index is missing.
    """
    sampling = sampling_of(state)
    curriculum = sampling is not None and sampling.curriculum_learning.enabled
    dynamic = sampling is not None and sampling.dynamic_batching.enabled
    if sampling is None or not (curriculum or dynamic):
        return None
    if curriculum and dynamic:
        raise DeepSpeedConfigError("data_sampling: curriculum_learning and dynamic_batching exclude each other")
    if not hasattr(dataset, "__len__"):
        raise DataError(f"data_sampling chooses samples by index, and a {type(dataset).__name__} has no length")

    def make() -> CurriculumSampler | TokenBatchSampler:
        if dynamic:
            return _token_sampler(state, sampling.dynamic_batching, _lengths(sampling.dynamic_batching, dataset))
        metrics = sampling.curriculum_learning.model_dump()["curriculum_metrics"]
        set_keys = {name: {k: v for k, v in metric.items() if v is not None} for name, metric in metrics.items()}
        data, seed = state.axes.data, state.ds_config.top.data_efficiency.seed
        return CurriculumSampler(
            set_keys, len(dataset), micro, data.rank, data.size, state.window.steps, seed, sampling.num_epochs
        )  # fmt: skip

    return raise_together(
        state.axes.everyone, make, lambda rank, text: DataError(f"rank {rank} has no sampler of training_data: {text}")
    )


def _token_sampler(state: EngineState, block: DynamicBatching, lengths: Any) -> TokenBatchSampler:
    if block.max_tokens is None:
        raise DeepSpeedConfigError("data_efficiency.data_sampling.dynamic_batching: `max_tokens` is missing")
    packs = state.window.micro  # a micro-batch has this many packs of `max_tokens`
    return TokenBatchSampler(
        lengths,
        block.max_tokens * packs,
        state.axes.data.rank,
        state.axes.data.size,
        state.window.steps,
        block.sequence_picking_order,
        state.ds_config.top.data_efficiency.seed,
        min_batch_size=block.min_batch_size,
        max_batch_size=None if block.max_batch_size is None else block.max_batch_size * packs,
    )


def _lengths(block: DynamicBatching, dataset: Any, sizes: Any = None) -> Array:
    """Return the number of tokens of each sample: those that are given, of an analysis, or of an indexed dataset.

    Raises:
        DataError: they are unknown, or of another dataset.
    """
    where = _lengths_path(block)
    if sizes is None and where and MMapIndexedDataset.exists(where):
        index = MMapIndexedDataset(where)
        if len(index) and not bool((index.sizes == 1).all()):
            raise DataError(f"dynamic_batching: {where} is no result of an analysis: its rows have several numbers")
        sizes = np.fromfile(f"{where}.bin", index.dtype, len(index)).astype(np.int64)
    elif sizes is None:
        sizes = getattr(dataset, "sizes", None)
    if sizes is None:
        raise DataError(
            f"dynamic_batching needs the lengths of the samples: analyze them and set `metrics_path`"
            f"{f' (there is no {where}.idx)' if where else ''}, or make the loader by {_FUNCTION}(dataset, engine, "
            "dataset_seqlens=[…])"
        )
    if len(sizes) != len(dataset):
        raise DataError(
            f"dynamic_batching: there are {len(sizes)} lengths{f' in {where}' if where else ''} for {len(dataset)} "
            "samples; they are of another dataset"
        )
    return np.asarray(sizes)


def _lengths_path(block: DynamicBatching) -> str | None:
    return os.path.join(block.metrics_path, "seqlen", "seqlen_sample_to_metric") if block.metrics_path else None


def _measured(block: DynamicBatching, dataset: Any, lengths_of: Callable[[Any], Any], collate: Any) -> list[int] | None:
    """Measure the lengths of the samples.

    With `metrics_path`, all ranks measure a part and save it there, unless it is there already; then this returns None.
    """
    where = _lengths_path(block)
    if where is None:
        return [int(lengths_of(collate([dataset[index]]))[0]) for index in range(len(dataset))]
    if not MMapIndexedDataset.exists(where):
        DistributedDataAnalyzer(
            dataset, batch_size=64, metric_names=["seqlen"], metric_functions=[lengths_of],
            metric_types=["single_value_per_sample"], save_path=str(block.metrics_path), collate_fn=collate,
            device="cpu",
        ).run_map_reduce()  # fmt: skip
    return None


class _ConstantRates:
    """Scheduler that leaves the rates of an optimizer as they are."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def scaled_scheduler(state: EngineState, loader: Any, scheduler: Any) -> Any:
    """Return a scheduler with rates scaled by the size of each step's batch, if the JSON asks for it, else `scheduler`.

    Rates are those for `train_batch_size` samples. Without a scheduler, those of the optimizer are scaled.
    """
    sampling = sampling_of(state)
    if sampling is None or not isinstance(getattr(loader, "custom_sampler", None), TokenBatchSampler):
        return scheduler
    base = state.window.micro * state.window.steps * state.axes.data.size
    method = sampling.dynamic_batching.lr_scaling_method
    optimizer = state.components.optimizer
    if scheduler is None and optimizer is None:
        return None
    if isinstance(scheduler, VariableBatchSizeLR):  # of an earlier loader
        scheduler = scheduler.unscaled()
    inner = _ConstantRates(optimizer) if scheduler is None else scheduler
    scaled = VariableBatchSizeLR(inner, base, loader.next_step_size, loader, method)
    loader.before_batch = scaled.rescale  # after a step that the loss scaler skipped, no scheduler steps
    return scaled


class _Numbered(Dataset[Any]):
    """Samples with their indices, so that a collate function can know lengths."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self.dataset[index]


class _PaddedCollate:
    """Collate function that pads each sample to the longest of its micro-batch before it calls another one."""

    def __init__(self, lengths: Any, pad: Callable[[Any, int], Any], collate: Callable[[list[Any]], Any]) -> None:
        self.lengths, self.pad, self.collate = lengths, pad, collate

    def __call__(self, numbered: list[tuple[int, Any]]) -> Any:
        longest = int(max(self.lengths[index] for index, _ in numbered))
        return self.collate([self.pad(sample, longest) for _, sample in numbered])


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Sequence[int]] | None = None,
) -> tuple[DeepSpeedDataLoader, Any, dict[str, Any]]:
    """Create a loader of micro-batches of equal tokens and a scheduler whose rates follow the batches' sizes.

    All ranks must call this. It sets `engine.training_dataloader`, whose position is saved in checkpoints.

    Args:
        dataset: map-style dataset.
        engine: the engine.
        dataset_seqlens: number of tokens of each sample; None: read from the analysis in `metrics_path`, else measured
            by `batch_seqlens_fn` (and saved in `metrics_path` if it is set), else the dataset's `sizes`.
        dataset_filter_ids: indices of the samples to use; None: all.
        dataloader_collate_fn: makes a batch of a list of samples; None: torch's.
        sample_padding_fn: (sample, length) → padded sample; None: `dataloader_collate_fn` pads.
        batch_seqlens_fn: batch of `dataloader_collate_fn` → numbers of tokens of its samples.

    Returns:
        Loader; scheduler to set as `engine.lr_scheduler`; sizes: "batch_sizes" of the steps of the first epoch,
        "dataset_seqlens".

    Raises:
        UsageError: the JSON does not enable `data_efficiency.data_sampling.dynamic_batching`.
        DeepSpeedConfigError: `max_tokens` is missing.
        DataError: lengths are unknown or wrong.
    """
    state: EngineState = engine._state
    sampling = sampling_of(state)
    if sampling is None or not sampling.dynamic_batching.enabled:
        raise UsageError(f"{_FUNCTION}: set `enabled` in data_efficiency.data_sampling.dynamic_batching")
    block = sampling.dynamic_batching
    collate: Any = dataloader_collate_fn or default_collate
    if dataset_seqlens is None and batch_seqlens_fn is not None:
        dataset_seqlens = _measured(block, dataset, batch_seqlens_fn, collate)

    def make() -> TokenBatchSampler:
        lengths = _lengths(block, dataset, dataset_seqlens)
        return _token_sampler(
            state, block, lengths if dataset_filter_ids is None else lengths[list(dataset_filter_ids)]
        )

    sampler = raise_together(
        state.axes.everyone, make, lambda rank, text: DataError(f"rank {rank} has no batches of tokens: {text}")
    )
    if dataset_filter_ids is not None:
        dataset = Subset(dataset, list(dataset_filter_ids))
    if sample_padding_fn is not None:
        collate = _PaddedCollate(sampler.lengths, sample_padding_fn, collate)
        dataset = _Numbered(dataset)
    loader = engine.training_dataloader = engine.deepspeed_io(
        dataset, data_sampler=sampler, collate_fn=collate, num_local_io_workers=sampling.num_workers
    )
    sizes = {"batch_sizes": sampler.step_sizes.tolist(), "dataset_seqlens": sampler.lengths.tolist()}
    return loader, scaled_scheduler(state, loader, engine.lr_scheduler), sizes


def loader_of(state: EngineState) -> DeepSpeedDataLoader:
    """Return the engine's loader; raises UsageError if it has none of its own."""
    loader = own_loader(state.training_dataloader)
    if loader is None:
        raise UsageError("the engine has no loader of training_data: pass training_data to initialize")
    return loader
