"""How an engine is fed: the loader of `training_data`, and loops that are equally long on every rank."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from deepspeed.comm import scalars
from deepspeed.comm.collectives import SMALL, tag_of
from deepspeed.engine.dataloader import DeepSpeedDataLoader
from deepspeed.engine.instruments import Instruments
from deepspeed.engine.loop import ALONG, equal_steps
from deepspeed.engine.state import EngineState
from deepspeed.monitor import progress as live
from deepspeed.sequence.batches import slice_batch


class Window:
    """Micro-batches between two updates, as an iterator; what is left of them counts.

    Args:
        batches: of this rank; None where it needs no data.
        samples: that each of them counts for, 0 for one that fills up.
    """

    def __init__(self, batches: list[Any], samples: list[float]) -> None:
        self._batches, self.samples = deque(batches), samples

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Window:
        return self

    def __next__(self) -> Any:
        if not self._batches:
            raise StopIteration
        return self._batches.popleft()  # who runs it has it alone


class Feeding:
    """The data side of an engine.

    Args:
        state: of the engine.
        training: whether it trains, and not evaluates.
        flush: applies a window that is not full.
        instruments: show how far it is.
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
        """A loader over this rank's share of a dataset; ranks of a sequence get slices of one batch.

        Args:
            dataset: map-style or iterable.
            batch_size: samples per micro-batch; None: `train_micro_batch_size_per_gpu`.
            route: "train" shuffles; anything else keeps the order.
            pin_memory: page-locked batches where there is a device.
            data_sampler: instead of the distributed sampler.
            collate_fn: as in torch's DataLoader.
            num_local_io_workers: loader processes.
        """
        sequence = self._state.axes.mesh.axis("sp")
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self._state.window.micro,
            rank=self._state.axes.data.rank,
            world=self._state.axes.data.size,
            sampler=data_sampler,
            shuffle=route == "train",
            pin_memory=pin_memory and self._state.device.type != "cpu",
            collate_fn=collate_fn,
            num_workers=num_local_io_workers or 0,
            drop_last=self._state.ds_config.dataloader_drop_last,
            part=partial(slice_batch, axis=sequence) if sequence.size > 1 else None,
        )

    def loop(self, loader: Iterable[Any], policy: str = "drop", progress: bool | None = None) -> Iterator[Any]:
        """Batches of `loader`, the same number on every rank; gradients are weighted by real samples.

        Args:
            loader: this rank's loader, of any length.
            policy: "drop" ends with the shortest, "pad" repeats the last batch with weight zero, "cycle" starts anew.
            progress: rank 0 shows one live line: step, loss of this rank, samples per second over all ranks, time left
                where the loader has a length, memory; None: where the launcher was asked for it (`--progress`).
        """
        with self._shown(loader, progress):
            try:
                yield from equal_steps(loader, agree=self.agree, policy=policy, weigh=self._weigh)
                if self._training() and self._state.components.optimizer is not None:
                    self._flush()
            finally:
                self._state.window.weigh(None)

    def windows(self, loader: Iterable[Any] | None, policy: str, progress: bool | None) -> Iterator[Window]:
        """The same as windows of a pipeline, each as many micro-batches as are accumulated; the last may have fewer.

        Args:
            loader: this rank's loader; None where its stage needs no data.
            policy: see `loop`.
            progress: see `loop`.
        """
        batches, samples = list[Any](), list[float]()
        with self._shown(loader, progress):
            for batch in equal_steps(loader, agree=self.agree, policy=policy, weigh=samples.append):
                batches.append(batch)
                del batch
                if len(batches) == self._state.window.steps:
                    window = Window(batches, list(samples))  # which alone holds them while it is run
                    batches.clear()
                    samples.clear()
                    yield window
            if batches:
                window = Window(batches, samples)
                batches.clear()
                yield window

    @contextlib.contextmanager
    def _shown(self, loader: Iterable[Any] | None, progress: bool | None) -> Iterator[None]:
        """A live line inside, where one is asked for."""
        shown = (live.asked() if progress is None else progress) and self._training()
        if shown:
            self._instruments.start_progress(_length(loader))
        try:
            yield
        finally:
            if shown:
                self._instruments.stop_progress()
                if live.asked():  # what follows the loop is shown too
                    self._instruments.start_progress(None)

    def agree(self, flag: int, label: str = "agreement on the next batch") -> tuple[int, int]:
        """(least, greatest) of all ranks' flags, without those that only go along."""
        self._agreements += 1
        tag = tag_of(self._loop_channel, SMALL, self._agreements)
        table = scalars.current.table(self._state.axes.everyone, [float(flag)], tag, label, self._state.device)
        flags = [int(row[0]) for row in table if row[0] != ALONG]
        return min(flags), max(flags)

    def _weigh(self, samples: float) -> None:
        """The next micro-batch counts for so many samples."""
        if self._training() and self._state.components.optimizer is not None:
            self._state.window.weigh(samples)


def _length(loader: Iterable[Any] | None) -> int | None:
    """Batches of a loader; None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
