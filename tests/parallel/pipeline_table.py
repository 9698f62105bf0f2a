"""`python -m tests.parallel.pipeline_table` cuts every toy into 2 and 4 stages, and writes a page of docs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.harness import WorkerError, WorkerPool, WorkerTimeout
from tests.parallel.pipeline_models import chosen, stage_and_compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline-models.md"
HEAD = """# Models in stages

Every causal LM of Transformers {version} and five encoders, at toy size with random weights, fp32, two micro-batches
under 1F1B, in 2 stages of one block and 4 stages of one block (`python -m tests.parallel.pipeline_table` writes this
page). *equal*: losses within 1e-6, gradients within 1e-6 of their largest norm (at 4 stages those of parameters that
one stage holds). *refused*: with the reason. *no toy*: the class cannot be built or run small, whole.

{summary}

| model | 2 stages | 4 stages | blocks, or why not |
|---|---|---|---|
"""


def rows_of(stages: int, names: list[str], say: Any = None) -> dict[str, dict[str, Any]]:
    """A row for each name."""
    pool, found = WorkerPool(stages), {}
    for name in names:
        try:
            found[name] = pool.run(stage_and_compare, name, stages, timeout=40)[0]
        except (WorkerError, WorkerTimeout) as error:
            text = next((line for line in reversed(str(error).splitlines()) if "Error" in line), str(error)[:200])
            found[name] = {"name": name, "verdict": "WRONG", "why": f"it ended: {text.removeprefix('E ')[:160]}"}
        if say is not None:
            say(stages, found[name])
    pool.close()
    return found


def page(two: dict[str, Any], four: dict[str, Any]) -> str:
    """The page of docs."""
    import transformers

    lines = []
    for name in sorted(two):
        one, other = two[name], four.get(name, {"verdict": "–", "why": ""})
        why = " ".join((one["why"] or other["why"] or one.get("where", "")).replace("|", "/").split())[:150]
        lines.append(f"| {name} | {one['verdict']} | {other['verdict']} | {why or '–'} |")
    count = lambda rows, verdict: sum(row["verdict"] == verdict for row in rows.values())  # noqa: E731
    toys = len(two) - count(two, "no toy")
    summary = (
        f"Of {toys} toys {count(two, 'equal')} are equal in 2 stages and {count(two, 'refused')} are refused; in 4 "
        f"stages {count(four, 'equal')} are equal and {count(four, 'refused')} refused."
    )
    return HEAD.format(version=transformers.__version__, summary=summary) + "\n".join(lines) + "\n"


def main() -> None:
    names = sys.argv[1:] or chosen()

    def say(stages: int, row: dict[str, Any]) -> None:
        print(stages, row["name"], {key: value for key, value in row.items() if key != "name"}, flush=True)

    two, four = (rows_of(stages, names, say) for stages in (2, 4))
    if not sys.argv[1:]:
        PAGE.write_text(page(two, four))


if __name__ == "__main__":
    main()
