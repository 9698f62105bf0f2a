"""Tokens of the generator against those of the model's own `generate`."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from deepspeed.errors import RequestError, UsageError
from deepspeed.inference import Generator, Request, SamplingParams, why_not_batchable
from tests.unit.inference.toys import alone, gpt_neo, llama, mamba, masked, prompts

NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True)


CHUNKS = {"page_size": 3, "max_batch_tokens": 16, "max_sequences": 4, "prompt_chunk": 16}
DRAFTS = {"page_size": 1, "speculation": 4, "prefix_cache": False}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 4.0, "rope_theta": 10000.0,
    "original_max_position_embeddings": 40,
}  # fmt: skip
KIND = {llama: "packed", gpt_neo: "gathered", mamba: "generate"}


@functools.cache
def said(make) -> tuple:
    """(model, prompts, what it says by itself)."""
    model, given = make(), prompts((3, 17, 40) if make is mamba else (1, 16, 33, 97, 23))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    assert min(len(set(tokens)) for tokens in wanted) >= 10, "a toy that repeats itself hides faults"
    return model, given, wanted


@pytest.mark.parametrize(
    ("make", "options"),
    [(llama, {}), (llama, CHUNKS), (llama, DRAFTS), (gpt_neo, CHUNKS), (mamba, {})]
    + [pytest.param(*one, marks=pytest.mark.slow) for one in ((gpt_neo, {}), (gpt_neo, DRAFTS), (mamba, CHUNKS))],
)
def test_tokens_are_those_of_generate_alone_and_among_others(make, options) -> None:
    model, given, wanted = said(make)
    generator = Generator(model, **options)
    assert generator.kind == KIND[make]
    assert generator.generate(given, GREEDY) == wanted
    once = [generator.generate([iter(prompt)], GREEDY)[0] for prompt in given[::3]]  # a prompt is read once
    assert once == wanted[::3]
    assert generator.idle and generator.load().free_pages == generator.pages.count
    assert alone(model, given[1], NEW) == wanted[1], "the model has changed for others"
    generator.close()


def run(generator: Generator, requests: list[Request]) -> dict:
    """Everything that comes, by ident: (tokens, reason, matched, logprobs)."""
    for request in requests:
        generator.submit(request)
    found: dict = {request.ident: ([], None, None, []) for request in requests}
    while not generator.idle:
        for output in generator.step():
            tokens, _, _, logprobs = found[output.ident]
            found[output.ident] = (
                tokens + output.tokens, output.finish_reason, output.matched, logprobs + (output.logprobs or []),
            )  # fmt: skip
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_parameters": LONG},
    ],
    ids=["mha", "mqa", "linear", "yarn", "longrope"],
)
def test_heads_and_rotations(sizes) -> None:
    model, given = llama(**sizes), prompts((3, 50))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    assert Generator(model, max_batch_tokens=16, page_size=5).generate(given, GREEDY) == wanted


@pytest.mark.parametrize(
    "kind",
    [
        "Gemma2",
        "GptOss",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("Mistral", "Gemma3Text", "Llama4Text")),
    ],
)
def test_windows_chunks_caps_and_sinks(kind: str) -> None:
    model = masked(kind)
    given = prompts((3, 50))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    assert min(len(set(tokens)) for tokens in wanted) >= 10
    generator = Generator(model, max_batch_tokens=16, page_size=4)
    assert generator.kind == "packed", generator.why
    assert generator.generate(given, GREEDY) == wanted


def test_preempted_and_reused_tokens_are_the_same() -> None:
    model, given = llama(), prompts((60, 61, 62, 63, 64))
    shared = prompts((48,))[0]
    given = [shared + prompt[: 9 + i] for i, prompt in enumerate(given)]
    wanted = [alone(model, prompt, NEW) for prompt in given]
    page = 2 * 2 * 2 * 16 * 4 * 8  # bytes of 8 tokens: keys and values, layers, heads, head size, fp32
    for reuse in (True, False):
        generator = Generator(model, cache_bytes=26 * page, page_size=8, prefix_cache=reuse)
        assert generator.pages.count == 26
        found = generator.generate(given, GREEDY)
        assert found == wanted
        assert generator.load().preemptions > 0 or reuse
        again = generator.generate(given[:1], GREEDY)
        assert again == wanted[:1] and generator.load().free_pages == 26


def test_a_seed_draws_the_same_whoever_is_beside_it() -> None:
    model, given = llama(), prompts((7, 30, 12))
    hot = SamplingParams(max_new_tokens=16, temperature=1.2, top_p=0.95, seed=3, ignore_eos=True)
    free = SamplingParams(max_new_tokens=16, temperature=1.2, ignore_eos=True)
    first = Generator(model).generate(given[:1], hot)[0]
    for options in ({}, {"speculation": 3}, {"max_batch_tokens": 8, "page_size": 4}):
        generator = Generator(model, **options)
        others = [Request(i, prompt, free) for i, prompt in enumerate(given)]
        assert run(generator, [*others, Request("x", given[0], hot)])["x"][0] == first
    a, b = (run(Generator(model), [Request("x", given[0], free)])["x"][0] for _ in range(2))
    assert a != b


def test_an_end_token_a_stop_token_and_a_stop_string_end_a_request() -> None:
    model, prompt = llama(), prompts((20,))[0]
    text = alone(model, prompt, 30)
    end = text[10]
    at = text.index(end)
    model.generation_config.eos_token_id = end
    for options in ({"speculation": 5}, {"max_batch_tokens": 7}):
        generator = Generator(model, tokenizer=Numbers(), **options)
        stop = f" {text[6]} {text[7]}"
        requests = {
            "end": SamplingParams(max_new_tokens=30),
            "ignored": SamplingParams(max_new_tokens=30, ignore_eos=True),
            "token": SamplingParams(max_new_tokens=30, ignore_eos=True, stop_token_ids=(text[4],)),
            "string": SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(stop, "never")),
            "length": SamplingParams(max_new_tokens=5, ignore_eos=True),
        }
        found = run(generator, [Request(name, prompt, sampling) for name, sampling in requests.items()])
        assert found["end"][:3] == (text[: at + 1], "stop", end)
        assert found["ignored"][:3] == (text, "length", None)
        assert found["token"][:3] == (text[: text.index(text[4]) + 1], "stop", text[4])
        assert found["string"][:3] == (text[:8], "stop", stop)
        assert found["length"][:3] == (text[:5], "length", None)
        longer = run(generator, [Request(0, prompt, SamplingParams(max_new_tokens=30, min_new_tokens=at + 3))])[0]
        assert len(longer[0]) >= at + 3 and end not in longer[0][: at + 3]


class Numbers:
    def decode(self, tokens):
        return "".join(f" {token}" for token in tokens)


def test_logprobs_are_the_models() -> None:
    model, prompt = llama(), prompts((9,))[0]
    tokens, _, _, logprobs = run(Generator(model), [Request(0, prompt, SamplingParams(max_new_tokens=4, logprobs=3))])[
        0
    ]
    with torch.no_grad():
        rows = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    for row, token, found in zip(rows, tokens, logprobs, strict=True):
        assert found.token == token and found.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [t for t, _ in found.top] == row.topk(3).indices.tolist()


def test_a_cancel_frees_its_pages_and_leaves_the_others_as_they_are() -> None:
    model, given = llama(), prompts((20, 30, 40))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    generator = Generator(model, page_size=4)
    for i, prompt in enumerate(given):
        generator.submit(Request(i, prompt, GREEDY))
    found: dict = {0: [], 1: [], 2: []}
    for _ in range(5):
        for output in generator.step():
            found[output.ident] += output.tokens
    before = generator.load().free_pages
    assert generator.cancel(1) and not generator.cancel(1) and not generator.cancel("unknown")
    assert generator.load().free_pages >= before + 30 // 4
    said = generator.step()
    assert [o.ident for o in said if o.finish_reason == "cancelled"] == [1]
    for output in said:
        found[output.ident] += output.tokens
    while not generator.idle:
        for output in generator.step():
            found[output.ident] += output.tokens
    assert found[0] == wanted[0] and found[2] == wanted[2] and found[1] == wanted[1][: len(found[1])]
    assert generator.load().free_pages == generator.pages.count


def test_two_at_once_and_the_model_for_others_between_steps() -> None:
    model, given = llama(), prompts((20, 30))
    wanted = [alone(model, prompt, NEW) for prompt in given]
    one, two = Generator(model), Generator(model, page_size=3)
    one.submit(Request("a", given[0], GREEDY))
    two.submit(Request("a", given[1], GREEDY))
    found: list = [[], []]
    while not (one.idle and two.idle):
        for which, generator in enumerate((one, two)):
            found[which] += [token for output in generator.step() for token in output.tokens]
        assert model.config._attn_implementation == "sdpa"
    assert found == wanted
    one.close()
    assert two.generate(given, GREEDY) == wanted
    with pytest.raises(UsageError, match="closed"):
        one.submit(Request("b", given[0], GREEDY))


def test_what_goes_wrong_in_one_request_leaves_the_others_their_tokens() -> None:
    model, prompt = llama(rope_parameters=LONG), prompts((20,))[0]
    wanted = alone(model, prompt, 8)
    generator = Generator(model)
    generator.submit(Request("packed", prompt, SamplingParams(max_new_tokens=8, ignore_eos=True)))
    generator.submit(Request("alone", prompt * 3, GREEDY))  # over the original length: through generate
    with mock.patch.object(model, "generate", side_effect=RuntimeError("broken")):
        said = generator.step()
    while not generator.idle:
        said += generator.step()
    failed = [output for output in said if output.ident == "alone"]
    assert [output.finish_reason for output in failed] == ["error"] and "broken" in str(failed[0].error)
    assert [token for output in said if output.ident == "packed" for token in output.tokens] == wanted


def test_dropout_is_off_in_a_model_that_trains_and_on_after() -> None:
    model, prompt = llama(attention_dropout=0.5), prompts((20,))[0]
    wanted = alone(model, prompt, NEW)
    model.train()
    assert Generator(model).generate([prompt], GREEDY) == [wanted] and model.training


def test_an_infinity_of_one_sequence_stays_with_it() -> None:
    model, given = llama(vocab_size=300), prompts((5, 21))
    wanted = alone(model, given[1], NEW)
    with torch.no_grad():
        model.model.embed_tokens.weight[299] = float("nan")
    generator = Generator(model, page_size=4)
    found = run(generator, [Request(0, [299, 7, 8], GREEDY), Request(1, given[1], GREEDY)])
    assert found[1][0] == wanted


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            Request(0, [1] * 200, SamplingParams(max_new_tokens=57)),
            "200 tokens and 57 new ones are 257, over the limit of 256",
        ),
        (Request(0, [], GREEDY), "empty"),
        (Request(0, [256], GREEDY), "256 in the prompt"),
        (Request(0, [-1], GREEDY), "-1 in the prompt"),
        (Request(0, [1.0], GREEDY), "1.0 in the prompt"),  # type: ignore[list-item]
        (Request(0, [1], SamplingParams(stop="x")), "tokenizer"),
        (Request("busy", [1], GREEDY), "unique"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_said_before_any_work(refusing, request_, said) -> None:
    with pytest.raises(RequestError, match=said):
        refusing.submit(request_)
    assert refusing.load().running + refusing.load().waiting == 1


@pytest.fixture(scope="module")
def refusing():
    generator = Generator(llama())
    generator.submit(Request("busy", [1], GREEDY))
    return generator


def test_a_cache_that_is_too_small_is_said_with_both_numbers() -> None:
    model = llama()
    with pytest.raises(RequestError, match="less than one page"):
        Generator(model, cache_bytes=10)
    small = Generator(model, cache_bytes=32 * 1024, page_size=16)
    with pytest.raises(RequestError, match=f"are 90, over the {small.pages.count * 16} tokens"):
        small.submit(Request(0, [3] * 60, SamplingParams(max_new_tokens=30)))
    with pytest.raises(RequestError, match="max_length 300"):
        Generator(model, max_length=300)


def test_a_model_that_cannot_be_batched_says_why() -> None:
    assert why_not_batchable(llama()) is None and why_not_batchable(gpt_neo()) is None
    assert "another kind in its cache than keys and values" in (why_not_batchable(mamba()) or "")
    assert "model of Transformers" in (why_not_batchable(torch.nn.Linear(2, 2)) or "")
