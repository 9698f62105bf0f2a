"""A sample of the table over all causal LMs (`table.py`), each toy speaking in a process without the package."""

from __future__ import annotations

import pytest

from tests.unit.inference.table import rows_of

WAYS = {
    "Qwen3ForCausalLM": "packed",
    "BloomForCausalLM": "gathered",
    "GPTNeoXJapaneseForCausalLM": "gathered",  # it views what the cache hands out, which has to be contiguous
    "BartForCausalLM": "gathered, even",
    "MoshiForCausalLM": "generate",  # its window is in the cache of `generate` alone
}


@pytest.mark.slow
def test_a_sample_of_the_table_is_equal(tmp_path) -> None:
    rows = rows_of(list(WAYS), tmp_path)
    assert {name: (row["toy"], row.get("verdict"), row.get("kind")) for name, row in rows.items()} == {
        name: ("", "equal", way) for name, way in WAYS.items()
    }
