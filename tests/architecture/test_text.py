"""What the files of the repository may not say."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.architecture.sources import ROOT

# a folder of one machine or user: absolute, or the folder this checkout happens to stand in
MACHINE_PATH = re.compile(r"(?<![\w./}~])/(tmp|work|home|root|Users|mnt|workspace)/\w")
OPEN_TODO = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")


def _lines_with(pattern: re.Pattern[str]) -> list[str]:
    # new files count before they are committed
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for path in (ROOT / name for name in files):
        if path == ROOT / "tests/architecture/test_text.py" or not path.is_file():
            continue
        content = path.read_bytes()
        if b"\0" in content:
            continue  # a picture
        lines = enumerate(content.decode(errors="ignore").splitlines(), start=1)
        found += [f"{path.relative_to(ROOT)}:{number}: {line}" for number, line in lines if pattern.search(line)]
    return found


@pytest.mark.parametrize("pattern", [MACHINE_PATH, OPEN_TODO], ids=["machine path", "TODO without issue"])
def test_no_line_says(pattern: re.Pattern[str]) -> None:
    assert _lines_with(pattern) == []
