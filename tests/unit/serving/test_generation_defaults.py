"""End tokens and sampling defaults of a folder's three files, and what replaces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed.errors import ArgumentError
from deepspeed.serving.arguments import parse
from deepspeed.serving.generation_defaults import CLASS, GENERATION, MODEL, OVERRIDE, TOKENIZER, read_defaults
from tests.unit.inference.vocabularies import vocabulary

SIZE = 500


def folder_of(path: Path, generation: Any = None, model: Any = None) -> str:
    for name, entries in ((GENERATION, generation), (MODEL, model)):
        if entries is not None:
            (path / name).write_text(entries if isinstance(entries, str) else json.dumps(entries))
    return str(path)


def read(folder: str, source: str = "auto", override: str = "", tokenizer: Any = None) -> Any:
    return read_defaults(folder, source, override, tokenizer or vocabulary("byte-level"), SIZE)


def test_end_tokens_come_from_all_three_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, {"eos_token_id": [7, 5]}, {"eos_token_id": 7})
    assert read(folder).ends == {2: [TOKENIZER], 5: [GENERATION], 7: [GENERATION, MODEL]}
    assert read(folder, "none").ends == {2: [TOKENIZER], 7: [MODEL]} == read(folder, "vllm").ends
    assert read(folder, override='{"eos_token_id": 9}').ends == {9: [OVERRIDE]}
    assert read(folder, tokenizer=object()).ends == {5: [GENERATION], 7: [GENERATION, MODEL]}


def test_a_default_of_the_class_counts_where_no_file_states_an_end(tmp_path: Path) -> None:
    """Transformers' own generate ends there, too."""
    folder = folder_of(tmp_path, {}, {})
    assert read_defaults(folder, "auto", "", object(), SIZE, [3]).ends == {3: [CLASS]}
    assert read_defaults(folder, "auto", '{"eos_token_id": []}', object(), SIZE, [3]).ends == {}
    assert read_defaults(folder, "auto", "", vocabulary("byte-level"), SIZE, [3]).ends == {2: [TOKENIZER]}


@pytest.mark.parametrize(
    ("generation", "model", "ends"),
    [
        (None, None, [2]),
        (None, {"text_config": {"eos_token_id": [3]}}, [2, 3]),
        ({"eos_token_id": None}, {"eos_token_id": [None, 3]}, [2, 3]),
        ({"eos_token_id": [SIZE, -1, True, "x"]}, {"eos_token_id": 2}, [2]),
        ({"eos_token_id": []}, {}, [2]),
    ],
)
def test_what_is_no_token_of_the_model_ends_nothing(
    tmp_path: Path, generation: Any, model: Any, ends: list[int]
) -> None:
    assert list(read(folder_of(tmp_path, generation, model)).ends) == ends


def test_an_end_token_that_the_vocabulary_lacks_is_none(tmp_path: Path) -> None:
    """Transformers gives the number of the unknown token for it."""
    import copy

    tokenizer = copy.deepcopy(vocabulary("byte-level"))
    tokenizer._special_tokens_map["eos_token"] = "<|nowhere|>"
    assert tokenizer.eos_token == "<|nowhere|>"
    assert read(folder_of(tmp_path), tokenizer=tokenizer).ends == {}


def test_sampling_defaults_and_their_source(tmp_path: Path) -> None:
    stated = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "max_new_tokens": 9, "num_beams": 4}
    folder = folder_of(tmp_path, stated)
    found = read(folder)
    assert found.sampling == {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9} and found.source == GENERATION
    assert "temperature 0.6, top_k 20" in " ".join(found.lines(vocabulary("byte-level")))
    assert read(folder, "none").sampling == {}
    mixed = read(folder, override='{"temperature": 0, "min_p": 0.1}')
    assert mixed.sampling == {"temperature": 0, "top_k": 20, "max_new_tokens": 9, "min_p": 0.1}
    assert mixed.source == f"{GENERATION} and {OVERRIDE}"
    assert read(folder_of(tmp_path, {"top_k": -1})).sampling == {}


def test_another_folder_may_state_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "other").mkdir()
    model = folder_of(tmp_path / "model", {"temperature": 0.5, "eos_token_id": 4}, {"eos_token_id": 6})
    other = folder_of(tmp_path / "other", {"top_p": 0.5, "eos_token_id": 5})
    found = read(model, other)
    assert found.sampling == {"top_p": 0.5} and list(found.ends) == [2, 5, 6]
    with pytest.raises(ArgumentError, match=f"there is no {GENERATION}"):
        read(model, str(tmp_path))


@pytest.mark.parametrize(
    "generation", ["{", "[]", {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"max_new_tokens": 0}]
)
def test_values_that_mean_nothing_end_the_start_by_name(tmp_path: Path, generation: Any) -> None:
    name = next(iter(generation)) if isinstance(generation, dict) else GENERATION
    with pytest.raises(ArgumentError, match=name):
        read(folder_of(tmp_path, generation))


@pytest.mark.parametrize(
    "arguments",
    [
        ("--generation-config", "/nowhere"),
        ("--override-generation-config", "{"),
        ("--override-generation-config", "[]"),
        ("--override-generation-config", '{"num_beams": 2}'),
        ("--override-generation-config", '{"top_p": 2}'),
        ("--allowed-origins", "[3]"),
        ("--allowed-origins", '["x"'),
        ("--allowed-origins", ""),
        ("--allowed-methods", "[]"),
    ],
)
def test_wrong_options_are_refused_by_name(arguments: tuple[str, str]) -> None:
    with pytest.raises(ArgumentError, match=arguments[0]):
        parse(["model", *arguments])


def test_options_in_vllms_form() -> None:
    options = parse(["model", "--allowed-origins", '["https://a", "https://b"]', "--allowed-origins", "https://c"])
    assert options.allowed_origins == ("https://a", "https://b", "https://c") and options.allowed_methods == ("*",)
    assert parse(["model"]).allowed_origins == () and not parse(["model"]).allow_credentials
