"""Experts of the installed Transformers' models, divided among ranks: none is wrong in silence."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.parallel.expert_models import build, compare, names
from tests.parallel.expert_table import OUT, PAGE, RANKS, line, page, rows_of

# One for each form of calls, and a parameter of all experts; Mixtral's form is in test_experts.py.
KINDS = ("Llama4ForCausalLM", "SwitchTransformersForConditionalGeneration", "JetMoeForCausalLM")
MORE_KINDS = (
    "NllbMoeForConditionalGeneration",
    "LongcatFlashForCausalLM",
    "MuseSparkTextModel",
    "DiffusionGemmaForBlockDiffusion",
)


def row_of(name: str) -> dict[str, Any]:
    model, why = build(name)
    assert model is not None, why
    return compare(model)


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_KINDS)])
def test_one_of_each_kind(workers: Any, name: str) -> None:
    for row in workers(RANKS).run(row_of, name, timeout=120):
        assert row["verdict"] == "equal", row


def rows_of_the_page() -> dict[str, Any]:
    """What its lines say; the command writes the same of it."""
    text, rows = PAGE.read_text(), {}
    for cells in re.findall(r"^\| (\w+) \| ([\w -]+) \| (\S+) \| (\S+) \| ([^|]+) \| (.*) \|$", text, re.M):
        name, kind, layers, form, verdict, why = cells
        if kind == "kind":
            continue
        row = {"verdict": verdict.split(" ")[0] if verdict.startswith("equal") else verdict, "why": why}
        row |= {"worst": float(verdict.split(" ")[1])} if verdict.startswith("equal") else {}
        row |= {key: value for key, value in (("layers", layers), ("form", form)) if value != "–"}
        assert line(name, kind, row) in text
        rows[name] = {str(RANKS): row}
    return rows


def test_the_lines_of_the_page_are_what_the_command_writes() -> None:
    verdicts = [row[str(RANKS)]["verdict"] for row in rows_of_the_page().values()]
    assert verdicts.count("equal") >= 60 and not {"WRONG", "FAILED"} & set(verdicts)


@pytest.mark.slow  # it imports every model that Transformers has
def test_the_page_is_what_the_command_writes() -> None:
    text, rows, listed = PAGE.read_text(), rows_of_the_page(), names()
    assert set(rows) <= set(listed)
    not_built = int(re.findall(r"and (\d+) cannot be built small", " ".join(text.split()))[0])
    for at, name in enumerate(sorted(set(listed) - set(rows))):
        rows[name] = {str(RANKS): {"verdict": OUT[at < not_built], "why": ""}}
    assert page(rows) == text


@pytest.mark.slow
def test_no_model_is_wrong_in_silence() -> None:
    found = {name: rows_of(name)[str(RANKS)] for name in sorted(names())}
    assert {name: row for name, row in found.items() if row["verdict"] in ("WRONG", "FAILED")} == {}
    assert sum(row["verdict"] == "equal" for row in found.values()) >= 60
