"""`python -m tests.parallel.tensor_table` cuts every toy over 2 and 3 ranks, and writes a page of docs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.harness import WorkerError, WorkerPool, WorkerTimeout
from tests.parallel.tensor_models import cut_and_compare, names

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensor-parallel-models.md"
HEAD = """# Models that were cut

Every causal LM, masked encoder and encoder-decoder of Transformers {version}, at toy size with random weights, fp32,
over 2 and 3 ranks (`python -m tests.parallel.tensor_table` writes this page). *equal*: loss within 1e-5, gradients
within 1e-5 of their largest norm, and where the model generates, the same tokens. The number is the largest rank's
part of the blocks' matrices; above 1.1 times an even share the model does not count as cut. *refused*: nothing could
be cut, with the reason. *no toy*: the class cannot be built or run small, whole.

{summary}

| model | kind | 2 ranks | 3 ranks | what stays whole, or why not |
|---|---|---|---|---|
"""


def rows_of(ranks: int, chosen: list[str], say: Any = None) -> dict[str, dict[str, Any]]:
    """A row for each name."""
    pool, found = WorkerPool(ranks), {}
    for name in chosen:
        try:
            found[name] = pool.run(cut_and_compare, name, ranks, timeout=40)[0]
        except (WorkerError, WorkerTimeout) as error:
            text = next((line for line in reversed(str(error).splitlines()) if "Error" in line), str(error)[:200])
            found[name] = {"name": name, "verdict": "WRONG", "why": f"it ended: {text.removeprefix('E ')[:160]}"}
        if say is not None:
            say(ranks, found[name])
    pool.close()
    return found


def counts(row: dict[str, Any], ranks: int) -> bool:
    """Whether a row is equal and its matrices are shared out."""
    return row["verdict"] == "equal" and row["part"] <= 1.10 / ranks


def cell(row: dict[str, Any]) -> str:
    return f"equal {row['part']:.2f}" if row["verdict"] == "equal" else row["verdict"]


def page(two: dict[str, Any], three: dict[str, Any]) -> str:
    """The page of docs."""
    import transformers

    kinds, lines = names(), []
    for name in sorted(two):
        one, other = two[name], three[name]
        why = one["why"] or other["why"] or one.get("whole", "") or other.get("whole", "")
        why = " ".join(why.replace("|", "/").split())[:150]
        lines.append(f"| {name} | {kinds[name]} | {cell(one)} | {cell(other)} | {why or '–'} |")
    full = {ranks: sum(counts(row, ranks) for row in rows.values()) for ranks, rows in ((2, two), (3, three))}
    equal = {ranks: sum(r["verdict"] == "equal" for r in rows.values()) for ranks, rows in ((2, two), (3, three))}
    toys = sum(row["verdict"] != "no toy" for row in two.values())
    summary = (
        f"Of {toys} toys {equal[2]} are equal over 2 ranks ({full[2]} of them with all matrices of their blocks shared "
        f"out) and {equal[3]} over 3 ({full[3]})."
    )
    return HEAD.format(version=transformers.__version__, summary=summary) + "\n".join(lines) + "\n"


def main() -> None:
    chosen = sys.argv[1:] or sorted(names())

    def say(ranks: int, row: dict[str, Any]) -> None:
        print(ranks, row["name"], {key: value for key, value in row.items() if key != "name"}, flush=True)

    two, three = (rows_of(ranks, chosen, say) for ranks in (2, 3))
    if not sys.argv[1:]:
        PAGE.write_text(page(two, three))


if __name__ == "__main__":
    main()
