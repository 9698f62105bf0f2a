"""Faults put in on purpose, each of which has to show in tokens that differ (or in the scheduler's own checks)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from deepspeed.inference import Generator, Request, SamplingParams, generator, kv_cache, sampler, scheduler
from deepspeed.inference.executors import paged, ragged_batch, select
from tests.unit.inference.test_generator import run
from tests.unit.inference.toys import alone, gpt_neo, llama, prompts, scale

NEW = 12
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
TIGHT = {"page_size": 4, "max_batch_tokens": 16, "prompt_chunk": 16}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """Faults of a pass are put into the one through the model's modules; test_native.py has those of the fused one."""
    with mock.patch.object(select, "_fused", lambda executor, *_: executor):
        yield


def windowed():
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return scale(MistralForCausalLM(MistralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=9,
    )))  # fmt: skip


def greedy_differs(make=llama, given=None, wave=1, **options) -> bool:
    """Whether greedy tokens differ from those of `generate`; the check at load is off, so that the fault runs."""
    model, given = make(), given or prompts((9, 33, 60))
    wanted = []
    for prompt in given:
        key = (make.__name__, tuple(prompt))
        if key not in KNOWN:
            KNOWN[key] = alone(model, prompt, NEW)
        wanted.append(KNOWN[key])
    ours = Generator(model, **{**TIGHT, **options})
    found = []
    for at in range(0, len(given), max(1, len(given) // wave)):
        found += ours.generate(given[at : at + max(1, len(given) // wave)], GREEDY)
    return found != wanted


KNOWN: dict[tuple, list[int]] = {}  # what a toy says by itself, by the name of its maker and the prompt


def soft():
    """One whose attention is even, so that padding has weight."""
    return scale(llama(), 0.1)


def stretched():
    return llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})


def unchecked(*given, **more) -> None:
    """The check at load, whose answer nobody hears."""
    with contextlib.suppress(Exception):
        PROBE(*given, **more)


PROBE = select._probe


def stale_page() -> Iterator[None]:
    """A page that is given up can still be found by its old tokens."""

    def forget(self, node):
        page = node.page
        del self._nodes[page], self._cached[page]
        self._free.append(page)

    with mock.patch.object(kv_cache.BlockPool, "_forget", forget):
        yield


def position_after_chunk() -> Iterator[None]:
    """Every chunk counts positions from 0."""
    real = ragged_batch.RaggedBatch.__init__

    def init(self, spans, *rest, **named):
        real(self, spans, *rest, **named)
        self.positions = torch.tensor([at for span in spans for at in range(len(span.tokens))])

    with mock.patch.object(ragged_batch.RaggedBatch, "__init__", init):
        yield


def colliding_hash() -> Iterator[None]:
    """Pages are found by a number made of their tokens, and these are not compared."""
    real = kv_cache.BlockPool.match, kv_cache.BlockPool.remember

    def number(tokens):
        return (sum(tokens) % 3,)

    def match(self, tokens, root=None):
        nodes, node, at = [], root or self.root, 0
        while at + self.size < len(tokens) and number(tokens[at : at + self.size]) in node.children:
            node = node.children[number(tokens[at : at + self.size])]
            nodes.append(node)
            at += self.size
        return kv_cache.Match(nodes)

    with (
        mock.patch.object(kv_cache.BlockPool, "match", match),
        mock.patch.object(
            kv_cache.BlockPool, "remember", lambda self, n, tokens, page: real[1](self, n, number(tokens), page)
        ),
    ):
        yield


def gqa_order() -> Iterator[None]:
    """Query heads take the cached heads in turns."""
    real = paged._attend

    def attend(group, query, pools, *rest):
        heads, cached = query.shape[0], pools[0].shape[1]
        order = torch.arange(heads).reshape(heads // cached, cached).t().flatten()
        return real(group, query[order], pools, *rest)[:, :, order.argsort()]

    with mock.patch.object(paged, "_attend", attend):
        yield


def window_ignored() -> Iterator[None]:
    """Every layer sees all that came before."""
    with mock.patch.object(paged.PagedCache, "rule", lambda self, mask, window: self.default):
        yield


def rope_scaling_lost() -> Iterator[None]:
    """Positions reach the model unscaled."""
    real = paged.PagedExecutor.run

    def run_(self, given):
        given.positions = given.positions * 4  # what the factor of the model would divide by
        return real(self, given)

    with mock.patch.object(paged.PagedExecutor, "run", run_):
        yield


def wrong_draft() -> Iterator[None]:
    """A guess is taken without looking."""
    real = generator.Generator._accept

    def accept(self, share, logits, largest):
        for at, draft in enumerate(share.drafts):
            largest[at] = draft
        return real(self, share, logits, largest)

    with mock.patch.object(generator.Generator, "_accept", accept):
        yield


def seed_shared() -> Iterator[None]:
    """All requests draw from one generator."""
    one = torch.Generator().manual_seed(3)
    real = sampler.Sampler.__init__

    def init(self, *given):
        real(self, *given)
        self._generator = one if self._generator is not None else None

    with mock.patch.object(sampler.Sampler, "__init__", init):
        yield


def pad_attended() -> Iterator[None]:
    """Padding behind a shorter context is seen."""

    def mask(self, function):
        return None if self.rows.shape[1] == 1 else real(self, function)

    real = ragged_batch.AttentionGroup._mask
    with mock.patch.object(ragged_batch.AttentionGroup, "_mask", mask):
        yield


def end_inside_chunk() -> Iterator[None]:
    """Tokens that were verified behind an end token are handed out with it."""

    def accept(self, share, logits, largest):
        live = self._live[share.sequence.ident]
        accepted = []
        for at in range(len(largest)):
            accepted.append(live.take(None, largest[at]))
            if at == len(share.drafts) or share.drafts[at] != accepted[-1]:
                break
        self._scheduler.advance(share, accepted)
        if live.reason is not None:
            self._forget(live)
        return [live.output()] if accepted else []

    with mock.patch.object(generator.Generator, "_accept", accept):
        yield


def shared_page_written() -> Iterator[None]:
    """A page that agrees in part is used itself instead of its copy."""
    real = scheduler.Scheduler._reuse

    def reuse(self, track):
        take, self.pool.take = self.pool.take, lambda: self._tail
        self._tail = getattr(self.pool.match(track.tokens).tail, "page", None)
        try:
            real(self, track)
            if track.computed % self.pool.size:
                self.pool.share(self._tail)
        finally:
            self.pool.take = take

    unseen = mock.patch.object(scheduler.Scheduler, "_written_by_others", lambda *_: False)
    with mock.patch.object(scheduler.Scheduler, "_reuse", reuse), unseen:
        yield


def alike() -> list[list[int]]:
    """Prompts whose pages have one number by `colliding_hash`, and unlike tokens."""
    first = prompts((40,))[0]
    return [first, list(reversed(first)), sorted(first)]


def again() -> list[list[int]]:
    """More unlike prompts than the cache has room for, then the first ones again."""
    many = prompts((30,) * 5)
    return [*many, many[0], many[1][:20] + many[2][:9]]


def forked() -> list[list[int]]:
    """A prompt, one that leaves it in the middle of a page, and the first again."""
    first = prompts((40,))[0]
    return [first, first[:30] + [5] * 9, first]


def drafts_differ() -> bool:
    """With guesses that never hold."""
    with mock.patch.object(generator.NgramProposer, "guess", lambda self, tokens, most: [7, 8, 9][:most]):
        return greedy_differs(speculation=3)


def seeds_differ() -> bool:
    model, given = llama(), prompts((7, 30, 12))
    hot = SamplingParams(max_new_tokens=12, temperature=1.2, seed=3, ignore_eos=True)
    one = run(Generator(model, **TIGHT), [Request("x", given[0], hot)])["x"][0]
    both = [Request(i, prompt, hot) for i, prompt in enumerate(given)]
    return run(Generator(model, **TIGHT), [*both, Request("x", given[0], hot)])["x"][0] != one


def ends_differ() -> bool:
    model, piece = llama(), prompts((12,))[0]
    text = alone(model, piece, 24)
    model.generation_config.eos_token_id = text[11]
    wanted = text[: text.index(text[11]) + 1]
    guesses = mock.patch.object(
        generator.NgramProposer,
        "guess",
        lambda self, tokens, most: text[len(tokens) - 12 : len(tokens) - 12 + min(4, most)],
    )
    with guesses:
        ours = Generator(model, speculation=4, **TIGHT)
        return ours.generate([piece], SamplingParams(max_new_tokens=24))[0] != wanted


PAGE = 2 * 2 * 2 * 16 * 4 * 4  # bytes of 4 tokens
SEEN_BY = {
    stale_page: lambda: greedy_differs(given=again(), wave=7, cache_bytes=20 * PAGE),
    position_after_chunk: greedy_differs,
    colliding_hash: lambda: greedy_differs(given=alike(), wave=3),
    gqa_order: greedy_differs,
    window_ignored: lambda: greedy_differs(windowed),
    rope_scaling_lost: lambda: greedy_differs(stretched),
    wrong_draft: drafts_differ,
    end_inside_chunk: ends_differ,
    seed_shared: seeds_differ,
    pad_attended: lambda: greedy_differs(soft),
    shared_page_written: lambda: greedy_differs(given=forked(), wave=3),
}


@pytest.mark.parametrize("fault", SEEN_BY, ids=lambda fault: fault.__name__)
def test_a_fault_shows(fault) -> None:
    """Its table is clean without it, and not with it."""
    assert not SEEN_BY[fault]()
    plant = fault()
    unseen = mock.patch.object(paged.PagedExecutor, "forgets", lambda *_: None)  # which sees a window that is lost
    with mock.patch.object(select, "_probe", unchecked), unseen:
        next(plant)
        try:
            shows = SEEN_BY[fault]()
        except (KeyError, IndexError, ValueError, RuntimeError):  # it breaks down, which shows as well
            shows = True
        finally:
            next(plant, None)
    assert shows


@pytest.mark.parametrize("fault", [position_after_chunk, gqa_order, pad_attended], ids=lambda fault: fault.__name__)
def test_a_fault_of_the_pass_is_found_when_the_generator_is_made(fault) -> None:
    """The check at load leaves the packed pass for another way, whose tokens are right."""
    plant = fault()
    next(plant)
    try:
        assert select.select_executor(llama())[0] is None or select.select_executor(llama())[0].kind != "packed"
    finally:
        next(plant, None)


def test_gathered_padding_is_masked() -> None:
    """The same of executor 2: with its mask of ones, tokens differ."""
    from deepspeed.inference.executors import gathered

    real = gathered.GatheringCache.__init__

    def init(self, store, group):
        real(self, store, group)
        self.seen = torch.ones_like(self.seen)

    assert not greedy_differs(gpt_neo)
    with (
        mock.patch.object(select, "_probe", unchecked),
        mock.patch.object(gathered.GatheringCache, "__init__", init),
    ):
        assert greedy_differs(gpt_neo)
