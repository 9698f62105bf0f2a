"""Drafts by a model: tokens as without, whatever the draft model says; its pages are free afterwards."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import NotAvailableError, RequestError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.draft_model import REST, TRIAL, DraftModel
from deepspeed.inference.executors.paged import PagedExecutor
from tests.unit.inference.test_generator import Numbers, run
from tests.unit.inference.toys import alone, gpt_neo, llama, mamba, prompts, scale

TIGHT = {"page_size": 3, "max_batch_tokens": 13, "max_sequences": 4, "prompt_chunk": 7}
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)
HOT = SamplingParams(max_new_tokens=16, temperature=1.2, top_p=0.95, seed=3, ignore_eos=True)


def free(generator: Generator) -> bool:
    draft = generator._draft
    assert isinstance(draft, DraftModel) and draft.scheduler.idle
    return draft.pages.available == draft.pages.count and generator.load().free_pages == generator.pages.count


def requests() -> list[Request]:
    return [
        Request((i, hot is HOT), prompt, hot) for i, prompt in enumerate(prompts((1, 9, 25))) for hot in (GREEDY, HOT)
    ]


@pytest.fixture(scope="module")
def model():
    return llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def wanted(model) -> dict:
    return {ident: one[0] for ident, one in run(Generator(model), requests()).items()}


def rate(generator: Generator) -> float:
    load = generator.load()
    return load.accepted / max(load.drafts, 1)


@pytest.mark.parametrize("options", [{}, TIGHT | {"prefix_cache": False}])
def test_a_model_drafts_for_itself_and_nearly_all_is_accepted(model, wanted, options) -> None:
    generator = Generator(model, draft_model=model, speculation=4, **options)
    found = run(generator, requests())
    assert {ident: one[0] for ident, one in found.items()} == wanted and free(generator)
    greedy = Generator(model, draft_model=model, speculation=4, **options)
    prompt = prompts((9,))[0]
    assert greedy.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True)) == [alone(model, prompt, 40)]
    assert rate(greedy) > 0.95 and greedy.load().drafts > 20 and free(greedy)


def test_a_random_draft_changes_no_token_and_rests(model, wanted) -> None:
    other = scale(llama(num_hidden_layers=1), seed=9)
    generator = Generator(model, draft_model=other, speculation=3, **TIGHT)
    found = run(generator, requests())
    assert {ident: one[0] for ident, one in found.items()} == wanted and free(generator)
    one = Generator(model, draft_model=other, speculation=3)
    prompt = prompts((9,))[0]
    assert one.generate([prompt], SamplingParams(max_new_tokens=REST, ignore_eos=True)) == [alone(model, prompt, REST)]
    assert rate(one) < 0.2 and TRIAL <= one.load().drafts < 2 * TRIAL, "too few drafts were accepted, so it rests"


def test_drafts_through_the_modules_and_gathered(model) -> None:
    prompt = prompts((20,))[0]
    for make in (model, gpt_neo()):
        generator = Generator(make, draft_model=make, speculation=4, page_size=3)
        if isinstance(plain := getattr(generator._draft._executor, "plain", None), PagedExecutor):  # type: ignore[union-attr]
            plain.store = plain.store.resized(generator.pages.count, 3)
            generator._draft._executor = plain  # type: ignore[union-attr]
        assert generator.generate([prompt], GREEDY) == [alone(make, prompt, 16)]
        assert rate(generator) > 0.9 and free(generator)


def test_drafts_with_preemption_prefixes_cancels_and_ends(model) -> None:
    shared = prompts((24,))[0]
    given = [shared + prompt for prompt in prompts((3, 4, 5, 6))]
    wanted = [alone(model, prompt, 16) for prompt in given]
    page = 1 * 2 * 2 * 16 * 4 * 4  # bytes of 4 tokens
    draft = scale(llama(num_hidden_layers=1), seed=5)
    with torch.no_grad():
        draft.lm_head.weight += 0.3 * torch.randn(
            draft.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)
        )
    for reuse in (True, False):
        generator = Generator(
            model, tokenizer=Numbers(), draft_model=draft, speculation=4, page_size=4, cache_bytes=26 * page,
            prefix_cache=reuse,
        )  # fmt: skip
        assert generator.generate(given, GREEDY) == wanted and free(generator)
        assert generator.load().preemptions > 0 or reuse
        stops = {
            "string": SamplingParams(max_new_tokens=16, ignore_eos=True, stop=(f" {wanted[0][6]} {wanted[0][7]}",)),
            "token": SamplingParams(max_new_tokens=16, ignore_eos=True, stop_token_ids=(wanted[0][5],)),
            "gone": GREEDY,
        }
        for ident, sampling in stops.items():
            generator.submit(Request(ident, given[0], sampling))
        outputs = generator.step()
        generator.cancel("gone")
        while not generator.idle:
            outputs += generator.step()
        texts = {ident: [token for o in outputs if o.ident == ident for token in o.tokens] for ident in stops}
        assert texts["string"] == wanted[0][:8] and texts["token"] == wanted[0][: wanted[0].index(wanted[0][5]) + 1]
        assert texts["gone"] == wanted[0][: len(texts["gone"])] and free(generator)
        assert 0 < generator.load().accepted < generator.load().drafts


def test_answers_of_one_prompt_have_drafts_too(model, wanted) -> None:
    prompt, generator = prompts((1, 9, 25))[2], Generator(model, draft_model=model, speculation=3, prefix_cache=False)
    found = run(generator, [Request(i, prompt, (GREEDY, HOT)[i % 2], group="a") for i in range(4)])
    assert [found[i][0] for i in range(4)] == [wanted[2, False], wanted[2, True]] * 2 and free(generator)


@pytest.mark.parametrize("options", [{}, {"prefix_cache": False}, TIGHT | {"prefix_cache": False}])
def test_answers_of_one_prompt_compute_it_once_and_have_the_tokens_of_requests(model, options) -> None:
    prompt = prompts((17,))[0]
    sampled = [SamplingParams(max_new_tokens=9, temperature=1.1, seed=5, index=i, ignore_eos=True) for i in range(5)]
    wanted = [run(Generator(model), [Request(0, prompt, each)])[0][0] for each in sampled]
    generator = Generator(model, **options)
    rows, executor = [], generator._executor.run
    generator._executor.run = lambda batch: rows.append(len(batch.tokens)) or executor(batch)  # type: ignore[func-returns-value]
    for i, each in enumerate(sampled):
        generator.submit(Request(i, prompt, each, group="one"))
    first = generator.step()
    if not options.get("prompt_chunk"):
        assert rows == [17] and sorted(output.ident for output in first) == [0, 1, 2, 3, 4]
    found = {i: [t for o in first if o.ident == i for t in o.tokens] for i in range(5)}
    generator.cancel(1)
    while not generator.idle:
        for output in generator.step():
            found[output.ident] += output.tokens
    assert [found[i] for i in (0, 2, 3, 4)] == [wanted[i] for i in (0, 2, 3, 4)]
    assert found[1] == wanted[1][: len(found[1])] and sum(rows) <= 17 + 5 * 9
    assert generator.load().free_pages == generator.load().pages


def test_a_group_has_one_prompt(model) -> None:
    generator = Generator(model)
    generator.submit(Request(0, [5, 6], GREEDY, group="a"))
    with pytest.raises(RequestError, match="same prompt"):
        generator.submit(Request(1, [5, 7], GREEDY, group="a"))
    generator.close()


def test_draft_models_that_do_not_fit_are_refused(model) -> None:
    with pytest.raises(RequestError, match="vocabulary of 300 tokens and the model one of 256"):
        Generator(model, draft_model=llama(vocab_size=300), speculation=2)
    with pytest.raises(RequestError, match="draft_model needs speculation"):
        Generator(model, draft_model=model)
    with pytest.raises(NotAvailableError, match="cannot be a draft model"):
        Generator(model, draft_model=mamba(), speculation=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "layers:24"])
def test_the_trained_model_with_itself_in_integers_or_pruned_as_draft(kind: str) -> None:
    """Greedy and drawn tokens of a few held-out prompts, in one batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from benchmarks.draft_model import draft_of
    from benchmarks.trained_guesses import asked
    from tests import trained

    folder = trained.base()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = [prompts[0][:200] for prompts in asked(AutoTokenizer.from_pretrained(folder), 1).values()]
    options = {"cache_bytes": 1 << 27, "prefix_cache": False}
    mixed = [Request((i, hot is HOT), prompt, hot) for i, prompt in enumerate(given) for hot in (GREEDY, HOT)]
    found = {}
    for draft in (None, draft_of(target, kind)):
        generator = Generator(target, draft_model=draft, speculation=4 if draft is not None else 0, **options)
        found[draft is None] = {ident: one[0] for ident, one in run(generator, mixed).items()}
    assert found[True] == found[False] and free(generator)
    assert rate(generator) > (0.4 if kind == "int8" else 0) and generator.load().drafts
