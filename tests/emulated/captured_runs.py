"""Generators whose passes are captured, over random schedules; and a small executor that needs no kernels."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch

from deepspeed.inference import Generator, Request, SamplingParams, generator
from deepspeed.inference.executors import attention_ways
from deepspeed.inference.executors.captured import MOST_GRAPHS
from deepspeed.inference.executors.packed_decoder import PackedDecoder
from deepspeed.inference.executors.paged import KVCache
from deepspeed.inference.executors.pass_inputs import PassInputs, PassSizes, Tiling
from deepspeed.inference.executors.ragged_batch import ChosenTokens, RaggedBatch
from deepspeed.inference.quantization.float8 import float8_linears
from tests.emulated.runs import Seen, observed
from tests.unit.inference.toys import llama

WIDTH, VOCABULARY, LENGTH = 8, 32, 64
DRAWN: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.1, "logprobs": 2},
)


class StandIn:
    """An executor with the interface of `PackedDecoder`: one layer of attention over pages, in torch's operators.

    Args:
        model: model whose config and device it takes; its own weights depend on nothing.
    """

    kind, ways, even, vocabulary = "packed", {}, False, VOCABULARY

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
            batch.sampling.chosen = ChosenTokens(self.choose(inputs, logits)[: len(batch.sampling.seeds)])


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
    made: Generator, seed: int, requests: int = 12, longest: int = 20, vocabulary: int = VOCABULARY, plain: bool = True
) -> dict[Any, list[int]]:
    """Tokens of requests that join at random steps, of random lengths; some are cancelled.

    The cache should be too small for all of them, so that some are preempted. `plain`: whether all are greedy.
    """
    draw = random.Random(seed)
    coming = []
    for number in range(requests):
        pattern = [draw.randrange(vocabulary) for _ in range(draw.randint(1, 4))]
        prompt = (pattern * longest)[: draw.randint(1, longest)]  # it repeats itself, so that there are guesses
        drawn = {} if plain else draw.choice(DRAWN)
        options = SamplingParams(max_new_tokens=draw.randint(1, longest), ignore_eos=True, seed=number, **drawn)
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


def decoder_both_ways(
    kernels: Any, seed: int, drafts: int, requests: int = 6, longest: int = 30, float8: torch.dtype | None = None
) -> Seen:
    """Tokens of a schedule of a small Llama by a `PackedDecoder`, with and without graphs; and the load at the end.

    Args:
        kernels: kernels that take tensors of the CPU.
        seed: seed of the schedule.
        drafts: largest number of draft tokens.
        requests, longest: as in `schedule`.
        float8: dtype of a model whose matrices are in fp8; None: fp32, without fp8.
    """
    ways: Any = [attention_ways.KernelWay(DeviceKernels(kernels))]
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    sizes: dict[str, Any] = {"page_size": 16, "max_sequences": 3, "max_batch_tokens": 16, "prompt_chunk": 8}
    sizes |= {"cache_bytes": 4 * 2 * 16 * 16 * 4, "speculation": drafts}  # four pages
    with observed() as seen, mock.patch.object(attention_ways, "ways_of", lambda _: (ways, "")):
        said, stats = [], []
        for graphs in (False, True):
            model = llama(num_hidden_layers=1, num_key_value_heads=1, **small, max_position_embeddings=64).to(
                "cuda", float8
            )
            if float8 is not None:
                float8_linears(model)
            made = Generator(model, cuda_graphs=graphs, **sizes)
            assert type(made._executor) is PackedDecoder
            said.append(schedule(made, seed, requests, longest, vocabulary=8, plain=False))
            stats.append(made.load())
            made.close()
        seen.extra = said, stats
    return seen


def check_decoder(seen: Seen, drafts: int, requests: int = 6) -> None:
    """Replayed tokens are the eager ones, many passes were replays, and the detector has seen nothing."""
    (eager, replayed), (_, stats) = seen.extra
    assert replayed == eager and len(eager) >= requests - 1
    assert seen.reports == []
    assert 0 < stats.graphs <= MOST_GRAPHS and stats.replays > 6, stats
    assert stats.drafts > 0 or not drafts
