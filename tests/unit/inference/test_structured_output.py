"""Structured output: every answer follows its constraint, whatever the model, the batch and the drafts."""

from __future__ import annotations

import json
import pickle
import re
import threading
from functools import cache
from typing import Any
from unittest import mock

import pytest

from deepspeed.errors import RequestError
from deepspeed.inference import Generator, Request, SamplingParams
from deepspeed.inference.structured_output import (
    LARGEST,
    LONGEST,
    REMEMBERED,
    ConstraintCompiler,
    StructuredOutput,
    _grammar_of,
)
from tests.unit.inference.schemas import schemas
from tests.unit.inference.toys import llama, mamba
from tests.unit.inference.vocabularies import vocabulary

pytest.importorskip("llguidance", reason="the extra `serve` has it")
jsonschema = pytest.importorskip("jsonschema")

PADDING, LONG = 5, 400
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.5}


@cache
def model(kind: str, **sizes: Any) -> Any:
    return llama(vocab_size=len(vocabulary(kind)) + PADDING, max_position_embeddings=1024, **sizes)


def structured(schema: Any) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(schema))


def text_of(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def run(generator: Generator, requests: list[Request]) -> dict[Any, tuple[list[int], str | None]]:
    """Tokens and finish reason of each request, all in one batch."""
    for request in requests:
        generator.submit(request)
    tokens: dict[Any, list[int]] = {request.ident: [] for request in requests}
    reasons: dict[Any, Any] = {}
    while not generator.idle:
        for output in generator.step():
            assert output.error is None, output.error
            tokens[output.ident] += output.tokens
            reasons[output.ident] = output.finish_reason
    return {ident: (tokens[ident], reasons[ident]) for ident in tokens}


def asked(made: list[Any], seed: int = 0, new: int = LONG) -> list[Request]:
    requests = []
    for number, schema in enumerate(made):
        drawn = DRAWN | {"seed": seed + number} if number % 2 else GREEDY
        options = SamplingParams(max_new_tokens=new, structured=structured(schema), **drawn)
        requests.append(Request(number, [5 + number % 7] * (3 + number % 40), options))
    return requests


def check(made: list[Any], answers: dict[Any, tuple[list[int], str | None]], tokenizer: Any) -> None:
    for number, schema in enumerate(made):
        tokens, reason = answers[number]
        text = text_of(tokenizer, tokens)
        assert reason == "stop", (schema, text)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])
def test_answers_follow_their_schemas_with_chunks_drafts_and_neighbours(kind: str) -> None:
    """Tokens are those of each request alone."""
    made, tokenizer = schemas(12), vocabulary(kind)
    whole = Generator(model(kind), tokenizer=tokenizer, speculation=4, max_batch_tokens=24, prompt_chunk=16)
    answers = run(whole, asked(made))
    check(made, answers, tokenizer)
    plain = Generator(model(kind), tokenizer=tokenizer, prefix_cache=False)
    for request in asked(made)[:6]:
        assert run(plain, [request])[request.ident] == answers[request.ident]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "byte-fallback, spaces kept"])
def test_two_hundred_schemas(kind: str) -> None:
    made, tokenizer = schemas(200), vocabulary(kind)
    generator = Generator(model(kind), tokenizer=tokenizer, speculation=4, max_batch_tokens=64, max_sequences=16)
    check(made, run(generator, asked(made)), tokenizer)


@pytest.mark.slow
def test_two_hundred_schemas_on_the_trained_model() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.trained import base

    folder = base()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    made = schemas(200)
    generator = Generator(trained, tokenizer=tokenizer, speculation=4, max_sequences=16, lossless_weights=True)
    check(made, run(generator, asked(made, new=1500)), tokenizer)  # it indents as far as it may


@pytest.mark.parametrize("kind", ["byte-level", "generate"])
def test_every_kind_of_constraint_on_every_executor(kind: str) -> None:
    tokenizer = vocabulary("byte-level")
    toy = mamba(vocab_size=len(tokenizer) + PADDING) if kind == "generate" else model(kind)
    generator = Generator(toy, tokenizer=tokenizer)
    assert kind != "generate" or generator.kind == "generate"
    for form, value, pattern in (
        ("regex", r"[A-Z]{2}\d{1,3}(é|日本)", r"[A-Z]{2}[0-9]{1,3}(é|日本)"),
        ("choice", ("yes\n", "no", "日本🙂"), "yes\n|no|日本🙂"),
        ("grammar", 'start: "x" ("," "x"){1,3}', "x(,x){1,3}"),
        ("grammar", 'root ::= "a" | "b" [0-9] [0-9]', "a|b[0-9]{2}"),
    ):
        for drawn in (GREEDY, {**DRAWN, "seed": 1}):
            options = SamplingParams(max_new_tokens=40, structured=StructuredOutput(form, value), **drawn)
            (tokens, reason) = run(generator, [Request(0, [1, 5, 9], options)])[0]
            assert reason == "stop" and re.fullmatch(pattern, text_of(tokenizer, tokens)), text_of(tokenizer, tokens)


def test_fractions_of_a_second_are_limited() -> None:
    """The trained model wrote zeros until its limit."""
    from llguidance import LLMatcher, LLTokenizer

    for form, start in (("time", ""), ("date-time", "2024-02-29T")):
        at = {"anyOf": [{"type": "string", "format": form}]}
        schema = {"type": "object", "properties": {"at": at, "format": {"const": {"format": "time"}}}}
        grammar = json.dumps({"grammars": [_grammar_of(structured(schema))]})
        for text, fits in (("12Z", True), ("12.123456789+01:00", True), ("12.1234567890Z", False), ("12.5", False)):
            matcher = LLMatcher(LLTokenizer("byte"), grammar)
            whole = f'{{"at": "{start}10:11:{text}", "format": {{"format": "time"}}}}'.encode()
            assert (matcher.try_consume_tokens(list(whole)) == len(whole)) == fits, (form, text)


def test_ends_are_where_the_constraint_may_end() -> None:
    tokenizer = vocabulary("byte-level")
    generator = Generator(model("byte-level"), tokenizer=tokenizer)
    digits = StructuredOutput("regex", "[0-9]{3,}")
    lead = StructuredOutput("choice", ("yes", "no"), lead="lead[lazy]: /[a-z ]{0,20}#/")
    biased = {"logit_bias": {2: 100.0}}
    (tokens, reason) = run(generator, [Request(0, [1, 5], SamplingParams(structured=digits, **biased))])[0]
    assert reason == "stop" and tokens[-1] == 2 and re.fullmatch("[0-9]{3,}", text_of(tokenizer, tokens))
    options = SamplingParams(structured=digits, max_new_tokens=9, ignore_eos=True)
    assert run(generator, [Request(0, [1, 5], options)])[0][1] == "length"
    options = SamplingParams(structured=digits, max_new_tokens=12, min_new_tokens=8, **biased)
    assert len(run(generator, [Request(0, [1, 5], options)])[0][0]) == 9
    (tokens, reason) = run(generator, [Request(0, [1, 5], SamplingParams(structured=lead, max_new_tokens=60))])[0]
    assert reason == "stop" and re.fullmatch("[a-z ]*#(yes|no)", text_of(tokenizer, tokens))


def test_a_space_that_the_first_token_would_lose_is_not_counted() -> None:
    """After a prompt without text, SentencePiece drops the first token's space."""
    tokenizer = vocabulary("byte-fallback")
    generator = Generator(model("byte-fallback"), tokenizer=tokenizer)
    options = SamplingParams(structured=StructuredOutput("regex", " ?(the|quick) [a-z]{2}"), max_new_tokens=20)
    for prompt in ([1], [1, 300], [1, 260, 270]):
        tokens, _ = run(generator, [Request(0, prompt, options)])[0]
        whole, before = text_of(tokenizer, prompt + tokens), text_of(tokenizer, prompt)
        assert re.fullmatch(" ?(the|quick) [a-z]{2}", whole[len(before) :]), (whole, before)


@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("json_schema", '{"type": "strin"}'), ("json_schema", '{"not": {}}'), ("json_schema", "[1]"),
        ("json_schema", "{"), ("json_schema", "false"), ("json_schema", '{"$ref": "http://example.org/x"}'),
        ("json_schema", '{"type": "array", "uniqueItems": true}'), ("regex", "(a"), ("regex", r"(a)\1"),
        ("grammar", "start: missing"), ("grammar", "nothing"), ("regex", "(" * 5000 + "a" + ")" * 5000),
    ],
)  # fmt: skip
def test_constraints_that_cannot_be_are_refused_by_field(form: str, value: str) -> None:
    compiler = ConstraintCompiler(vocabulary("byte-level"), None)
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match="^guided: "):
            compiler.matcher(StructuredOutput(form, value, field="guided"))


def test_what_is_no_constraint_is_refused() -> None:
    wrong: list[tuple[str, Any]] = [
        ("xml", "a"), ("regex", ""), ("choice", ()), ("choice", "ab"), ("choice", ("a", "")), ("json_schema", {}),
        ("regex", "a" * (LONGEST + 1)), ("regex", "\ud800"),
    ]  # fmt: skip
    for kind, value in wrong:
        with pytest.raises(RequestError, match="^structured: "):
            StructuredOutput(kind, value)
    with pytest.raises(RequestError, match="tokenizer"):
        ConstraintCompiler(None, 10).compile(StructuredOutput("json_object"))
    with pytest.raises(RequestError, match="depends on others"):
        ConstraintCompiler(vocabulary("word pieces"), None).compile(StructuredOutput("json_object"))


def test_the_compiler_remembers_and_matchers_are_independent() -> None:
    compiler = ConstraintCompiler(vocabulary("byte-level"), None)
    for number in range(REMEMBERED + 3):
        compiler.compile(StructuredOutput("regex", f"a{{{number + 1}}}"))
    kept = [compiler.remembered(StructuredOutput("regex", f"a{{{n + 1}}}")) for n in range(REMEMBERED + 3)]
    assert [one is not None for one in kept] == [False] * 3 + [True] * REMEMBERED
    constraint = pickle.loads(pickle.dumps(StructuredOutput("choice", ("abc", "abd"))))
    a, b = (vocabulary("byte-level").convert_tokens_to_ids(letter) for letter in "ab")
    one, two = compiler.matcher(constraint), compiler.matcher(constraint)
    one.accept(a)
    assert one.valid([b, b]) == 1 and two.valid([b]) == 0 and two.valid([a, b]) == 2
    three = one.copy()
    one.accept(b)
    one.rollback(1)
    assert one.valid([b]) == three.valid([b]) == 1
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(constraint))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


def test_a_result_is_remembered_as_long_as_it_is_held() -> None:
    compiler = ConstraintCompiler(None, None)
    with mock.patch.object(ConstraintCompiler, "_compile", lambda *_: object()):
        held = compiler.prepare(StructuredOutput("regex", "first"))
        dropped = compiler.prepare(StructuredOutput("regex", "second")).value
        for number in range(REMEMBERED):
            compiler.prepare(StructuredOutput("regex", f"{number}"))
        assert compiler.compile(StructuredOutput("regex", "first")) is held.value
        assert compiler.compile(StructuredOutput("regex", "second")) is not dropped


def test_a_slow_constraint_does_not_stop_others_and_a_panic_is_an_error() -> None:
    entered, let_go = threading.Event(), threading.Event()

    class Panic(BaseException):
        pass

    def compile_(self: Any, one: StructuredOutput) -> Any:
        if one.value == "slow":
            entered.set()
            assert let_go.wait(60)
        if one.value == "panic":
            raise Panic("deep")
        return object()

    compiler = ConstraintCompiler(None, None)
    with mock.patch.object(ConstraintCompiler, "_compile", compile_):
        thread = threading.Thread(target=compiler.prepare, args=(StructuredOutput("regex", "slow"),))
        thread.start()
        assert entered.wait(60)
        assert compiler.compile(StructuredOutput("regex", "quick"))
        with pytest.raises(RequestError, match="^structured: .*Panic"):
            compiler.compile(StructuredOutput("regex", "panic"))
        assert thread.is_alive()
        let_go.set()
        thread.join()


def test_schemas_that_would_compile_for_long_are_refused() -> None:
    compiler, many = ConstraintCompiler(vocabulary("byte-level"), None), LARGEST + 1
    wrong = [{"items": {"properties": {f"p{n}": {} for n in range(many)}}}, {"anyOf": [{"const": 1}] * many}]
    for schema in wrong:
        with pytest.raises(RequestError, match=f"^structured: (properties|anyOf) has {many} entries"):
            compiler.compile(structured(schema))
    compiler.compile(structured({"enum": list(range(many))}))
