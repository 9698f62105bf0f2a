"""What the moves need besides: contracts of folders, settings, lines that became too long."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

WIDTH = 120
# The docstring of each new folder.
CONTRACTS = {
    "zero/layout": "Which element of the training state is where. Moves no tensor.",
    "zero/parameters": "All-gathers and reshards parameters, and the module hooks that do. Knows no gradient.",
    "zero/gradients": "From autograd to the reduced gradient shard. Knows no optimizer.",
    "zero/optimizer": "One optimizer update over shards.",
    "zero/api": "What users import, and what engines and checkpoints see of the training state.",
    "comm/process_groups": "Process groups, rendezvous, mesh and axes: which ranks exist. Sends only to form groups.",
    "comm/collectives": "Collectives and point-to-point messages.",
    "comm/shared_memory": "Messages between the ranks of one machine through shared memory.",
    "comm/watchdog": "Observes collectives: timeouts, desync detection, logs. Collectives report to it by one call.",
    "comm/fake": "Stands for the absent ranks of a fake world.",
    "checkpoint/format": "Bytes and names of the native format, stable for ever. Knows no engine.",
    "checkpoint/save": "Saves checkpoints, in the native format.",
    "checkpoint/load": "Finds and loads checkpoints of the native format.",
    "checkpoint/compat": "Reads and writes formats of other libraries.",
    "engine/memory": "Turns bytes into reports and advice; the only place that does.",
    "inference/executors": "From a batch to logits. The scheduler and the KV cache know no tensor.",
    "compression/pruning": "Removes parameters: masks, importance scores, dependency groups, structured removal.",
}
LAYERS = {
    "zero": ["api", "optimizer", "gradients", "parameters", "layout"],
    "comm": ["fake", "collectives", "process_groups", "shared_memory", "watchdog", "shutdown"],
    "checkpoint": ["compat", "huggingface", "load | save", "format | ranks"],
}


def deeper(text: str, levels: int) -> str:
    """A file's text where it lies some folders deeper than before."""
    pattern = re.compile(r"(Path\(__file__\)(?:\.resolve\(\))?\.parents\[)(\d+)(\])")
    return pattern.sub(lambda m: f"{m[1]}{int(m[2]) + levels}{m[3]}", text) if levels else text


# -- long lines -------------------------------------------------------------------------------------------------------


def broken_lines(text: str) -> str:
    """Comments and docstrings with no line over the width: what is too much goes to the next line."""
    lines = text.split("\n")
    index, quoted = 0, False
    while index < len(lines):
        line = lines[index]
        comment = re.match(r"\s*# ", line)
        code, mark, trailing = line.partition("  # ")
        if len(line) > WIDTH and (comment or (quoted and '"""' not in line)):
            _push_on(lines, index, "# " if comment else "")
        elif len(line) > WIDTH and not quoted and mark and '"' not in trailing and code.strip():
            if not re.match(r"(noqa|type:|pyright|fmt)", trailing):
                indent = code[: len(code) - len(code.lstrip())]
                lines[index : index + 1] = [f"{indent}# {trailing}", code]
                continue
        elif len(line) > WIDTH and line.lstrip().startswith('"""') and line.count('"""') == 2:
            _break_docstring(lines, index)
        elif len(line) > WIDTH and line.lstrip().startswith('"""'):
            _push_on(lines, index, "")
        if line.count('"""') % 2:
            quoted = not quoted
        index += 1
    return "\n".join(lines)


def broken_code(text: str) -> str:
    """Python without lines over the width where the formatter may not break them: broken behind a comma."""
    lines = text.split("\n")
    long = {index for index, line in enumerate(lines, 1) if len(line) > WIDTH}
    if not long:
        return text
    commas: dict[int, int] = {}
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.OP:
            continue
        depth += (token.string in "([{") - (token.string in ")]}")
        if token.string == "," and depth and token.start[0] in long and token.end[1] <= WIDTH:
            commas[token.start[0]] = token.end[1]
    for number, column in sorted(commas.items(), reverse=True):
        line = lines[number - 1]
        indent = line[: len(line) - len(line.lstrip())]
        if line[column:].strip() and not line[column:].lstrip().startswith("#"):
            lines[number - 1 : number] = [line[:column], indent + line[column:].strip()]
    return "\n".join(lines)


def broken_markdown(text: str, before: str) -> str:
    """Prose whose lines the moves made too long: what is too much goes to the next line."""
    lines, known, fenced, index = text.split("\n"), set(before.split("\n")), False, 0
    while index < len(lines):
        line = lines[index]
        fenced ^= line.lstrip().startswith("```")
        if len(line) > WIDTH and not fenced and line not in known and not re.match(r"\s*[|#>:]", line):
            head, rest = _cut(line)
            indent = re.match(r"\s*(?:[-*] |\d+\. )?", line)[0]  # type: ignore[index]
            indent = " " * len(indent)
            if len(head) <= WIDTH and rest:
                lines[index] = head
                following = lines[index + 1] if index + 1 < len(lines) else ""
                if following.strip() and not re.match(r"\s*([|#>:]|[-*] |\d+\. |```)", following):
                    lines[index + 1] = f"{indent}{rest} {following.lstrip()}"
                else:
                    lines.insert(index + 1, indent + rest)
        index += 1
    return "\n".join(lines)


def _cut(line: str) -> tuple[str, str]:
    at = line.rfind(" ", 0, WIDTH + 1)
    return line[:at].rstrip(), line[at + 1 :]


def _push_on(lines: list[str], index: int, mark: str) -> None:
    """Move the end of a line to the next one of its paragraph, or to one of its own."""
    head, rest = _cut(lines[index])
    indent = re.match(r"\s*", lines[index])[0]  # type: ignore[index]
    lines[index] = head
    following = lines[index + 1] if index + 1 < len(lines) else ""
    body = following[len(indent) + len(mark) :]
    same = following.startswith(indent + mark) and body.strip() and not re.match(r'["\s|*-]|\w+:|Args|Returns', body)
    if same:
        lines[index + 1] = f"{indent}{mark}{rest} {body}"
    else:
        lines.insert(index + 1, f"{indent}{mark}{rest}")


def _break_docstring(lines: list[str], index: int) -> None:
    indent = re.match(r"\s*", lines[index])[0]  # type: ignore[index]
    text = lines[index].rstrip().removesuffix('"""')
    head, rest = _cut(text)
    lines[index : index + 1] = [head, indent + rest, indent + '"""']


# -- settings and tests -----------------------------------------------------------------------------------------------


def write_renames(root: Path, entries: Iterable[Any]) -> None:
    """The page that says where each file went."""
    rooms: dict[str, list[str]] = {}
    for entry in entries:
        if not (root / f"deepspeed/{entry.new}.py").exists() or all(
            (root / f"deepspeed/{old}.py").exists() for old in entry.olds
        ):
            continue
        for old in entry.olds:
            if old != entry.new:
                rooms.setdefault(entry.room, []).append(f"| `{old}.py` | `{entry.new}.py` |")
    lines = [
        "# Renamed files",
        "",
        "Where each file of the package is since its rooms were put in order: old and new path below `deepspeed/`.",
        "Public names and their addresses have not changed. This page stays for one release.",
    ]
    for room, rows in rooms.items():
        lines += ["", f"## {room}", "", "| old | new |", "|---|---|", *rows]
    (root / "docs/renames.md").write_text("\n".join(lines) + "\n")


def run(root: Path, entries: Iterable[Any]) -> Iterator[str]:
    """Run all patches; each says what it could not do."""
    for patch in PATCHES:
        yield from (f"{patch.__name__}: {note}" for note in patch(root))


def _replaced(root: Path, name: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    path = root / name
    text = path.read_text()
    for old, new in pairs:
        if old in text:
            text = text.replace(old, new)
        elif new not in text:
            yield f"{name}: not there: {old[:60]!r}"
    path.write_text(text)


def contracts(root: Path) -> Iterator[str]:
    """A `layers` contract for each room that has folders."""
    path = root / "pyproject.toml"
    text = path.read_text()
    for room, layers in LAYERS.items():
        folders = [part for layer in layers for part in re.split(r" [|:] ", layer)]
        if f'containers = ["deepspeed.{room}"]' in text:
            continue
        if not all(
            (root / f"deepspeed/{room}/{folder}").exists() or (root / f"deepspeed/{room}/{folder}.py").exists()
            for folder in folders
        ):
            continue
        rows = "".join(f'    "{layer}",\n' for layer in layers)
        text = text.rstrip("\n") + (
            f'\n\n[[tool.importlinter.contracts]]\nname = "imports inside of {room} only go down its folders"\n'
            f'type = "layers"\ncontainers = ["deepspeed.{room}"]\nlayers = [\n{rows}]\n'
        )
    path.write_text(text)
    return iter(())


def budgets(root: Path) -> Iterator[str]:
    """Larger files and classes, and no exception for what fits now."""
    name = "tests/architecture/test_budgets.py"
    yield from _replaced(
        root, name, [("CLASS_METHODS, PARAMETERS = 500, 60, 25, 8", "CLASS_METHODS, PARAMETERS = 700, 60, 40, 8")]
    )
    path = root / name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"engine/engine.py:DeepSpeedEngine methods"' not in line))


def site(root: Path) -> Iterator[str]:
    """The page of renames is part of the site."""
    path = root / "mkdocs.yml"
    text = path.read_text()
    if "renames.md" not in text:
        text = re.sub(r"(\n(\s*)- status\.md\n)", r"\1\2- renames.md\n", text, count=1)
        path.write_text(text)
    if "renames.md" not in text:
        yield "mkdocs.yml: no place for renames.md"


def reading_order(root: Path) -> Iterator[str]:
    """The files to read first are longer, since pieces of them came back."""
    yield from _replaced(root, "README.md", [("under 2,000 lines together", "under 2,200 lines together")])
    yield from _replaced(root, "tests/docs/test_examples.py", [("MAX_READING = 2000", "MAX_READING = 2200")])


def pages(root: Path) -> Iterator[str]:
    """The page of renames can be reached, and the changes name it."""
    path = root / "ARCHITECTURE.md"
    text = path.read_text()
    if "renames.md" not in text:
        text = text.replace(
            "\n## The idea\n",
            "\nFiles that had another name in the last release: [docs/renames.md](docs/renames.md).\n\n## The idea\n",
            1,
        )
        path.write_text(text)
    if "renames.md" not in text:
        yield "ARCHITECTURE.md: no place for the link to renames.md"
    path = root / "CHANGELOG.md"
    text = path.read_text()
    if "renames.md" not in text:
        text = re.sub(
            r"\n\n- ",
            "\n\n- Files of the package have the field's names, in folders by question ([renames](docs/renames.md)).\n"
            "  Public names and their addresses have not changed.\n- ",
            text,
            count=1,
        )
        path.write_text(text)


def reference(root: Path) -> Iterator[str]:
    """No member of a module beside the whole module on a page of the reference."""
    for path in sorted((root / "docs/api").glob("*.md")):
        blocks = re.split(r"(?m)^(?=::: )", path.read_text())
        names = [re.match(r"::: (\S+)", block)[1] for block in blocks[1:]]  # type: ignore[index]
        for name in names:
            if name.rpartition(".")[0] in names or names.count(name) > 1:
                yield f"{path.name}: {name} stands beside its module, or twice"


PATCHES: list[Callable[[Path], Iterator[str]]] = [contracts, budgets, site, reading_order, pages, reference]
