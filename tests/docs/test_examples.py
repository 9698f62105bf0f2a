"""What the pages show is true: marked examples run, marked configurations resolve, links and paths exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.zero.parameters.parameter import _RAW_STORAGE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
CONFIG = re.compile(r"<!-- config -->\n```json\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
FILE = re.compile(r"`((?:deepspeed|docs|tests|examples|benchmarks)/[\w./-]*)`")
SHORT = re.compile(r"`([\w-]+/[\w./-]+)`")  # in ARCHITECTURE.md, where `deepspeed/` is left out
RUNS = re.compile(r"<!-- (run|config|both sides run|not run: .+) -->")
PLAIN = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAX_READING = 2500  # lines


def blocks(pattern: re.Pattern[str]) -> Iterator[object]:
    for page in PAGES:
        found = pattern.findall(page.read_text())
        yield from (pytest.param(page, text, id=f"{page.stem}-{at}") for at, text in enumerate(found, start=1))


@pytest.mark.parametrize("page", [p for p in PAGES if RUN.search(p.read_text())], ids=lambda p: p.stem)
def test_examples_run(page: Path, alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of a page run in order, later ones with the names of earlier ones."""
    monkeypatch.chdir(tmp_path)  # what a block writes, it writes there
    text, names = page.read_text(), {"__name__": "example"}
    for found in RUN.finditer(text):
        line = text[: found.start(1)].count("\n")  # so that a traceback names the line of the page
        exec(compile("\n" * line + found[1], str(page), "exec"), names)


@pytest.mark.parametrize(("page", "text"), list(blocks(CONFIG)))
def test_configurations_resolve(page: Path, text: str) -> None:
    assert DeepSpeedConfig(json.loads(text), world=4).train_batch_size


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    named = [page.parent / link for link in LINK.findall(text)] + [ROOT / path for path in FILE.findall(text)]
    assert [str(path) for path in named if not path.exists()] == []


def test_paths_of_the_architecture_exist() -> None:
    named = set(SHORT.findall((ROOT / "ARCHITECTURE.md").read_text()))
    assert len(named) > 100
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "deepspeed" / path).exists()] == []


def test_the_architecture_is_short() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    words = text.split("| word | meaning |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(words) <= 8 and len(text.splitlines()) <= 350


def test_the_readme_names_every_room() -> None:
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("## ")[0]
    rooms = [folder.name for folder in (ROOT / "deepspeed").iterdir() if (folder / "__init__.py").exists()]
    assert [room for room in rooms if f"{room}/" not in tree] == []


def test_the_reading_order_is_short() -> None:
    order = (ROOT / "README.md").read_text().split("## Reading order")[1].split("For users")[0]
    files = [ROOT / path for path in FILE.findall(order)]
    assert len(files) > 5
    assert sum(len(path.read_text().splitlines()) for path in files) < MAX_READING


def test_the_list_of_what_raises_is_whole() -> None:
    page = (ROOT / "docs/sharded-parameters.md").read_text()
    public = [name for name in _RAW_STORAGE if name.startswith("__") or not name.startswith("_")]
    assert [name for name in public if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    """Python, JSON and diffs; what stands in other fences is commands, lists of files and what programs print."""
    lines = page.read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line in ("```python", "```json", "```diff")]
    assert [f"{page.name}:{at + 1}" for at in starts if not RUNS.fullmatch(lines[at - 1])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_are_there(page: Path) -> None:
    """What a block without language starts: the package's commands by name, scripts by path, `make` by target."""
    commands = re.findall(r'^"?([\w.]+)"? = "deepspeed', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = [line.split() for block in PLAIN.findall(page.read_text()) for line in block.splitlines() if line.strip()]
    wrong = [line[0] for line in lines if line[0].startswith("ds_") and line[0] not in commands]
    wrong += [line[1] for line in lines if line[0] == "make" and line[1] not in targets]
    wrong += [word for line in lines for word in line if word.startswith("examples/") and not (ROOT / word).exists()]
    assert wrong == []
