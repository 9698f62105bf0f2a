"""`python -m tests.parallel.expert_table`: the experts of every toy divided among 2 ranks; writes a page of docs.

What is known already is not done again: remove FOLDER/NAME.json to repeat one. Names as arguments: these only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.forks import Work, in_a_fork, in_forks
from tests.harness.pool import free_port
from tests.parallel.expert_models import BAR, BAR_OF_STEP, build, compare, names, speaks_of_experts
from tests.parallel.kept_rows import run_table
from tests.parallel.tensor_table import imported_ahead, joined

FOLDER = Path("build/expert-table")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "experts-models.md"
RANKS = 2
SECONDS = 60.0  # a class may take
OUT = ("no experts", "not built")  # verdicts of rows that the page leaves out
HEAD = """# Models whose experts were divided

Every class of Transformers {version} that may have experts, at toy size with random weights, fp32, its experts divided
among 2 ranks with tokens of their own (`python -m tests.parallel.expert_table` writes this page). *equal*: output and
all gradients within {bar:g} of the whole model in one process, all parameters after a step of AdamW within {step:g} of
the largest value of each; where fp32 alone rounds by more, in fp64, and the row says so. The number is the largest of
the three. *refused*: with the reason, on both ranks, before anything is computed. *no toy*: the class cannot be built
or run small, whole, with tokens only. [Forms](experts.md#which-models) are those of the calls of a module of experts.

{summary}

| model | kind | layers | form | verdict | why not, or note |
|---|---|---|---|---|---|
"""


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """The row of a class; in a process of its own, since a toy may do what it likes."""
    found = in_a_fork(lambda: _row(name), 2 * SECONDS)
    return {str(RANKS): {"verdict": "FAILED", "why": found["failed"]} if "failed" in found else found}


def _row(name: str) -> dict[str, Any]:
    model, why = build(name)
    if model is None:
        said = speaks_of_experts(name)
        verdict = why if why == "no experts" and not said else "no toy" if said else "not built"
        return {"verdict": verdict, "why": "its toy has none" if why == "no experts" and said else why}
    return _of_all(in_forks(_ranks(model), SECONDS))


def _ranks(model: Any) -> list[Work]:
    port = free_port()
    return [lambda rank=rank: _rank(model, rank, port) for rank in range(RANKS)]


def _rank(model: Any, rank: int, port: int) -> dict[str, Any]:
    joined(rank, RANKS, port)
    return compare(model)


def _of_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of those of all ranks: the worst verdict, the largest difference."""
    for row in rows:
        if "failed" in row:
            return {"verdict": "FAILED", "why": row["failed"]}
    worst = max(rows, key=lambda row: ("equal", "refused", "WRONG").index(row["verdict"]))
    return worst | {"worst": max(row["worst"] for row in rows)} if "worst" in worst else worst


def line(name: str, kind: str, row: dict[str, Any]) -> str:
    verdict = f"equal {row['worst']:.0e}" if row["verdict"] == "equal" else row["verdict"]
    why = " ".join(row["why"].replace("|", "/").split())[:200].strip() or "–"
    return f"| {name} | {kind} | {row.get('layers', '–')} | {row.get('form', '–').lower()} | {verdict} | {why} |"


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of docs."""
    import transformers

    kinds, found = names(), {name: by_ranks[str(RANKS)] for name, by_ranks in sorted(rows.items())}
    lines = [line(name, kinds[name], row) for name, row in found.items() if row["verdict"] not in OUT]
    verdicts = [row["verdict"] for row in found.values()]
    summary = (
        f"Of {len(found)} classes {verdicts.count('no experts')} have no experts, and {verdicts.count('not built')} "
        f"cannot be built small, but their files speak of no experts; they are left out. Of the other {len(lines)}, "
        f"{verdicts.count('equal')} are equal, {verdicts.count('refused')} are refused, {verdicts.count('no toy')} "
        f"have no toy."
    )
    head = HEAD.format(version=transformers.__version__, bar=BAR, step=BAR_OF_STEP, summary=summary)
    return head + "\n".join(lines) + "\n"


def main() -> None:
    """The command; see `run_table` for its options."""
    imported_ahead()
    run_table(__doc__, lambda: sorted(names()), rows_of, page, folder=FOLDER, to=PAGE, counts=(RANKS,))


if __name__ == "__main__":
    main()
