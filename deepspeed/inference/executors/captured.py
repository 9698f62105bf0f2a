"""Captured passes: passes of next tokens, and of drafts, as CUDA graphs by padded number of sequences.

A graph holds the launches of one `PackedDecoder.compute` with `choose` behind it. A pass then is one copy of its inputs
to the device, one launch, and one copy of its tokens back. Addresses in a graph are fixed: inputs and outputs lie in
memory of their own, and when weights, pages or the rotation table have moved, the graphs are captured again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.foundation.log import describe_error, log_rank0, warn_once
from deepspeed.inference.executors.pass_inputs import PassInputs, PassSizes, Tiling
from deepspeed.inference.executors.ragged_batch import BatchSlice, ChosenTokens, RaggedBatch
from deepspeed.tensor_parallel.layers import axis_of_slices

MOST_GRAPHS = 12
MOST_PAGES = 1 << 18  # page numbers in the block table of a graph: 1 MiB, twice
FEW_REPLAYS, MOST_SHORT_LIVES = 64, 3  # so many captures with fewer replays in a row: graphs are not worth it


class Capturable(Protocol):
    """An executor whose passes can be captured; `PackedDecoder` documents the members."""

    model: Any
    store: Any
    tiling: Tiling
    version: int
    block: int
    samples: bool
    captured: Any

    @property
    def device(self) -> torch.device: ...
    @property
    def vocabulary(self) -> int: ...
    def native(self, batch: RaggedBatch) -> bool: ...
    def reserve(self, length: int) -> None: ...
    def inputs(self, sizes: PassSizes) -> PassInputs: ...
    def compute(self, inputs: PassInputs) -> torch.Tensor: ...
    def choose(self, inputs: PassInputs, logits: torch.Tensor) -> torch.Tensor: ...
    def finish(self, batch: RaggedBatch, inputs: PassInputs, logits: torch.Tensor) -> None: ...


@dataclass(frozen=True)
class CapturedPass:
    """One graph with its inputs and outputs; the outputs are overwritten by the next replay.

    Args:
        graph: the graph.
        inputs: its inputs.
        logits: logits, [wanted rows with padding, vocabulary].
        tokens: chosen tokens, int32 [wanted rows with padding]; None: the executor chooses none on the device.
    """

    graph: Any
    inputs: PassInputs
    logits: torch.Tensor
    tokens: torch.Tensor | None


def padded_shapes(sequences: int, drafts: int = 0, drafting: int = 0) -> list[tuple[int, int]]:
    """Return the shapes of the passes to capture, (sequences, rows of each), the fewest rows first; at most 12.

    Numbers of sequences are powers of two, and the largest number itself.

    Args:
        sequences: largest number of sequences of a pass.
        drafts: largest number of draft tokens of a sequence; such passes also serve sequences without drafts.
        drafting: largest number of sequences in a pass with drafts.
    """
    numbers = [1 << power for power in range(sequences.bit_length()) if 1 << power < sequences] + [sequences]
    most = min(drafting, sequences) if drafts else 0
    drafted = {number for number in numbers if number < most} | ({most} if most else set())
    shapes = [(number, drafts + 1) for number in drafted] + [(number, 1) for number in numbers if number > most]
    return sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape))[:MOST_GRAPHS]


class PassGraphs:
    """Graphs of an executor's passes, all in one memory pool.

    Args:
        executor: the executor.
        shapes: shapes of the passes, as `padded_shapes` returns them.
        length: longest context, in tokens. With many sequences a graph's contexts are shorter: block tables have at
            most 2^18 page numbers.

    Attributes:
        bytes: device memory that the graphs hold, with their inputs and outputs.
        replays: number of passes that were replayed.
    """

    def __init__(self, executor: Capturable, shapes: Sequence[tuple[int, int]], length: int) -> None:
        self._executor, self._shapes, self._length = executor, shapes, length
        self._passes: list[CapturedPass] = []
        self._version: int | None = None
        self._off = False
        self._short_lives = self._replays_before = 0
        self.bytes = self.replays = 0

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return len(self._passes)

    def capture(self) -> None:
        """Capture all passes; the executor's `native` was called. If that fails, passes run eagerly from now on."""
        accelerator, executor = get_accelerator(), self._executor
        name, device = type(executor.model).__name__, executor.device
        self.drop()
        begun, pool, stream = time.perf_counter(), None, accelerator.Stream(device)
        accelerator.empty_cache()
        before = accelerator.memory_reserved(device.index)
        try:
            executor.reserve(self._length)
            for sequences, count in reversed(self._shapes):  # the largest first: smaller ones fit into its memory
                sizes = _sizes(executor, sequences, count, self._length)
                self._passes.insert(0, _captured(executor, sizes, pool, stream))
                pool = self._passes[0].graph.pool()
        except Exception as error:  # of the driver or the allocator: passes need no graphs
            self.drop()
            self._off = True
            reason = describe_error(error)
            warn_once(f"{name}: passes of next tokens run without CUDA graphs, whose capture failed: {reason}")
            return
        accelerator.empty_cache()
        self.bytes = accelerator.memory_reserved(device.index) - before
        self._version, self._replays_before = executor.version, self.replays
        took = time.perf_counter() - begun
        log_rank0(f"{name}: {self.graphs} CUDA graphs of passes captured in {took:.1f} s, {self.bytes / 1e6:.0f} MB")

    def drop(self) -> None:
        """Free the graphs and their memory; the next pass captures them again."""
        self._passes, self._version, self.bytes = [], None, 0

    def run(self, batch: RaggedBatch) -> torch.Tensor | None:
        """Replay a batch: return its logits, [rows with logits, vocabulary], and set `batch.sampling.chosen`.

        The executor's `native(batch)` was called. The logits are valid until the next pass.

        Returns:
            None if the batch has to run eagerly: no graph has room for it, or there are none.
        """
        if self._off or not self._current():
            return None
        executor = self._executor
        sizes = PassSizes.of(batch.spans, executor.store.size, executor.tiling)
        chosen = next((each for each in self._passes if sizes.fits(each.inputs.sizes)), None)
        if chosen is None:
            return None
        chosen.inputs.fill(batch, executor.tiling, sizes)
        get_accelerator().replay_graph(chosen.graph)
        self.replays += 1
        logits, sampling = chosen.logits[: sizes.wanted], batch.sampling
        if sampling is not None and sampling.seen is None and chosen.tokens is not None:
            sampling.chosen = ChosenTokens(chosen.tokens[: sizes.wanted])
        else:  # penalties change the logits by tables whose sizes depend on the requests
            executor.finish(batch, chosen.inputs, chosen.logits)
        return logits

    def _current(self) -> bool:
        """Whether the graphs fit the executor's addresses, captured again if need be."""
        if self._version == self._executor.version:
            return True
        lived = self._version is None or self.replays - self._replays_before >= FEW_REPLAYS
        self._short_lives = 0 if lived else self._short_lives + 1
        if self._short_lives >= MOST_SHORT_LIVES:
            self.drop()
            self._off = True
            name = type(self._executor.model).__name__
            warn_once(f"{name}: passes run without CUDA graphs from now on: weights or pages move every few passes")
            return False
        self.capture()
        return not self._off


def _sizes(executor: Capturable, sequences: int, count: int, length: int) -> PassSizes:
    """Return the sizes of a pass of `count` rows of each sequence, or fewer; contexts have at most `length` tokens."""
    page, tiling = executor.store.size, executor.tiling
    pages = min(-(-length // page), max(MOST_PAGES // sequences, 1))
    sizes = PassSizes.decode(sequences, pages, page, tiling, count, max(executor.block, 1))
    if count > tiling.narrow:  # a sequence may have fewer drafts, and be one narrow tile
        sizes = replace(sizes, narrow_tiles=sequences, ends=sequences * count)
    return sizes


@torch.no_grad()
def _captured(executor: Capturable, sizes: PassSizes, pool: Any, stream: Any) -> CapturedPass:
    """Return the graph of one pass. It is run once before, on padding alone: libraries get ready at a first call."""
    accelerator = get_accelerator()
    inputs = executor.inputs(sizes)
    _pad(inputs)

    def launch() -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = executor.compute(inputs)
        return logits, executor.choose(inputs, logits) if executor.samples else None

    stream.wait_stream(accelerator.current_stream(executor.device))
    with accelerator.stream(stream):
        launch()
    accelerator.current_stream(executor.device).wait_stream(stream)
    graph = accelerator.create_graph()
    # Other threads may go on: the watchdog asks for events, which ends a capture that all threads share.
    with accelerator.capture_to_graph(graph, pool=pool, stream=stream, error_mode="thread_local"):
        logits, tokens = launch()
    return CapturedPass(graph, inputs, logits, tokens)


def _pad(inputs: PassInputs) -> None:
    """Write a pass of padding alone."""
    inputs.buffer.zero_()
    for tensor in (inputs.slots, inputs.table):
        tensor.fill_(-1)
    for tiles in (inputs.narrow, inputs.rest, inputs.all):
        tiles[:, 0] = -1


def capture_passes(executor: Any, sequences: int, length: int, drafts: int = 0, drafting: int = 0) -> None:
    """Let an executor capture its passes of next tokens, if it can; else one line of log says why not (none on a CPU).

    Args:
        executor: executor of a generator, or None.
        sequences: largest number of sequences of a pass.
        length: longest context, in tokens.
        drafts: largest number of draft tokens of a sequence.
        drafting: largest number of sequences in a pass with drafts.
    """
    device = _device(executor)
    if device.type == "cpu" or executor is None:
        return
    name = type(executor.model).__name__
    if not hasattr(executor, "compute"):
        log_rank0(f"{name}: passes are not captured as CUDA graphs, since they go through the model's modules")
        return
    if axis_of_slices(executor.model) is not None:  # ranks would have to agree on each graph and each replay
        log_rank0(f"{name}: passes are not captured as CUDA graphs, since ranks share its matrices")
        return
    probe = RaggedBatch([BatchSlice([0], 0, [0])], executor.store.size, device)
    if not executor.native(probe):
        log_rank0(f"{name}: passes are not captured as CUDA graphs, since its structure has changed")
        return
    executor.captured = PassGraphs(executor, padded_shapes(sequences, drafts, drafting), length)
    executor.captured.capture()


def drop_graphs(executor: Any) -> None:
    """Free the graphs of an executor, if it has any; its next pass captures them again."""
    if (graphs := getattr(executor, "captured", None)) is not None:
        graphs.drop()


def graph_counts(executor: Any) -> tuple[int, int, int]:
    """Return the number of an executor's graphs, the bytes of device memory that they hold, and their replays."""
    graphs = getattr(executor, "captured", None)
    return (0, 0, 0) if graphs is None else (graphs.graphs, graphs.bytes, graphs.replays)


def _device(executor: Any) -> torch.device:
    parameter = None if executor is None else next(executor.model.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
