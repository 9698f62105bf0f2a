"""Write chats to train on, from the documentation in Python's own library: `python chats.py chats.jsonl`.

A line is `{"messages": [{"role": "user", "content": …}, {"role": "assistant", "content": …}]}`.
"""

from __future__ import annotations

import ast
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}


def documented() -> Iterator[tuple[str, str]]:
    """(full name, first paragraph of the docstring) of the public functions and classes."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).with_suffix("").parts
        if not _EXCLUDED.isdisjoint(parts) or any(part.startswith("_") for part in parts):
            continue
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                paragraph = (ast.get_docstring(node) or "").split("\n\n")[0]
                if len(paragraph) > 20:
                    yield ".".join((*parts, node.name)), " ".join(paragraph.split())


def chats(seed: int = 0) -> list[dict[str, list[dict[str, str]]]]:
    """All of them, in a random order."""
    pairs = list(documented())
    random.Random(seed).shuffle(pairs)
    return [
        {"messages": [{"role": "user", "content": f"What is {name}?"}, {"role": "assistant", "content": text}]}
        for name, text in pairs
    ]


if __name__ == "__main__":
    lines = [json.dumps(chat) + "\n" for chat in chats()]
    Path(sys.argv[1]).write_text("".join(lines))
    print(f"{len(lines)} chats in {sys.argv[1]}")
