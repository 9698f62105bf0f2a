"""Figures of the package by room: `python -m tests.architecture.measure [--against REVISION] [--json]`.

Files, lines, definitions at the top of modules (functions and classes; constants apart; private ones too), all classes,
definitions and all names at the top per 1,000 lines, variables named by how they came about, class names that stand
twice, and circles of imports, those for types alone counted too. With `--against` the same of a commit.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.architecture.sources import ROOT, parsed
from tests.architecture.test_circles import _imports, _name, circles
from tests.architecture.test_names import duplicates

HISTORY = "found made one at told given kept said mine theirs".split()  # how a value came about, not what it is
COLUMNS = ("files", "lines", "definitions", "constants", "classes", "per 1,000", "names per 1,000", "locals")


def package_at(revision: str | None) -> dict[str, str]:
    """Texts of the package's files by path below it: of a commit, or as they are."""
    if revision is None:
        package = ROOT / "deepspeed"
        return {path.relative_to(package).as_posix(): path.read_text() for path in sorted(package.rglob("*.py"))}
    archive = subprocess.run(["git", "archive", revision, "deepspeed"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        members = [m for m in tar.getmembers() if m.name.endswith(".py")]
        texts = {m.name.removeprefix("deepspeed/"): tar.extractfile(m) for m in members}
        return {path: file.read().decode() for path, file in texts.items() if file is not None}


def top_level(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Names that a module defines, also below `if` and `try`, without imports and dunders; whether by assignment."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, False
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names = (n.id for n in ast.walk(target) if isinstance(n, ast.Name))
                yield from ((name, True) for name in names if not name.startswith("__"))
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def history_locals(tree: ast.Module) -> Counter[str]:
    """How often variables and parameters are bound under each of the names of `HISTORY`."""
    counted: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            counted[node.id] += 1
        elif isinstance(node, ast.arg):
            counted[node.arg] += 1
        elif isinstance(node, ast.ExceptHandler) and node.name:
            counted[node.name] += 1
    return Counter({name: counted[name] for name in HISTORY if counted[name]})


def measure(texts: dict[str, str]) -> dict[str, dict[str, float]]:
    """Figures by room, and of all."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for path, text in texts.items():
        tree = parsed(text)
        names = set(top_level(tree))
        room = path.partition("/")[0] if "/" in path else "(top)"
        figures = Counter(
            files=1,
            lines=text.count("\n"),
            definitions=sum(not assigned for _, assigned in names),
            constants=sum(assigned for _, assigned in names),
            classes=sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree)),
            locals=history_locals(tree).total(),
        )
        for name in (room, "all"):
            rooms[name].update(figures)
    figures_by_room = {}
    for name, counts in sorted(rooms.items(), key=lambda item: (item[0] == "all", item[0])):
        per = 1000 / max(counts["lines"], 1)
        densities = {
            "per 1,000": round(per * counts["definitions"], 1),
            "names per 1,000": round(per * (counts["definitions"] + counts["constants"]), 1),
        }
        figures_by_room[name] = {**counts, **densities}
    return figures_by_room


def whole(texts: dict[str, str]) -> dict[str, float]:
    """Figures that no room has alone."""
    sources = {path: parsed(text) for path, text in texts.items()}
    named = {_name(path): tree for path, tree in sources.items()}
    graph = {name: _imports(tree, set(named)) - {name} for name, tree in named.items()}
    return {"circles of imports": len(circles(graph)), "class names that stand twice": len(duplicates(sources))}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", metavar="REVISION", help="a commit whose figures stand in front")
    parser.add_argument("--json", action="store_true", help="as JSON, for a record")
    options = parser.parse_args()
    texts = package_at(None)
    now, before = measure(texts), measure(package_at(options.against)) if options.against else {}
    if options.json:
        json.dump({"rooms": now, "package": whole(texts)}, sys.stdout, indent=1)
        return 0
    print(f"{'room':26}" + "".join(f"{column:>18}" for column in COLUMNS))
    for room in [*now, *(set(before) - set(now))]:
        cells = []
        for column in COLUMNS:
            new = now.get(room, {}).get(column, 0)
            cells.append(f"{before.get(room, {}).get(column, 0):g} -> {new:g}" if before else f"{new:g}")
        print(f"{room:26}" + "".join(f"{cell:>18}" for cell in cells))
    for name, count in whole(texts).items():
        old = f"{whole(package_at(options.against))[name]:g} -> " if options.against else ""
        print(f"{name}: {old}{count:g}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
