"""What the first page promises, and what a reader finds behind it: no promise without its proof, no dead end."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional

import deepspeed
from website import gallery

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)
JSON = re.compile(r"```json\n(.*?)```", re.DOTALL)
ROW = re.compile(r"^\| (.+?) \| (.+?) \|$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
FIRST_SCREEN = 60  # lines of the README's source


def works(page: str) -> list[tuple[str, str]]:
    """The rows of the table of what works, without its head."""
    return ROW.findall(page.partition("## What works")[2].partition("\n\nMigration guides ")[0])[1:]


def test_the_first_screen_has_picture_command_diff_and_json_in_this_order() -> None:
    first = "\n".join(README.splitlines()[:FIRST_SCREEN])
    places = [first.find(mark) for mark in ("<picture>", "make train", "pip install", "```diff", "```json")]
    assert places == sorted(places) and -1 not in places


def test_both_sides_of_the_readmes_diff_lose_the_same(
    alone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a `Net` and `batches`, on one rank, under the README's own JSON."""
    (tmp_path / "ds_config.json").write_text(JSON.findall(README)[0])
    monkeypatch.chdir(tmp_path)
    draw = torch.Generator().manual_seed(0)
    batches = [(torch.randn(32, 8, generator=draw), torch.randint(3, (32,), generator=draw)) for _ in range(4)]

    class Net(nn.Sequential):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

    losses: dict[str, list[float]] = {}
    for side, other in (("before", "+"), ("after", "-")):
        lines = [line[1:] for line in DIFF.findall(README)[0].splitlines() if line[:1] != other]
        text = "\n".join([*lines, "    losses.append(loss.item())"])
        names: dict[str, Any] = {"torch": torch, "F": functional, "Net": Net, "batches": batches, "losses": []}
        exec(compile(text, f"README.md, {side}", "exec"), names)
        losses[side] = names["losses"]
        if side == "after":
            names["engine"].destroy()
    assert len(losses["before"]) == 4
    assert losses["after"] == pytest.approx(losses["before"], rel=1e-5)


def test_each_row_of_what_works_has_a_link() -> None:
    rows = works(README)
    assert len(rows) > 10
    assert [what for what, more in rows if not LINK.search(more)] == []


def test_the_sites_first_page_says_what_the_readme_says() -> None:
    assert [(what, more.replace("](docs/", "](")) for what, more in works(README)] == works(INDEX)


def test_every_guide_can_be_reached_from_the_readme_by_links_alone() -> None:
    seen, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        if page not in seen and page.suffix == ".md" and page.exists():
            seen.add(page)
            ahead += [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "index.md"}  # the README's twin on the site
    assert sorted(str(page.relative_to(ROOT)) for page in pages - seen) == []


def test_every_make_target_that_pages_name_is_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = {ROOT / "README.md", ROOT / "ARCHITECTURE.md", *(ROOT / "docs").rglob("*.md")}
    for page in pages - {ROOT / "docs/status.md"}:  # which also names what is not built
        named = set(re.findall(r"`make ([\w-]+)", page.read_text()))
        assert named <= targets, page


def test_the_python_reference_has_the_public_names() -> None:
    """Every address on its pages resolves, and every class and function of the package's front stands there."""
    addresses = [
        found
        for page in (ROOT / "docs/api").glob("*.md")
        for found in re.findall(r"^::: (\S+)", page.read_text(), re.M)
    ]
    shown: set[int] = set()
    for address in addresses:
        owner, _, name = address.rpartition(".")
        try:
            thing = getattr(importlib.import_module(owner), name)
        except (ImportError, AttributeError):
            thing = importlib.import_module(address)
        shown.add(id(thing))
        shown |= {id(value) for value in vars(thing).values()} if inspect.ismodule(thing) else set()
    front = {name: getattr(deepspeed, name) for name in deepspeed.__all__}
    public = {name: thing for name, thing in front.items() if inspect.isclass(thing) or inspect.isfunction(thing)}
    assert len(addresses) > 50 and len(public) > 8
    assert [name for name, thing in public.items() if id(thing) not in shown] == []


def test_pictures_of_the_gallery_are_small_and_stand_in_it() -> None:
    page, kept = gallery.page(), sorted(gallery.PICTURES.glob("*.png"))
    assert [link for link in LINK.findall(page) if not (ROOT / "docs" / link).exists()] == []
    assert kept
    for path in kept:
        assert path.stat().st_size < 60_000, path
        assert min(Image.open(path).size) > 250, path
        assert f"images/gallery/{path.name}" in page


def test_a_picture_is_kept_small(tmp_path: Path) -> None:
    """Of a drawing with soft edges, wider than a page."""
    from io import BytesIO

    drawn = BytesIO()
    Image.linear_gradient("L").resize((2600, 900)).convert("RGB").save(drawn, "PNG")
    gallery.keep(drawn.getvalue(), tmp_path / "kept.png")
    with Image.open(tmp_path / "kept.png") as kept:
        assert kept.size == (gallery.WIDEST, round(900 * gallery.WIDEST / 2600)) and kept.mode == "P"
    assert (tmp_path / "kept.png").stat().st_size < 60_000


@pytest.mark.slow
def test_the_one_command_of_the_first_screen_trains(tmp_path: Path) -> None:
    """What `make train` starts, with fewer steps: two ranks, a held-out loss, a picture."""
    (line,) = re.findall(
        r"^\t\$\(BIN\)/deepspeed (.+) \$\(TRAIN_ARGS\)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    flags = line.replace("examples/", f"{ROOT}/examples/").split()
    less = [
        "--train_bytes",
        "40000",
        "--width",
        "48",
        "--layers",
        "2",
        "--heldout_bytes",
        "20000",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", *flags, *less],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert float(re.findall(r"held out: ([\d.]+) nats per byte", done.stdout)[0]) < 6
    assert list(tmp_path.rglob("*.png"))


@pytest.mark.slow
def test_the_site_can_be_searched(tmp_path: Path) -> None:
    """Keys, errors and names of the reference are in the index that its search reads."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600)
    rows = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    text = "\n".join(row["text"] + row["title"] for row in rows)
    for word in ("stage3_param_persistence_threshold", "the loss has no graph", "save_checkpoint", "ds_new"):
        assert word in text, word
