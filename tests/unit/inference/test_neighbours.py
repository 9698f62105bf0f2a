"""What one request, thread or caller does to the others: nothing."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import time
import weakref

import pytest
import torch

from deepspeed.errors import RequestError, UsageError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.kv_cache import BlockPool
from deepspeed.inference.sampler import Sampler
from deepspeed.inference.scheduler import Scheduler, TokenSequence
from tests.unit.inference.toys import alone, llama, mamba, prompts, scale

NEW = 8
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def test_draws_without_a_seed_leave_the_users_random_numbers_alone() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    drawn = {tuple(Sampler(SamplingParams(temperature=2.0), [1]).next(logits)[0] for _ in range(6)) for _ in range(4)}
    assert torch.equal(torch.rand(4), wanted) and len(drawn) > 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-37, 1e-40, 1e-45, 1e-320])
def test_the_coldest_temperature_takes_the_largest(temperature: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert logits.argmax() != int((logits > 0).nonzero()[0])
    assert Sampler(SamplingParams(temperature=temperature, seed=1), [1]).next(logits)[0] == int(logits.argmax())


@pytest.mark.parametrize(
    ("sampling", "prompt"),
    [
        (SamplingParams(logit_bias={token: 0.1 for token in range(40_000)}), [1]),
        (SamplingParams(repetition_penalty=1.1), list(range(40_000))),
    ],
    ids=["bias", "repetition"],
)
def test_many_biases_or_many_tokens_seen_hold_nobody_up(sampling: SamplingParams, prompt: list[int]) -> None:
    """Relative to one draw over the same vocabulary, which a token costs anyway."""
    logits, sampler = torch.randn(50_000), Sampler(sampling, prompt)
    plain = Sampler(SamplingParams(temperature=1.0, seed=1), [1])

    def seconds(one: Sampler) -> float:
        one.next(logits)
        times = []
        for _ in range(5):
            begun = time.thread_time()
            one.next(logits)
            times.append(time.thread_time() - begun)
        return min(times)

    assert seconds(sampler) < 10 * seconds(plain)  # a loop in Python takes a hundred times as long


def test_what_a_plan_costs_grows_as_the_streams_do() -> None:
    def seconds(streams: int) -> float:
        scheduler = Scheduler(BlockPool(8 * streams, 16), lambda source, target: None, 4096, 4096)
        for number in range(streams):
            scheduler.add(TokenSequence(number, [1 + number % 200] * 8, number))
        while scheduler.waiting or any(track.pending > 1 for track in scheduler.running):
            for share in scheduler.plan():
                scheduler.advance(share, [5] if share.wanted else [])
        times = []
        for _ in range(3):
            begun = time.thread_time()
            shares = scheduler.plan()
            times.append(time.thread_time() - begun)
            assert len(shares) == streams
            for share in shares:
                scheduler.advance(share, [5])
        return min(times)

    assert seconds(1600) < 10 * seconds(400)  # 4 x as many; pairs of them would be 16 x


def test_a_failing_generate_leaves_others_their_tokens() -> None:
    model, given = llama(), prompts((5, 9))
    generator = Generator(model)
    generator.submit(Request("other", given[0], GREEDY))
    run, passes = generator._executor.run, []

    def failing(batch):
        passes.append(batch)
        if len(passes) == 4:
            raise RuntimeError("broken")
        return run(batch)

    generator._executor.run = failing
    with pytest.raises(RuntimeError, match="broken"):
        generator.generate([given[1]], GREEDY)
    found: list[int] = []
    while not generator.idle:
        for output in generator.step():
            assert output.ident == "other"
            found += output.tokens
    assert found == alone(model, given[0], NEW)


def test_generators_of_one_model_in_two_threads() -> None:
    model, given = llama(attention_dropout=0.5), prompts((5, 9))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    model.train()
    generators, wrong = [Generator(model), Generator(model)], []

    def work(number: int) -> None:
        try:
            for _ in range(8):
                found = generators[number].generate([given[number]], GREEDY)[0]
                if found != wanted[number]:
                    wrong.append((number, found))
        except Exception as error:
            wrong.append((number, repr(error)))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert model.config._attn_implementation == "sdpa" and all(module.training for module in model.modules())


def test_numbers_that_are_none_end_their_request_with_an_error() -> None:
    model, given = llama(vocab_size=300), prompts((5, 21))
    wanted = alone(model, given[1], NEW)
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    for drafts in (0, 3):
        generator = Generator(model, page_size=4, speculation=drafts)
        for ident, prompt in (("bad", [299, 7, 8]), ("good", given[1])):
            generator.submit(Request(ident, prompt, GREEDY))
        found: dict = {"bad": [], "good": []}
        while not generator.idle:
            for output in generator.step():
                found[output.ident].append(output)
        (bad,) = found["bad"]
        assert bad.finish_reason == "error" and not bad.tokens and "not finite" in bad.error
        assert [token for output in found["good"] for token in output.tokens] == wanted
        assert generator.load().free_pages == generator.pages.count
        with pytest.raises(RequestError, match="not finite"):
            generator.generate([given[1], [299]], GREEDY)
        assert generator.idle and generator.load().free_pages == generator.pages.count


def recurrent_gemma():
    """Its recurrent state lies in its modules, and a text of one token goes on with what is there."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, lru_width=48,
        num_key_value_heads=2, head_dim=12, attention_window_size=16, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    return scale(RecurrentGemmaForCausalLM(config), 0.2)


def test_requests_do_not_go_on_with_the_state_that_others_left_in_modules() -> None:
    model = recurrent_gemma()
    given = prompts((1, 9, 20, 1))
    wanted = [alone(copy.deepcopy(model), prompt, NEW) for prompt in given]
    assert len({token for tokens in wanted for token in tokens}) > 10
    generator = Generator(model)
    assert generator.kind == "generate"
    for _ in range(2):  # again, on what the first requests left
        assert generator.generate(given, GREEDY) == wanted
    assert all(value is None for name, value in _held(model) if name == "conv1d_state")


def _held(model):
    return [(name, value) for module in model.modules() for name, value in vars(module).items()]


def test_a_hook_that_counts_goes_on_counting() -> None:
    model = mamba()

    def count(module, *_):
        module.calls = getattr(module, "calls", 0) + 1

    model.backbone.layers[0].register_forward_hook(count)
    generator = Generator(model)
    probing = model.backbone.layers[0].calls
    generator.generate(prompts((5, 7)), GREEDY)
    assert model.backbone.layers[0].calls == probing + 2 * NEW


def test_requests_through_generate_heed_the_most_at_once() -> None:
    model = mamba()
    wanted = alone(model, [3, 4, 5], NEW)
    before = threading.active_count()
    generator = Generator(model, max_sequences=3)
    for number in range(10):
        generator.submit(Request(number, [3, 4, 5], GREEDY))
    found: dict = {number: [] for number in range(10)}
    while not generator.idle:
        load = generator.load()
        assert load.running <= 3 and load.running + load.waiting == len(generator._live)
        for output in generator.step():
            found[output.ident] += output.tokens
        assert threading.active_count() <= before + 3
    assert all(tokens == wanted for tokens in found.values())


def test_what_a_generation_config_asks_is_no_part_of_a_request() -> None:
    """A request says by itself how tokens are chosen, whichever way its model generates."""
    for make in (llama, mamba):
        model = make()
        wanted = alone(model, [3, 4, 5], 24)
        own = model.generation_config
        own.repetition_penalty, own.no_repeat_ngram_size, own.suppress_tokens = 9.0, 1, [wanted[0]]
        own.max_time, own.min_new_tokens = 0.0, 3
        own.num_beams, own.num_return_sequences = 2, 2
        sampling = SamplingParams(max_new_tokens=24, ignore_eos=True)
        assert Generator(model).generate([[3, 4, 5]], sampling) == [wanted]


def test_a_generate_that_ends_by_itself_is_an_error_and_no_wait() -> None:
    model = mamba()
    generator = Generator(model)
    model.generate = lambda ids, **_: ids
    generator.submit(Request(0, [3, 4], GREEDY))
    (output,) = generator.step()
    assert output.finish_reason == "error" and "ended by itself" in output.error
    with pytest.raises(UsageError, match="ended by itself"):
        generator.generate([[3, 4]], GREEDY)
    assert generator.idle
    del generator
    gc.collect()


def test_what_one_requests_generate_raises_ends_that_request_alone() -> None:
    model = mamba()
    wanted, generate = alone(model, [3, 4, 5], NEW), model.generate

    def failing(ids, **options):
        if ids[0, 0] == 9:
            raise RuntimeError("broken")
        return generate(ids, **options)

    model.generate = failing
    generator = Generator(model)
    for ident, prompt in ((0, [3, 4, 5]), (1, [9, 4, 5]), (2, [3, 4, 5])):
        generator.submit(Request(ident, prompt, GREEDY))
    found: dict = {number: [] for number in range(3)}
    while not generator.idle:
        for output in generator.step():
            found[output.ident].append(output)
    (bad,) = found[1]
    assert bad.finish_reason == "error" and bad.error == "RuntimeError: broken" and not bad.tokens
    assert all([token for output in found[ident] for token in output.tokens] == wanted for ident in (0, 2))
    with pytest.raises(RuntimeError, match="broken"):
        generator.generate([[3, 4, 5], [9, 4, 5]], GREEDY)
    assert generator.idle


class _Words:
    """A tokenizer that has no text for one token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def decode(self, tokens, **_) -> str:
        if self.token in tokens:
            raise KeyError(self.token)
        return " ".join(map(str, tokens))


def test_a_token_without_text_ends_the_request_that_looks_for_stop_strings() -> None:
    model, given = llama(), prompts((5, 9))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    strange = next(token for token in wanted[0] if token not in wanted[1])
    generator = Generator(model, tokenizer=_Words(strange))
    for ident, prompt in enumerate(given):
        generator.submit(Request(ident, prompt, SamplingParams(max_new_tokens=NEW, ignore_eos=True, stop=("none",))))
    outputs: list = []
    while not generator.idle:
        outputs += generator.step()
    assert [output.error for output in outputs if output.error] == [f"KeyError: {strange}"]
    assert [token for output in outputs if output.ident == 1 for token in output.tokens] == wanted[1]
    assert generator.load().free_pages == generator.pages.count


def test_a_dropped_generator_takes_its_threads_along() -> None:
    model = mamba()
    before = threading.active_count()
    generator = Generator(model, max_sequences=2)
    for number in range(3):
        generator.submit(Request(number, [3, 4, 5], GREEDY))
    generator.step()
    assert threading.active_count() == before + 2
    dropped = weakref.ref(generator)
    del generator
    gc.collect()
    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert dropped() is None and threading.active_count() == before
