"""Generation with matrices that are split over ranks, on the device: tokens of one rank, messages by formula."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import Seen, emulates, observed

need_compiler()

NEW, LAYERS, WIDTH, VOCABULARY = 6, 2, 64, 256
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "seed": 6},
    {"repetition_penalty": 1.5},
    {"temperature": 0.8, "seed": 7, "logprobs": 2},
)
EXECUTORS = {
    "packed": "PackedDecoder", "modules": "PagedExecutor", "engine": "PagedExecutor", "vocabulary": "PagedExecutor",
}  # fmt: skip


def split_model(ranks: int, way: str) -> Any:
    """The model of this rank: its layers are split, and by "vocabulary" its embedding and head too.

    A training engine holds the weights of "engine" and "vocabulary".
    """
    import deepspeed
    from tests.unit.inference.toys import llama

    model = llama(num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=LAYERS)
    if ranks == 1:
        return model.to("cuda")
    if way not in ("engine", "vocabulary"):
        deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": ranks})
        return model
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "tensor_parallel": {"autotp_size": ranks, "vocab_parallel_lm_head": way == "vocabulary"},
    }
    return deepspeed.initialize(model=model, config=config)[0].module.eval()


def answers(ranks: int, way: str, refused: bool = False) -> Seen:
    """Tokens of requests together, and the messages of one pass with a token of each request.

    `refused`: the last rank finds that it cannot run without modules.
    """
    from deepspeed.errors import PackingError
    from deepspeed.inference import Generator, Request, SamplingParams
    from deepspeed.inference.executors import select
    from deepspeed.inference.executors.packed_decoder import PackedDecoder
    from tests.unit.inference.reference_kernels import ReferenceKernels, only_way
    from tests.unit.inference.toys import prompts

    def refuse(*_: Any) -> None:
        raise PackingError("planted")

    refuses = refused and torch.distributed.get_rank() == ranks - 1
    through_modules = mock.patch.object(select, "_without_modules", lambda executor, *_: executor)
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_way(ReferenceKernels()))
        through = way != "packed" and (way == "modules" or ranks == 1)  # engines go through modules by themselves
        stack.enter_context(through_modules if through else contextlib.nullcontext())
        if refuses:
            stack.enter_context(mock.patch.object(PackedDecoder, "_prepare", refuse))
        seen = stack.enter_context(observed())
        generator = Generator(split_model(ranks, way), page_size=16, cache_bytes=1 << 20, max_batch_tokens=24)
        texts = prompts((3, 30, 7, 12, 5))
        tokens: dict[Any, list[int]] = {number: [] for number in range(len(OPTIONS))}
        for number, options in enumerate(OPTIONS):
            sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True, **options)
            generator.submit(Request(number, texts[number], sampling))
        messages = {}
        while not generator.idle:
            emulates().clear()
            outputs = generator.step()
            counters = emulates().counters()
            for output in outputs:
                assert output.error is None
                tokens[output.ident] += output.tokens
            if len(outputs) == len(OPTIONS):
                messages = {name: counters.get(name, 0) for name in MESSAGES}
        seen.extra = tokens, type(generator._executor).__name__, messages
        generator.close()
    return seen


MESSAGES = ("launch.nccl", "nccl.all_reduce", "bytes.wire")


def formula(ranks: int, way: str) -> dict[str, int]:
    """Messages of a pass with one row of each request: sums of a ring, and parts of the logits."""
    rows = len(OPTIONS)
    sums = 2 * LAYERS + (way == "vocabulary")
    row = WIDTH * 4
    sent = sums * (2 * rows * row * (ranks - 1) // ranks)
    gathers = int(way == "vocabulary")
    sent += gathers * rows * (VOCABULARY // ranks) * 4 * (ranks - 1)
    return {"launch.nccl": sums + gathers, "nccl.all_reduce": sums, "bytes.wire": sent}


@pytest.mark.slow
@pytest.mark.parametrize("way", EXECUTORS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_together_say_what_one_says(emulated: Any, ranks: int, way: str) -> None:
    (alone,) = emulated(1).run(answers, 1, way, timeout=LIMIT)
    together = emulated(ranks).run(answers, ranks, way, timeout=LIMIT)
    assert alone.extra[1] == EXECUTORS[way] and all(len(each) == NEW for each in alone.extra[0].values())
    for seen in together:
        assert seen.reports == []
        assert seen.extra == (alone.extra[0], EXECUTORS[way], formula(ranks, way))


@pytest.mark.slow
def test_a_rank_that_cannot_go_without_modules_takes_all_with_it(emulated: Any) -> None:
    (alone,) = emulated(1).run(answers, 1, "modules", timeout=LIMIT)
    for seen in emulated(2).run(answers, 2, "packed", True, timeout=LIMIT):
        assert seen.reports == []
        assert seen.extra == (alone.extra[0], "PagedExecutor", formula(2, "packed"))


def invariant(ranks: int) -> list[str]:
    """As `check_invariance`, of a split model."""
    from deepspeed.inference.executors import select
    from deepspeed.inference.executors.packed_decoder import PackedDecoder
    from tests.unit.inference.reference_kernels import ReferenceKernels, only_way
    from tests.unit.inference.test_native import all_ways

    model = split_model(ranks, "packed")
    options: dict[str, Any] = {"kind": PackedDecoder, "max_batch_tokens": 32, "batch_invariant": True}
    with only_way(ReferenceKernels()), mock.patch.object(select, "INVARIANT_ROWS", 8), observed() as seen:
        all_ways(model, 6, 20, 6, 56, ("8 at once", "chunks"), **options)
    return seen.reports


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_logits_of_a_split_model_do_not_depend_on_the_batch(emulated: Any, ranks: int) -> None:
    assert emulated(ranks).run(invariant, ranks, timeout=LIMIT) == [[]] * ranks
