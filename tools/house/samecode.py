"""Compares bytecode with a commit: `python -m tools.house.samecode REVISION`.

Renames change no instruction. Functions are compared in the order in which they stand in files of the same path. What
differs is printed: variables that inner functions share are
sorted by name, so that a few functions differ in the order of their cells alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import CodeType

from tools.house.rename import ROOT


def codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """All code objects of a module, in order."""
    yield code.co_qualname if sys.version_info >= (3, 11) else code.co_name, code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def main() -> int:
    """Compare all files of the package that are at the same path in both."""
    (revision,) = sys.argv[1:]
    listing = ["git", "ls-tree", "-r", "--name-only", revision, "deepspeed"]
    paths = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    count = differing = 0
    for path in (path for path in paths if path.endswith(".py") and (ROOT / path).is_file()):
        show = ["git", "show", f"{revision}:{path}"]
        before = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        now = (ROOT / path).read_text()
        if before == now:
            continue
        old, new = (list(codes(compile(text, path, "exec", dont_inherit=True))) for text in (before, now))
        if len(old) != len(new):
            print(f"{path}: {len(old)} functions, now {len(new)}")
            differing += 1
            continue
        for (_, a), (name, b) in zip(old, new, strict=True):
            count += 1
            if a.co_code != b.co_code or a.co_argcount != b.co_argcount:
                order = a.co_code[::2] == b.co_code[::2] and a.co_argcount == b.co_argcount
                differing += not order
                print(f"{path}: {name}{': the same operations, other places of cells or constants' if order else ''}")
    print(f"== {count} compared, {differing} differ")
    return bool(differing)


if __name__ == "__main__":
    raise SystemExit(main())
