"""What mkdocs calls while it builds: pages that are made from the repository, and marks that only the tests read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from website import errors, gallery

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- (?:run|config|both sides run|not run:[^>]*) -->\n", re.MULTILINE)
ABOVE = ("ARCHITECTURE.md", "CHANGELOG.md")
DOCS_LINK = re.compile(r"\]\(docs/")
MADE = {"<!-- generated: errors -->": errors.page, "<!-- generated: gallery -->": gallery.page}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live above the folder of the others."""
    from mkdocs.structure.files import File

    for name in ABOVE:
        text = DOCS_LINK.sub("](", (ROOT / name).read_text())
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put in what is made here; take out the marks of the tests, where Markdown would end a paragraph."""
    for mark, make in MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    for name in ABOVE:
        markdown = markdown.replace(f"](../{name})", f"]({name.lower()})")
    return MARK.sub("", markdown)
