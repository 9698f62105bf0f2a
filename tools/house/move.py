"""Moves and merges the package's files by `map.tsv`: `python -m tools.house.move all` or names of rooms.

It starts from a tree without uncommitted changes in which the rooms have not been moved, and leaves the result in the
index; `--check` says what it would do. Look at what it prints: notes name places that a person should see.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tools.house import merge, patches
from tools.house.rewrite import PACKAGE, Moves, PythonFile

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
TEXT = (".md", ".toml", ".yml", ".yaml", ".in", ".txt", ".ipynb", ".cfg", ".json", ".sh", ".h", ".cpp", "Makefile")
OWN = "tools/house/"
NOT_REWRITTEN = ("tests/golden/checkpoints/", "docs/renames.md", "CHANGELOG.md")


@dataclass(frozen=True)
class Entry:
    """A row of the map: old files that become one."""

    room: str
    olds: tuple[str, ...]
    new: str
    docstring: str


def entries() -> list[Entry]:
    """The map."""
    rows = [line.split("\t") for line in (HERE / "map.tsv").read_text().splitlines()[1:] if line.strip()]
    return [Entry(room, tuple(old.split()), new, docstring) for room, old, new, docstring in rows]


def wanted_names() -> dict[tuple[str, str], str]:
    """Names for what clashes when files become one: (module, name) to the new name."""
    rows = [line.split("\t") for line in (HERE / "clashes.tsv").read_text().splitlines()[1:] if line.strip()]
    return {(module, name): new for module, name, new in rows}


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _module(path: str) -> str:
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _dotted(place: str) -> str:
    return f"{PACKAGE}.{place.replace('/', '.')}"


def _imported(source: str, siblings: dict[str, str]) -> set[str]:
    """Which of some modules a file imports anywhere."""
    result = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            result |= {siblings[name] for name in names if name in siblings}
        elif isinstance(node, ast.Import):
            result |= {siblings[alias.name] for alias in node.names if alias.name in siblings}
    return result


class Mover:
    """One run over some rooms.

    Args:
        rooms: their names; empty: all.
    """

    def __init__(self, rooms: set[str]) -> None:
        self.entries = [e for e in entries() if not rooms or e.room in rooms]
        self.files = [name for name in _git("ls-files").splitlines() if not name.startswith(OWN)]
        there = set(self.files)
        self.missing = [old for e in self.entries for old in e.olds if f"{PACKAGE}/{old}.py" not in there]
        gone = set(self.missing)
        rows = [Entry(e.room, tuple(o for o in e.olds if o not in gone), e.new, e.docstring) for e in self.entries]
        self.entries = [row for row in rows if row.olds]
        known = {_module(name) for name in self.files if name.startswith(f"{PACKAGE}/") and name.endswith(".py")}
        modules = {_dotted(old): _dotted(e.new) for e in self.entries for old in e.olds}
        self.moves = Moves({old: new for old, new in modules.items() if old != new}, {}, known)
        # A file that takes in others keeps its place, but refers to them as its own.
        self.moves.modules.update({old: new for old, new in modules.items() if list(modules.values()).count(new) > 1})
        stems = [Path(name).stem for name in self.files if name.endswith(".py")]
        for old, new in self.moves.modules.items():
            stem = old.rsplit(".", 1)[1]
            if stems.count(stem) == 1:
                self.moves.bare[stem] = new.rsplit(".", 1)[1]
        self.sources: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        for name in self.files:
            path = ROOT / name
            if name.endswith(".py"):
                self.sources[name] = path.read_text()
            elif name.endswith(TEXT) and not name.startswith(NOT_REWRITTEN):
                self.texts[name] = path.read_text()
        self.entries = [self._ordered(entry) for entry in self.entries]
        self.clashes = self._clashes()
        self.moves.names.update(self.clashes.names)

    def _ordered(self, entry: Entry) -> Entry:
        """The same row, its files so that each stands behind those it imports."""
        waiting, done = list(entry.olds), list[str]()
        siblings = {_dotted(old): old for old in entry.olds}
        needs = {old: _imported(self.sources[f"{PACKAGE}/{old}.py"], siblings) - {old} for old in entry.olds}
        while waiting:
            nearest = next((old for old in waiting if needs[old] <= set(done)), None)
            if nearest is None:
                sys.exit(f"{entry.new}: its files import each other: {waiting}")
            waiting.remove(nearest)
            done.append(nearest)
        return Entry(entry.room, tuple(done), entry.new, entry.docstring)

    def _clashes(self) -> merge.Clashes:
        result = merge.Clashes()
        wanted = wanted_names()
        by_module = {_module(name): text for name, text in self.sources.items()}
        for entry in self.entries:
            if len(entry.olds) == 1:
                continue
            one = merge.clashes([_dotted(old) for old in entry.olds], by_module, wanted)
            result.names.update(one.names)
            result.imports.update(one.imports)
            result.duplicates |= one.duplicates
            result.notes += one.notes
        return result

    def rewrite(self) -> None:
        """All Python files and texts, in memory."""
        for name, source in self.sources.items():
            module = _module(name) if name.startswith(f"{PACKAGE}/") else ""
            forced = self.clashes.imports.get(module)
            self.sources[name] = PythonFile(name, source, self.moves, module, forced).rewritten()
            if name.startswith(f"{PACKAGE}/") and name.endswith("__init__.py"):
                self.sources[name] = self._with_places(module, self.sources[name])
            names = {n for m, n in self.clashes.duplicates if m == module}
            if names:
                self.sources[name] = merge.without_duplicates(self.sources[name], names)
        for name, text in self.texts.items():
            new = self.moves.text(text, short=name.endswith(".md"))
            self.texts[name] = patches.broken_markdown(new, text) if name.endswith(".md") else new

    def _with_places(self, package: str, source: str) -> str:
        """A package whose table says in which of its modules a name is, relative to it."""
        if "import_module(f" not in source:
            return source

        def place(match: re.Match[str]) -> str:
            new = self.moves.modules.get(f"{package}.{match[2]}")
            return match[0] if new is None else f'{match[1]}"{new.removeprefix(package + ".")}"'

        return re.sub(r'(?m)^(    "\w+": )"([\w.]+)"', place, source)

    def write(self) -> None:
        """Files to their new places."""
        moved = {f"{PACKAGE}/{old}.py": entry for entry in self.entries for old in entry.olds}
        for name, text in {**self.sources, **self.texts}.items():
            if name not in moved and (ROOT / name).read_text() != text:
                (ROOT / name).write_text(text)
        results = {}
        aside = []
        for entry in self.entries:
            paths = [f"{PACKAGE}/{old}.py" for old in entry.olds]
            sources = [self.sources[path] for path in paths]
            levels = entry.new.count("/") - entry.olds[0].count("/")
            sources = [patches.deeper(text, levels) for text in sources]
            one = merge.with_docstring(sources[0], entry.docstring)
            results[entry] = one if len(paths) == 1 else merge.joined(sources, entry.docstring)
            largest = max(paths, key=lambda path: len(self.sources[path]))
            (ROOT / f"{PACKAGE}/{entry.new}.py").parent.mkdir(parents=True, exist_ok=True)
            for path in paths:
                if path != largest:
                    _git("rm", "-q", "-f", path)
            if largest != f"{PACKAGE}/{entry.new}.py":
                _git("mv", "-f", largest, f"{largest}.moving")  # a file may go where another one was
                aside.append((f"{largest}.moving", entry))
        for path, entry in aside:
            _git("mv", "-f", path, f"{PACKAGE}/{entry.new}.py")
        for entry, text in results.items():
            (ROOT / f"{PACKAGE}/{entry.new}.py").write_text(text)
        for folder in {str(Path(entry.new).parent) for entry in self.entries}:
            start = ROOT / PACKAGE / folder / "__init__.py"
            if not start.exists():
                start.write_text(f'"""{patches.CONTRACTS[folder]}"""\n')


def _ruff(*words: str) -> str:
    ruff = Path(sys.executable).with_name("ruff")
    done = subprocess.run([str(ruff), *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout + done.stderr


def _tidy() -> str:
    """Sort imports, drop those that nothing uses, format, break long lines."""
    status = [line[3:].split(" -> ")[-1] for line in _git("status", "--porcelain", "-uall").splitlines()]
    names = sorted({n for n in status if n.endswith(".py") and not n.startswith(OWN) and (ROOT / n).exists()})
    quick = [name for name in names if not name.startswith("examples/quickstart")]
    if not quick:
        return ""
    _ruff("check", "-q", "--select", "I,F401,F811", "--fix", *quick)
    _ruff("format", "-q", *quick)
    for name in quick:
        path = ROOT / name
        text = path.read_text()
        short = patches.broken_code(patches.broken_lines(text))
        if short != text:
            path.write_text(short)
    _ruff("check", "-q", "--select", "I", "--fix", *quick)
    _ruff("format", "-q", *quick)
    return _ruff("check", "--output-format", "concise", ".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="+")
    parser.add_argument("--check", action="store_true", help="say what clashes, and write nothing")
    options = parser.parse_args()
    rooms = set() if options.rooms == ["all"] else set(options.rooms)
    if _git("status", "--porcelain", "-uno", "--", PACKAGE, "tests").strip():
        sys.exit("there are uncommitted changes: commit them first, so that `git reset --hard` undoes a run")
    mover = Mover(rooms)
    mover.rewrite()
    notes = [f"not there: {PACKAGE}/{old}.py" for old in mover.missing]
    notes += [*mover.clashes.notes, *mover.moves.notes]
    if not options.check:
        mover.write()
        notes += patches.run(ROOT, entries())
        notes += _tidy().splitlines()
        patches.write_renames(ROOT, entries())
        _git("add", "-A")
    counts = defaultdict(int)
    for entry in mover.entries:
        counts[entry.room] += len(entry.olds) - 1
    print("\n".join(notes))
    print(f"{len(mover.entries)} files of {sum(len(e.olds) for e in mover.entries)}; {len(notes)} notes")


if __name__ == "__main__":
    main()
