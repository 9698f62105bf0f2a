"""The two sides of a page's diff."""

from __future__ import annotations

import re
from pathlib import Path

BOTH = re.compile(r"<!-- both sides run -->\n```diff\n(.*?)```", re.DOTALL)


def sides(page: Path) -> dict[str, str]:
    """The page's script before and after: its lines without those of the other side."""
    (diff,) = BOTH.findall(page.read_text())
    lines = diff.splitlines()
    return {
        side: "\n".join(line[1:] for line in lines if line[:1] != other) + "\n"
        for side, other in (("before", "+"), ("after", "-"))
    }
