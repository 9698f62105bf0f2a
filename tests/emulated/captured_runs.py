"""Generators whose passes are captured, over random schedules; and a small executor that needs no kernels."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from deepspeed.inference import Generator, Request, SamplingParams, generator
from deepspeed.inference.executors.paged import KVCache
from deepspeed.inference.executors.pass_inputs import PassInputs, PassSizes, Tiling
from deepspeed.inference.executors.ragged_batch import RaggedBatch

WIDTH, VOCABULARY, LENGTH = 8, 32, 64


class StandIn:
    """An executor with the interface of `PackedDecoder`: one layer of attention over pages, in torch's operators.

    Args:
        model: model whose config and device it takes; its own weights depend on nothing.
    """

    kind, ways, even = "packed", {}, False

    def __init__(self, model: Any) -> None:
        draw = torch.Generator().manual_seed(5)
        device = next(model.parameters()).device
        shapes = (VOCABULARY, WIDTH), (LENGTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH)
        self.weights = [torch.randn(shape, generator=draw).to(device) for shape in shapes]
        self.model, self.device, self.tiling = model, device, Tiling(2, 4)
        self.captured, self.samples, self.version, self.block = None, True, 0, 0
        self.computed: list[PassSizes] = []
        self.store = KVCache(4, 4)
        rows = torch.zeros(1, 1, WIDTH, device=device)
        self.store.write(0, rows, rows, torch.zeros(1, dtype=torch.long, device=device))

    @property
    def store(self) -> KVCache:
        return self._store

    @store.setter
    def store(self, store: KVCache) -> None:
        self._store, self.version = store, self.version + 1

    def native(self, batch: RaggedBatch) -> bool:
        return not batch.wants_hidden

    def reserve(self, length: int) -> None:
        assert length <= LENGTH

    def inputs(self, sizes: PassSizes) -> PassInputs:
        return PassInputs(sizes, self.store.size, self.device)

    @torch.no_grad()
    def run(self, batch: RaggedBatch) -> torch.Tensor:
        assert self.native(batch)
        if self.captured is not None and (logits := self.captured.run(batch)) is not None:
            return logits
        inputs = self.inputs(PassSizes.of(batch.spans, self.store.size, self.tiling))
        inputs.fill(batch, self.tiling)
        logits = self.compute(inputs)
        self.finish(batch, inputs, logits)
        return logits

    @torch.no_grad()
    def compute(self, inputs: PassInputs) -> torch.Tensor:
        self.computed.append(inputs.sizes)
        table, places, to_q, to_k, to_v = self.weights
        x = table[inputs.tokens] + places[inputs.positions]
        slots, written = inputs.slots.clamp(min=0), (inputs.slots >= 0)[:, None, None]
        for pool, matrix in zip(self.store.layers[0], (to_k, to_v), strict=True):
            pool[slots] = ((x @ matrix)[:, None] * written).nan_to_num()  # padding writes zeros to the page of zeros
        firsts = inputs.block_table.long() * self.store.size
        every = (firsts[:, :, None] + torch.arange(self.store.size, device=self.device)).flatten(1)
        owner = torch.searchsorted(inputs.row_starts[1:], torch.arange(len(x), device=self.device), right=True)
        owner = owner.clamp(max=inputs.sizes.sequences - 1)
        keys, values = (pool[every[owner], 0] for pool in self.store.layers[0])  # rows, longest, width
        seen = torch.arange(every.shape[1], device=self.device) <= inputs.positions[:, None]
        scores = ((x @ to_q)[:, None] * keys).sum(-1).masked_fill(~seen, -torch.inf)
        attended = (scores.softmax(-1)[:, :, None] * values.nan_to_num()).sum(1)
        return (x + attended)[inputs.wanted] @ table.t()

    @torch.no_grad()
    def choose(self, inputs: PassInputs, logits: torch.Tensor) -> torch.Tensor:
        return logits.argmax(-1).to(torch.int32)

    def finish(self, batch: RaggedBatch, inputs: PassInputs, logits: torch.Tensor) -> None:
        if batch.sampling is not None:
            batch.sampling.tokens = self.choose(inputs, logits)[: len(batch.sampling.seeds)].tolist()


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Inside, generators get a `StandIn`."""
    with (
        mock.patch.object(generator, "select_executor", lambda model, packed: (StandIn(model), "")),
        mock.patch.object(generator, "settle_attention", lambda executor, *_: executor),
        mock.patch.object(generator, "vocabulary_size", lambda *_, **__: VOCABULARY),
        mock.patch.object(generator, "length_limit", lambda _: LENGTH),
    ):
        yield


def schedule(
    made: Generator, seed: int, requests: int = 12, longest: int = 20, vocabulary: int = VOCABULARY
) -> dict[Any, list[int]]:
    """Tokens of requests that join at random steps, of random lengths; some are cancelled. Greedy, or drawn by a seed.

    The cache should be too small for all of them, so that some are preempted.
    """
    draw = random.Random(seed)
    coming = []
    for number in range(requests):
        pattern = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 4))]
        prompt = (pattern * longest)[: draw.randint(1, longest)]  # it repeats itself, so that there are guesses
        options = SamplingParams(max_new_tokens=draw.randint(1, longest), ignore_eos=True)
        coming.append((draw.randint(0, 2 * requests), Request(number, prompt, options)))
    cancelled = {number: draw.randint(1, 3 * requests) for number in draw.sample(range(requests), requests // 6)}
    tokens: dict[Any, list[int]] = {}
    step = 0
    while coming or not made.idle:
        for entry in [entry for entry in coming if entry[0] <= step]:
            made.submit(entry[1])
            coming.remove(entry)
        for number, when in cancelled.items():
            if when == step:
                made.cancel(number)
        for output in made.step():
            tokens.setdefault(output.ident, []).extend(output.tokens)
            assert output.error is None, output.error
        step += 1
    return tokens


class DeviceKernels:
    """Kernels that run on the host, each as one launch of the emulated device, which graphs take up.

    Args:
        kernels: kernels that take tensors of the CPU, such as interpreted ones.
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.has, self.prepare = kernels, kernels.has, kernels.prepare

    def launch(self, variant: Any, grid: tuple[int, int, int], arguments: Sequence[Any]) -> None:
        from tests.emulated import device

        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        others = [None if isinstance(each, torch.Tensor) else each for each in arguments]  # a graph keeps no memory

        def run(aliases: list[torch.Tensor]) -> None:
            left = iter(aliases)
            self.kernels.launch(variant, grid, [next(left) if each is None else each for each in others])

        device.launch_kernel(variant.name, tensors, [True] * len(tensors), run)
