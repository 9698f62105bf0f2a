"""The command of a table of models: rows are kept one by one, so that a run goes on where an earlier one ended."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def run_table(
    about: str | None,
    every: Callable[[], Sequence[str]],
    rows_of: Callable[[str], Any],
    page: Callable[[dict[str, Any]], str],
    *,
    folder: Path,
    to: Path,
    counts: Sequence[int],
) -> None:
    """Run what is not known yet, write the page and print the verdicts.

    Args:
        about: of the command.
        every: the names of all classes, looked up where none are given.
        rows_of: what is found of a class, by each of `counts`.
        page: of all rows.
        folder: where rows are kept.
        to: the page's file.
        counts: of ranks or stages.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--page", action="store_true", help="only write the page of what is known")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no class after so many")
    said = parser.parse_args()
    folder.mkdir(parents=True, exist_ok=True)
    names, until = said.names or every(), time.monotonic() + said.seconds
    for name in () if said.page else names:
        known, started = folder / f"{name}.json", time.monotonic()
        if not known.exists() and started < until:
            known.write_text(json.dumps(rows_of(name)))
            print(f"{time.monotonic() - started:.1f} s {name} {known.read_text()}", flush=True)
    rows = {name: json.loads(file.read_text()) for name in names if (file := folder / f"{name}.json").exists()}
    if not said.names:
        to.write_text(page(rows))
    for count in counts:
        verdicts = [row[str(count)]["verdict"] for row in rows.values()]
        print(count, {one: verdicts.count(one) for one in sorted(set(verdicts))})
