"""Pages of ranks that are no pages: `ds_top` looks on."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.monitor.top import FOLDER, LivePage, read_pages, table


@pytest.mark.parametrize("data", [b"", b"\x05", b"\x02\x00\x00\x00{}", b"\x02\x00\x00\x00[]", b"\xff" * 40])
def test_a_page_that_is_none_is_left_out(tmp_path: Path, data: bytes) -> None:
    page = LivePage(tmp_path, 0)
    page.write({"update": 3, "seconds": 0.1, "host": "here"})
    (tmp_path / FOLDER / "1.page").write_bytes(data)
    assert list(read_pages(tmp_path)) == [0]
    assert "1 rank(s)" in table(tmp_path)
    page.close()
