"""`python -m tests.parallel.tensor_table`: every toy cut over 2 and 3 ranks; writes a page of docs.

What is known already is not done again: remove FOLDER/NAME.json to repeat one. Names as arguments: these only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tests import zoo
from tests.harness.forks import Work, in_a_fork, in_forks
from tests.harness.pool import free_port
from tests.parallel.kept_rows import run_table
from tests.parallel.tensor_models import build, compare_cut

FOLDER = Path("build/tensor-table")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tensor-parallel-models.md"
RANKS = (2, 3)
SECONDS = 60.0  # a class may take on each number of ranks
HEAD = """# Models that were split

Every causal LM, masked encoder and encoder-decoder of Transformers {version}, at toy size with random weights, fp32,
over 2 and 3 ranks (`python -m tests.parallel.tensor_table` writes this page). *equal*: loss within 1e-5, gradients
within 1e-5 of their largest norm, and where the model generates, the same tokens from logits within 1e-4; where fp32
alone rounds by more, in fp64, and the row says so. The number is the largest rank's part of the matrices in the model's
blocks; above 1.1 times an even share the model does not count as cut. *refused*: with the reason, on every rank, before
anything is computed. *no toy*: the class cannot be built or run small, whole.

{summary}

| model | kind | 2 ranks | 3 ranks | what stays whole, or why not |
|---|---|---|---|---|
"""


def counts(row: dict[str, Any], ranks: int) -> bool:
    """Whether a row is equal and its matrices are shared out."""
    return row["verdict"] == "equal" and row["part"] <= 1.10 / ranks


def rows_of(name: str, ranks: Iterable[int] = RANKS) -> dict[str, dict[str, Any]]:
    """A row for each number of ranks; in a process of its own, since a toy may do what it likes."""
    ranks = list(ranks)
    found = in_a_fork(lambda: _rows(name, ranks), (len(ranks) + 1) * SECONDS)
    if "failed" in found:
        found = {str(count): {"verdict": "FAILED", "why": found["failed"]} for count in ranks}
    return found


def _rows(name: str, ranks: list[int]) -> dict[str, dict[str, Any]]:
    model, why = build(name)
    if model is None:
        return {str(count): {"verdict": "no toy", "why": why} for count in ranks}
    return {str(count): _of_all(in_forks(_ranks(model, count), SECONDS)) for count in ranks}


def _ranks(model: Any, count: int) -> list[Work]:
    port = free_port()
    return [lambda rank=rank: _rank(model, rank, count, port) for rank in range(count)]


def _rank(model: Any, rank: int, ranks: int, port: int) -> dict[str, Any]:
    joined(rank, ranks, port)
    return compare_cut(model, ranks)


def joined(rank: int, ranks: int, port: int) -> None:
    """A fork becomes a rank of a group over gloo."""
    import deepspeed
    from deepspeed.foundation.log import logger

    logger.setLevel(logging.WARNING)  # plans are in the rows
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    deepspeed.init_distributed("gloo")


def _of_all(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of those of all ranks: the worst verdict, the largest part."""
    for row in rows:
        if "failed" in row:
            return {"verdict": "FAILED", "why": row["failed"]}
    worst = max(rows, key=lambda row: ("equal", "refused", "WRONG").index(row["verdict"]))
    return worst | {"part": max(row["part"] for row in rows)} if "part" in worst else worst


def cell(row: dict[str, Any]) -> str:
    return f"equal {row['part']:.2f}" if row["verdict"] == "equal" else row["verdict"]


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of docs."""
    import transformers

    kinds, lines = zoo.names(), []
    for name, by_ranks in sorted(rows.items()):
        found = [by_ranks[str(ranks)] for ranks in RANKS]
        said = [row["why"] for row in found] + [": ".join(row.get("whole", ())) for row in found]
        why = " ".join(next((one for one in said if one.strip(": ")), "").replace("|", "/").split())[:150]
        lines.append(f"| {name} | {kinds[name]} | {' | '.join(map(cell, found))} | {why or '–'} |")
    toys = sum(row["2"]["verdict"] != "no toy" for row in rows.values())
    parts = []
    for ranks in RANKS:
        mine = [row[str(ranks)] for row in rows.values()]
        equal, refused = (sum(row["verdict"] == verdict for row in mine) for verdict in ("equal", "refused"))
        parts.append(
            f"over {ranks} ranks {equal} are equal, {sum(counts(row, ranks) for row in mine)} of them with the "
            f"matrices of their blocks shared out, and {refused} are refused"
        )
    summary = f"Of {len(rows)} classes {toys} have a toy: {'; '.join(parts)}."
    return HEAD.format(version=transformers.__version__, summary=summary) + "\n".join(lines) + "\n"


def imported_ahead() -> None:
    """Import before the forks what all of them need."""
    import transformers
    from transformers.generation import GenerationMixin, utils  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401

    import deepspeed.tensor_parallel.parallelize  # noqa: F401

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def main() -> None:
    """The command; see `run_table` for its options."""
    imported_ahead()
    run_table(__doc__, lambda: sorted(zoo.names()), rows_of, page, folder=FOLDER, to=PAGE, counts=RANKS)


if __name__ == "__main__":
    main()
