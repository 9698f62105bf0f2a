"""A string that is the name of one of the package's modules, or of something in it, names one that is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.architecture.sources import trees
from tests.architecture.test_public_names import _look_up

DOTTED = re.compile(r"deepspeed(\.[A-Za-z_]\w*)+")
# Strings of this form that name something else.
OTHERS = {"deepspeed.accelerators", "deepspeed.meet.owner", "deepspeed.pt", "deepspeed.status"}
# Names of later features, and the table that test_addresses.py reads; what upstream pickles.
ABSENT = ("foundation/addresses.py", "checkpoint/compat/upstream_read.py")


def _strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DOTTED.fullmatch(node.value):
            yield node.lineno, node.value


def test_strings_that_name_modules_name_modules() -> None:
    wrong, seen = [], set[str]()
    for path, tree in trees().items():
        for line, text in _strings(tree) if path not in ABSENT else ():
            if text in OTHERS:
                continue
            seen.add(text)
            try:
                _look_up(text)
            except (ImportError, AttributeError) as error:
                wrong.append(f"{path}:{line}: {text}: {error}")
    assert len(seen) > 20  # it looks at something
    assert not wrong, "\n".join(wrong)
