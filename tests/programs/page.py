"""docs/programs.md: the table of what became of each program, from the results that `run.py` left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.programs.environment import OLDER, REFERENCE
from tests.programs.table import COMMIT, NOT_RUN, PROGRAMS, Program

HEAD = """# Programs as they are

`DeepSpeedExamples` is the original's own collection of programs. They run here unedited, from a checkout of commit
`{commit}` ({day}), with their usual command lines and their own JSON, on two CPU ranks that the launcher of
this package starts. Models and data are tiny, random, made on the spot, and stand under the names that the programs ask
the hub for. Beside each stands what {reference} does on the same machine, from the same command, in an environment
with the same packages; its files were not read. It compiles an extension when ranks first meet.

```
export DEEPSPEED_EXAMPLES=…   # the checkout
python -m tests.programs.run --work FOLDER  # this package
python -m tests.programs.run --work FOLDER --side reference    # the other
python -m tests.programs.run --work FOLDER --page              # writes this page
```

What a program is given from outside (`tests/programs/shim/sitecustomize.py`): stand-ins for the calls of `torch.cuda`
that it makes without asking, "cuda" and "nccl" as names of the host and of gloo, CIFAR-10 from a local folder, and
operators that torchvision's CPU import misses. Losses are what rank 0 hands to `backward`, or gets from `train_batch`.
Rows marked ¹ run with older releases, whose names the program imports ({older}).
"Differs by" is the largest relative difference of the two columns over all steps. "Not run" is a gap of this table, not
of the program.
The machine was busy: ranks were forked from an interpreter that had imported torch, Transformers and the package, where
`run.py` starts plain ones.

{count}

| program | JSON | here | loss, first → last | {reference} | loss there | differs by |
|---|---|---|---|---|---|---|
"""
TAIL = """
## Left out

| program | reason |
|---|---|
"""


def result_of(results: Path, side: str, program: Program) -> dict[str, Any] | None:
    """What a run of `program` left, None where it has not been run on this side."""
    file = results / side / f"{program.name.replace(' ', '_')}.json"
    return json.loads(file.read_text()) if file.exists() else None


def figures(losses: list[float]) -> str:
    """First and last of the losses."""
    return f"{losses[0]:.5g} → {losses[-1]:.5g}" if losses else ""


def difference(here: list[float], there: list[float]) -> str:
    """The largest relative difference of two lists of losses."""
    if not here or not there:
        return ""
    if len(here) != len(there):
        return f"{len(here)} and {len(there)} losses"
    worst = max(abs(one - two) / max(abs(two), 1e-8) for one, two in zip(here, there, strict=True))
    return "0" if worst == 0 else f"{worst:.1e}"


def shown(folder: str) -> str:
    """A folder of the examples, which is no folder of this repository."""
    return f"DeepSpeedExamples/{folder}" if folder.startswith("benchmarks/") else folder


def told(program: Program, result: dict[str, Any] | None, here: bool) -> str:
    """One cell: the outcome, and its reason where there is one."""
    if result is None:
        return "not run"
    if result["outcome"] in ("trains", "runs"):
        steps = result["steps"]
        return f"trains, {steps} steps" if result["outcome"] == "trains" else "runs"
    if here and program.reason:
        return f"{'refused by name' if result['outcome'] == 'refused' else 'cannot'}: {program.reason}"
    return f"fails: `{result['error'][:110].replace('|', '/').replace('`', chr(39))}`"


def page(results: Path) -> str:
    """The whole page."""
    rows, trained, ran = [], 0, 0
    for program in PROGRAMS:
        here, there = result_of(results, "here", program), result_of(results, "reference", program)
        trained += bool(here) and here["outcome"] == "trains"
        ran += bool(here) and here["outcome"] == "runs"
        mine, other = (here or {}).get("losses", []), (there or {}).get("losses", [])
        mark = " ¹" if program.older else ""
        rows.append(f"| {program.name}{mark}, `{shown(program.folder)}` | {program.json} | "
                    f"{told(program, here, True)} | "
                    f"{figures(mine)} | {told(program, there, False)} | {figures(other)} | "
                    f"{difference(mine, other)} |")  # fmt: skip
    count = f"Of {len(PROGRAMS)} command lines {trained} train two steps or more here and {ran} do what else they do."
    head = HEAD.format(commit=COMMIT[:12], day="2026-03-29", reference=REFERENCE[0].replace("deepspeed==", "upstream "),
                       older=", ".join(OLDER[:1] + OLDER[2:3]).replace("==", " "), count=count)  # fmt: skip
    return head + "\n".join(rows) + "\n" + TAIL + "\n".join(f"| {name} | {why} |" for name, why in NOT_RUN) + "\n"
