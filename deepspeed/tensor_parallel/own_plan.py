"""What a model of Transformers says itself of its matrices (`base_model_tp_plan`, with the heads around it).

The plan does not follow it: most classes have none, and those that have one leave experts, fused layouts and heads that
do not divide to layers of Transformers. Where the two differ, the plan's table says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from deepspeed.tensor_parallel.regions import owner

_STYLES = {
    "colwise": "column", "packed_colwise": "column", "colwise_gather_output": "column", "rowwise": "row",
    "rowwise_split_input": "row", "packed_rowwise": "row",
}  # fmt: skip


def said_by(model: Any, matrices: Iterable[str]) -> dict[str, str]:
    """By which of its dims a model wants a matrix cut, "row" or "column", by name of its parameter.

    Args:
        model: of any kind; one that says nothing gives nothing.
        matrices: names of its parameters.
    """
    rules = getattr(model, "tp_plan", None)
    found: dict[str, str] = {}
    known = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), _STYLES[style])
        for pattern, style in (rules.items() if isinstance(rules, dict) else ())
        if style in _STYLES
    ]
    for name in matrices if known else ():
        places = (name, owner(name)) if name.endswith(".weight") else (name,)
        how = next((how for pattern, how in known if any(map(pattern.fullmatch, places))), None)
        if how is not None:
            found[name] = how
    return found
