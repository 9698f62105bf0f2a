"""docs/programs.md: the table of what became of each program, from the results that `run.py` left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.programs.environment import OLDER, REFERENCE
from tests.programs.table import (
    COMMIT,
    FRAMEWORK_REASONS,
    FRAMEWORKS,
    NOT_FRAMEWORKS,
    NOT_RUN,
    PROGRAMS,
    UNSEEDED,
    Program,
)

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
"Differs by" is the largest relative difference of the two columns over all steps. In bf16 a loss near 6 has steps
of 0.03. Two rows differ by design: in the pipeline with stages the other draws each stage's layers from the seed's
start, here they are those of the model without stages; and PPO trains on samples, which are drawn apart. "Not run" is
a gap of this table, not of the program.
The machine was busy. Of the rows marked ², ranks were forked from an interpreter that had imported torch, Transformers
and the package, where `run.py` starts plain ones.

{count}

| program | JSON | here | loss, first → last | {reference} | loss there | differs by |
|---|---|---|---|---|---|---|
"""
FRAMEWORKS_HEAD = """
## Training frameworks

By their own commands, and their own JSONs or Accelerate's YAML, on two CPU ranks, in an environment each (torch
2.13.0); models and data are made on the spot. `tests/programs/frameworks.py` starts them and edits nothing of them
([what it finds instead of CUDA](clients.md#training-frameworks)). TRL's trainers with Accelerate's YAML are
[there](clients.md#training-frameworks) too. Losses are those that the framework
logs, a step each; in float32, but for ms-swift, which takes fp16 (upstream refuses that on CPU).

```
ENV/bin/python tests/programs/frameworks.py NAME --sources CHECKOUT --stages 2 3 --results FOLDER/results/frameworks
ENV/bin/python tests/programs/frameworks.py NAME --deepspeed REFERENCE …   # the other
```

| framework | command | JSON | stage | here | loss, first → last | {reference} | loss there | differs by |
|---|---|---|---|---|---|---|---|---|
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


def framework_rows(results: Path) -> list[str]:
    """The table of training frameworks, and one reason each for those that are left out."""
    rows = []
    for name, (command, source) in FRAMEWORKS.items():
        for stage in (2, 3):
            here, there = (_framework(results, name, stage, side) for side in ("here", "reference"))
            own, other = (row["losses"] if row else [] for row in (here, there))
            row = [f"{here['framework']} {here['version']}" if here else name, f"`{command.format(stage=stage)}`",
                   source.format(stage=stage), stage, _ended(here, FRAMEWORK_REASONS.get((name, stage), "")),
                   figures(own), _ended(there), figures(other),
                   "it takes no seed" if name in UNSEEDED else difference(own, other)]  # fmt: skip
            rows.append(f"| {' | '.join(map(str, row))} |")
    rows += [f"| {name} | left out: {why} | | | | | | | |" for name, why in NOT_FRAMEWORKS]
    return [*rows, *_embeddings(results)]


def _framework(results: Path, name: str, stage: int, side: str) -> dict[str, Any] | None:
    file = results / "frameworks" / f"{name}-{stage}-{side}.json"
    return json.loads(file.read_text()) if file.exists() else None


def _ended(row: dict[str, Any] | None, reason: str = "") -> str:
    if row is None:
        return "not run"
    trains = f"trains, {len(row['losses'])} steps" if len(row["losses"]) > 1 else ""
    if row["ended"] == 0:
        return trains
    error = str(row.get("error") or row["ended"])[:110].replace("|", "/").replace("`", chr(39))
    return f"{trains}{', then ' if trains else ''}fails: {reason or f'`{error}`'}"


def _embeddings(results: Path) -> list[str]:
    """How far what a loaded save gives lies from one process's."""
    rows = [_framework(results, "sentence_transformers", stage, "here") for stage in (0, 2, 3)]
    one, *others = [row["embedding"] if row else None for row in rows]
    gaps = [max(abs(x - y) for mine, its in zip(saved, one, strict=True) for x, y in zip(mine, its, strict=True))
            for saved in others if saved and one]  # fmt: skip
    if not gaps:
        return []
    return ["", "sentence-transformers, saved by its trainer on two ranks and loaded again: embeddings of three texts "
            "lie within " + " (stage 2) and ".join(f"{gap:.1e}" for gap in gaps) + " (stage 3) of one process's, which "
            "trains without DeepSpeed and accumulates the batches of both ranks."]  # fmt: skip


def page(results: Path) -> str:
    """The whole page."""
    rows, trained, ran = [], 0, 0
    for program in PROGRAMS:
        here, there = result_of(results, "here", program), result_of(results, "reference", program)
        trained += bool(here) and here["outcome"] == "trains"
        ran += bool(here) and here["outcome"] == "runs"
        mine, other = (here or {}).get("losses", []), (there or {}).get("losses", [])
        mark = " ¹" if program.older else ""
        mark += " ²" if here and here.get("forked") else ""
        rows.append(f"| {program.name}{mark}, `{shown(program.folder)}` | {program.json} | "
                    f"{told(program, here, True)} | "
                    f"{figures(mine)} | {told(program, there, False)} | {figures(other)} | "
                    f"{difference(mine, other)} |")  # fmt: skip
    count = f"Of {len(PROGRAMS)} command lines {trained} train two steps or more here and {ran} do what else they do."
    head = HEAD.format(commit=COMMIT[:12], day="2026-03-29", reference=REFERENCE[0].replace("deepspeed==", "upstream "),
                       older=", ".join(OLDER[:1] + OLDER[2:3]).replace("==", " "), count=count)  # fmt: skip
    reference = REFERENCE[0].replace("deepspeed==", "upstream ")
    rows += [FRAMEWORKS_HEAD.format(reference=reference).rstrip("\n"), *framework_rows(results)]
    return head + "\n".join(rows) + "\n" + TAIL + "\n".join(f"| {name} | {why} |" for name, why in NOT_RUN) + "\n"
