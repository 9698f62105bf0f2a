"""What the pages show is true: marked examples run, marked configurations resolve, links and paths exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed import comm
from deepspeed.config import DeepSpeedConfig
from deepspeed.zero.param import _RAW_STORAGE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
CONFIG = re.compile(r"<!-- config -->\n```json\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
FILE = re.compile(r"`((?:deepspeed|docs|tests|examples|benchmarks)/[\w./-]*)`")
MAX_READING = 2000  # lines


def blocks(pattern: re.Pattern[str]) -> Iterator[object]:
    for page in PAGES:
        found = pattern.findall(page.read_text())
        yield from (pytest.param(page, text, id=f"{page.stem}-{at}") for at, text in enumerate(found, start=1))


@pytest.fixture
def alone() -> Iterator[None]:
    """Examples make a world of one; the group goes with them when it was not there before."""
    before = comm.is_initialized()
    yield
    if comm.is_initialized() and not before:
        comm.destroy_process_group()


@pytest.mark.parametrize("page", [p for p in PAGES if RUN.search(p.read_text())], ids=lambda p: p.stem)
def test_examples_run(page: Path, alone: None) -> None:
    """The blocks of a page run in order, later ones with the names of earlier ones."""
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
