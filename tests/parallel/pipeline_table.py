"""`python -m tests.parallel.pipeline_table` cuts every toy into 2 and 4 stages, and writes a page of docs.

What is known already is not done again: remove FOLDER/NAME.json to repeat one. Names as arguments: these only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.forks import Work, in_a_fork, in_forks
from tests.harness.pool import free_port
from tests.parallel.kept_rows import run_table
from tests.parallel.pipeline_models import chosen, stage_toy, toy
from tests.parallel.tensor_table import imported_ahead, joined

FOLDER = Path("build/pipeline-table")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline-models.md"
STAGES = (2, 4)
SECONDS = 120.0  # a class may take in each number of stages
HEAD = """# Models in stages

Every causal LM of Transformers {version} and five encoders, at toy size with random weights, fp32, two micro-batches
under 1F1B, in 2 stages of one block and 4 stages of one block (`python -m tests.parallel.pipeline_table` writes this
page). *equal*: losses within 1e-6, gradients within 1e-6 of their largest norm (at 4 stages those of parameters that
one stage holds). *refused*: with the reason. *no toy*: the class cannot be built or run small, whole.

{summary}

| model | 2 stages | 4 stages | blocks, or why not |
|---|---|---|---|
"""


def rows_of(name: str) -> dict[str, dict[str, Any]]:
    """A row for each number of stages; in a process of its own, since a toy may do what it likes."""
    found = in_a_fork(lambda: {str(stages): _row(name, stages) for stages in STAGES}, (len(STAGES) + 1) * SECONDS)
    if "failed" in found:
        return {str(stages): {"verdict": "FAILED", "why": found["failed"]} for stages in STAGES}
    return found


def _row(name: str, stages: int) -> dict[str, Any]:
    model, why = toy(name, stages)
    if model is None:
        return {"verdict": "no toy", "why": why}
    rows = in_forks(_ranks(model, stages), SECONDS)
    for row in rows:
        if "failed" in row:
            return {"verdict": "FAILED", "why": row["failed"]}
    return max(rows, key=lambda row: ("equal", "refused", "WRONG").index(row["verdict"]))


def _ranks(model: Any, count: int) -> list[Work]:
    port = free_port()

    def work(rank: int) -> dict[str, Any]:
        joined(rank, count, port)
        return stage_toy(model, count)

    return [lambda rank=rank: work(rank) for rank in range(count)]


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of docs."""
    import transformers

    lines = []
    for name, by_stages in sorted(rows.items()):
        found = [by_stages[str(stages)] for stages in STAGES]
        said = [row["why"] for row in found] + [row.get("where", "") for row in found]
        why = " ".join(next(filter(None, said), "–").replace("|", "/").split())[:150]
        lines.append(f"| {name} | {' | '.join(row['verdict'] for row in found)} | {why} |")
    toys = sum(row["2"]["verdict"] != "no toy" for row in rows.values())
    parts = []
    for stages in STAGES:
        verdicts = [row[str(stages)]["verdict"] for row in rows.values()]
        parts.append(f"in {stages} stages {verdicts.count('equal')} are equal and {verdicts.count('refused')} refused")
    summary = f"Of {len(rows)} classes {toys} have a toy: {'; '.join(parts)}."
    return HEAD.format(version=transformers.__version__, summary=summary) + "\n".join(lines) + "\n"


def main() -> None:
    """The command; see `run_table` for its options."""
    imported_ahead()
    run_table(__doc__, chosen, rows_of, page, folder=FOLDER, to=PAGE, counts=STAGES)


if __name__ == "__main__":
    main()
