"""Iteration over an engine's loader, with the same number of steps on every rank."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from deepspeed.comm.collectives import scalars
from deepspeed.comm.collectives.collectives import SMALL
from deepspeed.comm.process_groups.axis import tag_of
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.engine.data_sampling import configured_sampler, sampling_of
from deepspeed.engine.engine_state import EngineState
from deepspeed.engine.metrics import Instruments
from deepspeed.errors import DataError
from deepspeed.foundation import progress_line
from deepspeed.foundation.pytree import leaves_in
from deepspeed.foundation.spans import LOADER, recorder
from deepspeed.optim.build import nearest
from deepspeed.sequence.batches import slice_batch

POLICIES = ("drop", "pad", "cycle")
# Flags of a rank's next batch: its loader failed, has just ended, had ended before, or has a batch; `ALONG`: the rank
# needs no data and makes as many steps as the others.
FAILED, ENDING, ENDED, READY = range(4)
ALONG = -1
Agree = Callable[[int], tuple[int, int]]


def count_samples(batch: Any) -> int:
    """Return the size of dim 0 of the first tensor or numpy array in a nested batch; 1 if there is none."""
    first = next(leaves_in(batch, (torch.Tensor, np.ndarray)), None)
    return int(first.shape[0]) if first is not None and len(first.shape) else 1


class _BatchReader:
    """Reader of this rank's loader (None: no data) that exchanges the result of each read with all ranks."""

    def __init__(self, loader: Iterable[Any] | None, agree: Agree) -> None:
        self.loader: Any = loader
        self.agree = agree
        self.batches: Iterator[Any] | None = None
        self.batch: Any = None
        self.steps = 0
        self.ended = False
        self.problem: Exception | None = None

    def advance(self, *, cycle: bool) -> int:
        """Read the next batch; returns the flag for the other ranks. `cycle`: restart a loader that has ended."""
        if self.loader is None:
            return ALONG
        if self.ended:
            return self.cycle() if cycle else ENDED
        if self._read():
            return READY
        self.ended = self.problem is None
        return ENDING if self.ended else FAILED

    def cycle(self) -> int:
        """Restart the loader if it has ended, and read its next batch; returns the flag for the other ranks."""
        if self.loader is None:
            return ALONG
        for _ in range(2):  # the second try starts the loader again
            if self.problem is None and self._read():
                return ENDED
        self.problem = self.problem or DataError(
            f"policy 'cycle': {type(self.loader).__name__} gives no batch when started again; it is an iterator or "
            "generator that can be read once (pass the object that makes it, or use policy 'pad')"
        )
        return FAILED

    def _read(self) -> bool:
        try:
            if self.batches is None:
                self.batches = iter(self.loader)
            with recorder.span(LOADER, "next batch"):
                self.batch = next(self.batches)
            return True
        except StopIteration:
            self.batches = None
        except Exception as problem:  # raised in exchange(), once every rank knows
            self.problem = problem
        return False

    def exchange(self, flag: int) -> tuple[int, int]:
        """Return the minimum and maximum flag of all ranks. All ranks must call this.

        If a loader has failed, its rank raises the loader's error, and the other ranks raise DataError.
        """
        low, high = self.agree(flag)
        if self.problem is not None:
            raise self.problem
        if low == FAILED:
            raise DataError(
                f"the data loader of another rank failed at batch {self.steps}; see the traceback of that rank"
            )
        return low, high


def equal_steps(
    loader: Iterable[Any] | None, *, agree: Agree, policy: str, weigh: Callable[[float], None]
) -> Iterator[Any]:
    """Yield batches so that all ranks make the same number of steps; all ranks must iterate.

    Args:
        loader: this rank's loader; None: the rank needs no data, and gets None whenever the others get a batch.
        agree: collective that returns the minimum and maximum of all ranks' flags, except `ALONG`.
        policy: "drop" ends with the shortest loader; "pad" ends with the longest, and the others repeat their last
            batch with weight 0; "cycle" ends with the longest, and the others restart.
        weigh: called with the number of samples of the next batch, 0 for a padded one.

    Raises:
        DataError: the policy is unknown, a rank has no batch at all, or the loader of another rank failed.
    """
    if policy not in POLICIES:
        raise DataError(f"policy {policy!r} is unknown{nearest(policy, POLICIES)}; use one of {', '.join(POLICIES)}")
    reader = _BatchReader(loader, agree)
    while True:
        low, high = reader.exchange(reader.advance(cycle=policy == "cycle"))
        if reader.steps == 0 and low == ENDING:
            whose = "this" if reader.ended else "another"
            raise DataError(f"the data loader of {whose} rank gives no batch at all; every rank needs data")
        if high <= ENDED or (policy == "drop" and low <= ENDED):
            return
        if policy == "cycle" and low == ENDING:
            # The loaders that ended restart and may fail; the other ranks must know that before they step.
            reader.exchange(reader.cycle() if reader.batches is None else READY)
        reader.steps += 1
        weigh(0.0 if reader.ended and policy == "pad" else float(count_samples(reader.batch)))
        yield reader.batch


class Window:
    """Iterator over the micro-batches between two updates; `samples` is the number of samples of each."""

    def __init__(self, batches: list[Any], samples: list[float]) -> None:
        self._batches, self.samples = deque(batches), samples

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Window:
        return self

    def __next__(self) -> Any:
        if not self._batches:
            raise StopIteration
        return self._batches.popleft()  # the caller then has the only reference


class TrainLoop:
    """Iteration over data loaders for an engine.

    Args:
        training: returns whether the engine is in train mode.
        flush: updates the parameters with the gradients of an incomplete accumulation window.
    """

    def __init__(
        self, state: EngineState, training: Callable[[], bool], flush: Callable[[], None], instruments: Instruments
    ) -> None:
        self._state, self._training, self._flush, self._instruments = state, training, flush, instruments
        self._loop_channel = state.axes.everyone.channel()
        self._agreements = 0

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Create a loader over this rank's part of a dataset; sequence-parallel ranks get slices of the same batch.

        With a sampler of `data_efficiency.data_sampling`, all ranks must call this.

        Args:
            dataset: map-style or iterable dataset.
            batch_size: samples per micro-batch; None: `train_micro_batch_size_per_gpu`.
            route: "train": shuffle; any other value: keep the order.
            pin_memory: page-lock batches if there is a device.
            data_sampler: replacement for the distributed sampler, and for that of `data_efficiency.data_sampling`.
            collate_fn: as in torch's DataLoader.
            num_local_io_workers: number of loader processes; None: 0.

        Raises:
            DataError: the dataset is unsuitable or empty; see `DeepSpeedDataLoader`.
            DeepSpeedConfigError: `data_efficiency.data_sampling` has a wrong key.
        """
        sequence, micro = self._state.axes.mesh.axis("sp"), batch_size or self._state.window.micro
        sampling = sampling_of(self._state)
        if data_sampler is None and route == "train":
            data_sampler = configured_sampler(self._state, dataset, micro)
            if data_sampler is not None and sampling is not None:
                pin_memory, num_local_io_workers = sampling.pin_memory, sampling.num_workers
        return DeepSpeedDataLoader(
            dataset,
            micro,
            rank=self._state.axes.data.rank,
            world=self._state.axes.data.size,
            sampler=data_sampler,
            shuffle=route == "train",
            pin_memory=pin_memory and self._state.device.type != "cpu",
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self._state.ds_config.dataloader_drop_last,
            carry_last=self._state.ds_config.dataloader_carry_last and route == "train",
            part=partial(slice_batch, axis=sequence) if sequence.size > 1 else None,
        )

    def loop(self, loader: Iterable[Any], policy: str = "drop", progress: bool | None = None) -> Iterator[Any]:
        """Yield batches of `loader`, the same number on every rank; all ranks must iterate.

        Gradients are weighted by real samples. In training, an incomplete window at the end is applied (`flush`).

        Args:
            loader: this rank's loader, of any length.
            policy: "drop": end with the shortest; "pad", "cycle": with the longest, while others repeat the last batch
                with weight 0 or restart.
            progress: show a live line on rank 0: step, loss of this rank, samples per second of all ranks, remaining
                time if the loader has a length, memory. None: only if the launcher has `--progress`.

        Raises:
            DataError: another rank's loader fails, a loader has no batch, or the policy is unknown.
        """
        with self._shown(loader, progress):
            try:
                yield from equal_steps(loader, agree=self.agree, policy=policy, weigh=self._weigh)
                if self._training() and self._state.components.optimizer is not None:
                    self._flush()
            finally:
                self._state.window.weigh(None)

    def windows(self, loader: Iterable[Any] | None, policy: str, progress: bool | None) -> Iterator[Window]:
        """Yield a pipeline's windows of `gradient_accumulation_steps` micro-batches; the last may have fewer.

        `loader` is None on ranks that need no data; other arguments and errors as in `loop`.
        """
        batches, samples = list[Any](), list[float]()
        with self._shown(loader, progress):
            for batch in equal_steps(loader, agree=self.agree, policy=policy, weigh=samples.append):
                batches.append(batch)
                del batch
                if len(batches) == self._state.window.steps:
                    window = Window(batches, list(samples))  # has the only references to the batches
                    batches.clear()
                    samples.clear()
                    yield window
            if batches:
                window = Window(batches, samples)
                batches.clear()
                yield window

    @contextlib.contextmanager
    def _shown(self, loader: Iterable[Any] | None, progress: bool | None) -> Iterator[None]:
        """Show a live progress line inside the context, if requested."""
        shown = (progress_line.requested() if progress is None else progress) and self._training()
        if shown:
            try:
                batches = loader.remaining() if isinstance(loader, DeepSpeedDataLoader) else len(loader)  # type: ignore[arg-type]
            except TypeError:
                batches = None
            self._instruments.start_progress(batches)
        try:
            yield
        finally:
            if shown:
                self._instruments.stop_progress()
                if progress_line.requested():  # also show the steps after the loop
                    self._instruments.start_progress(None)

    def agree(self, flag: int, label: str = "agreement on the next batch") -> tuple[int, int]:
        """Return (minimum, maximum) of all ranks' flags, except `ALONG`. All ranks must call this."""
        self._agreements += 1
        tag = tag_of(self._loop_channel, SMALL, self._agreements)
        table = scalars.current.table(self._state.axes.everyone, [float(flag)], tag, label, self._state.device)
        flags = [int(row[0]) for row in table if row[0] != ALONG]
        return min(flags), max(flags)

    def _weigh(self, samples: float) -> None:
        """Set the weight of the next micro-batch in training: its number of samples."""
        if self._training() and self._state.components.optimizer is not None:
            self._state.window.weigh(samples)
