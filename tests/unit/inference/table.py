"""`python -m tests.unit.inference.table`: every causal LM against its own `generate`; writes a page of docs.

The toys speak in a process without the package (`classes.py`); here the generator has to say the same, alone and among
seven others, prompts in chunks of 16. What is known already is not done again: remove FOLDER/NAME.json to repeat one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.harness.forks import in_a_fork
from tests.unit.inference.classes import NEW, names

FOLDER = Path("build/inference-table")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "inference-models.md"
HEAD = """# Models that were compared

Every causal LM of Transformers {version} at toy size, fp32, random weights under which the text has {different} or more
different tokens of {new} and no token is chosen by less than {margin} (`python -m tests.unit.inference.table` writes
this page). Eight prompts of 1 to 97 tokens, greedy, each alone and all together, prompts in chunks of 16, against the
tokens of the model's own `generate` in a process that does not import this package.

*packed*: all rows in one pass; *gathered*: the model attends by itself, over keys and values gathered from the pages;
*gathered, even*: the same, and only contexts of one length go together; *generate*: through its own `generate`, one
token of each request at a time. *no toy*: the class cannot be built small, or says one thing only, by itself.

{summary}

| model | tokens | way | why not packed, or no toy |
|---|---|---|---|
"""
CHUNKS = {"max_batch_tokens": 16, "max_sequences": 8, "page_size": 16}


def compare(path: Path) -> dict[str, Any]:
    """One row: the generator against what the toy said by itself."""
    from deepspeed.inference import Generator, SamplingParams

    model, said = torch.load(path, weights_only=False)
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    given, wanted = [prompt for prompt, _ in said], [tokens for _, tokens in said]
    together = Generator(model, cache_bytes=1 << 25, **CHUNKS)
    row = {"kind": together.kind, "why": together.why}
    if getattr(together._executor, "even", False):
        row["kind"] += ", even"
    found = together.generate(given, sampling)
    together.close()
    alone = Generator(model, cache_bytes=1 << 25, page_size=16, prompt_chunk=16)
    single = [alone.generate([prompt], sampling)[0] for prompt in given]
    alone.close()
    wrong = [len(p) for p, f, s, w in zip(given, found, single, wanted, strict=True) if f != w or s != w]
    row["verdict"] = "equal" if not wrong else f"OTHERS for prompts of {wrong}"
    return row


def page(rows: dict[str, dict[str, Any]]) -> str:
    """The page of docs."""
    import transformers

    from tests.unit.inference.toys import MARGIN

    lines = []
    for name, row in sorted(rows.items()):
        why = " ".join((row.get("toy") or row.get("failed") or row.get("why") or "").replace("|", "/").split())[:150]
        verdict = "no toy" if row.get("toy") else row.get("verdict", "FAILED")
        lines.append(f"| {name} | {verdict} | {row.get('kind', '–')} | {why or '–'} |")
    equal = [row["kind"] for row in rows.values() if row.get("verdict") == "equal"]
    parts = ", ".join(f"{equal.count(kind)} {kind}" for kind in dict.fromkeys(sorted(equal, reverse=True)))
    toys = sum(not row.get("toy") for row in rows.values())
    summary = f"Of {len(rows)} classes {toys} have a toy; {len(equal)} of them are equal: {parts}."
    head = HEAD.format(version=transformers.__version__, different=20, new=NEW, margin=MARGIN, summary=summary)
    return head + "\n".join(lines) + "\n"


def rows_of(chosen: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """A row for each name; toys first, in a process of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in chosen if not (folder / f"{name}.said.json").exists()]
    if missing:
        subprocess.run([sys.executable, "-m", "tests.unit.inference.classes", str(folder), *missing], check=True)
    rows = {}
    torch.set_num_threads(1)
    import deepspeed.inference.generator  # noqa: F401  before the forks

    for name in chosen:
        known = folder / f"{name}.json"
        if not known.exists():
            row = json.loads((folder / f"{name}.said.json").read_text())
            if not row["toy"]:
                row.update(in_a_fork(lambda name=name: compare(folder / f"{name}.pt"), 240))
            known.write_text(json.dumps(row))
            print(name, row, flush=True)
        rows[name] = json.loads(known.read_text())
    return rows


def main() -> None:
    """Names as arguments, none for all of them; `--page` writes the page of what is known."""
    chosen = sys.argv[1:] or names()
    if chosen == ["--page"]:
        known = {name: FOLDER / f"{name}.json" for name in names()}
        rows = {name: json.loads(file.read_text()) for name, file in known.items() if file.exists()}
    else:
        rows = rows_of(chosen, FOLDER)
    if len(chosen) != len(sys.argv[1:]) or chosen == ["--page"]:
        PAGE.write_text(page(rows))
    print(sum(row.get("verdict") == "equal" for row in rows.values()), "equal of", len(rows))


if __name__ == "__main__":
    main()
