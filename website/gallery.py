"""The gallery: examples from the table of `examples/README.md`, with the pictures that they draw.

`python -m website.gallery [WORD …]` (`make gallery`) runs the examples whose command has one of the words, all by
default, and keeps the newest picture that each leaves; the page is made while the site is built.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images" / "gallery"
ROW = re.compile(r"^\| `([^`]+)` \| (.+) \|$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
SCRIPT = re.compile(r"([\w/]+)\.(?:py|ipynb)")
LIMIT = 1800  # seconds for one example
WIDEST = 1320  # pixels of a kept picture


@dataclass(frozen=True)
class Example:
    """A row of the table: how it is started, what it shows."""

    command: str
    shows: str

    @property
    def name(self) -> str:
        """Its folder and script, joined."""
        folder = re.search(r"cd (\S+)", self.command)
        found = SCRIPT.search(self.command)
        path = f"{folder[1]}/{found[1]}" if folder and found else found[1] if found else self.command
        return path.removeprefix("examples/").replace("/", "-")

    @property
    def picture(self) -> Path:
        """Where its picture is kept, if it draws one."""
        return PICTURES / f"{self.name}.png"


def examples() -> Iterator[Example]:
    """The rows of the table, in its order."""
    for command, shows in ROW.findall((ROOT / "examples" / "README.md").read_text()):
        yield Example(command, shows.replace("](../docs/", "]("))  # the page lies in that folder


def page() -> str:
    """A section for each example that draws a picture, then the others as a table."""
    drawn = [example for example in examples() if example.picture.exists()]
    parts = []
    for example in drawn:
        title = LINK.sub(r"\1", example.shows).split(":")[0].split(" (")[0].replace("`", "")
        parts.append(
            f"## {title[0].upper()}{title[1:]}\n\n```\n{example.command}\n```\n\n"
            f"![What `{example.command}` draws](images/gallery/{example.picture.name}){{ loading=lazy }}\n\n"
            f"{example.shows[0].upper()}{example.shows[1:]}.\n"
        )
    rows = [f"| `{example.command}` | {example.shows} |" for example in examples() if example not in drawn]
    table = ["## Without a picture", "", "| command | what it shows |", "|---|---|", *rows]
    return "\n".join([*parts, *table]) + "\n"


def draw(example: Example) -> bool:
    """Run an example and keep the newest picture it left under a folder `runs`; whether there was one."""
    started = time.time()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-ec", example.command], cwd=ROOT, env={**os.environ, "PATH": path}, check=True, timeout=LIMIT
    )
    left = [file for runs in ROOT.glob("**/runs") for file in runs.rglob("*.png") if file.stat().st_mtime >= started]
    left.sort(key=lambda file: file.stat().st_mtime)
    drawn = left[-1].read_bytes() if left else _of_a_notebook(example, started)
    if drawn is None:
        return False
    keep(drawn, example.picture)
    return True


def _of_a_notebook(example: Example, started: float) -> bytes | None:
    """The last picture in the executed copy that `nbconvert` left beside a notebook."""
    found = re.search(r"[\w/]+\.ipynb", example.command)
    copy = ROOT / found[0].replace(".ipynb", ".nbconvert.ipynb") if found else None
    if copy is None or not copy.exists() or copy.stat().st_mtime < started:
        return None
    cells = json.loads(copy.read_text())["cells"]
    copy.unlink()
    shown = [output.get("data", {}).get("image/png") for cell in cells for output in cell.get("outputs", [])]
    pictures = [picture for picture in shown if picture]
    return base64.b64decode(pictures[-1]) if pictures else None


def keep(drawn: bytes, path: Path) -> None:
    """Write a PNG as small as its few colours allow: at most `WIDEST` pixels wide, with a palette."""
    from PIL import Image

    image = Image.open(io.BytesIO(drawn)).convert("RGB")
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)), Image.Resampling.LANCZOS)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


def main(words: list[str]) -> None:
    """Run, keep, say."""
    for example in examples():
        if not words or any(word in example.command for word in words):
            print(f"{example.name}: {'kept' if draw(example) else 'no picture'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
