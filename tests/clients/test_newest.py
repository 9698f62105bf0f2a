"""What `make newest` writes: a row for each set of releases, without installing anything."""

from __future__ import annotations

from tests.clients.newest import BEGIN, COLUMNS, END, PACKAGES, PAGE, with_row
from tests.clients.versions import OLDEST, torch_line


def test_a_row_for_each_set_of_releases() -> None:
    first = dict.fromkeys(COLUMNS, "1.0") | {"torch": "2.13.0+cpu"}
    page = with_row(f"above\n{BEGIN}\n{END}\nbelow", first, "2026-01-01", "clients: 1 failed")
    page = with_row(page, first | {"peft": "2.0"}, "2026-01-02", "clients: 2 passed")
    again = with_row(page, first, "2026-01-03", "clients: 3 passed")
    rows = again.split(BEGIN)[1].split(END)[0].strip().splitlines()
    assert [row.count("|") for row in rows] == [len(COLUMNS) + 3] * 2
    assert rows[0].endswith("| 2026-01-02 | clients: 2 passed |") and rows[1].endswith("| clients: 3 passed |")
    assert rows[1].startswith("| 2.13.0 | 1.0 |") and again.startswith("above") and again.endswith("below")


def test_the_page_has_the_table_and_every_client() -> None:
    text = PAGE.read_text()
    assert text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)
    assert set(OLDEST) < set(PACKAGES) and torch_line().startswith("torch==")
