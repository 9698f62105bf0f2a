"""The site builds without a warning, and the look at its pages sees what it is there to see."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from website import errors, gallery, look, memory

ROOT = Path(__file__).resolve().parents[2]
BAD = """<!doctype html><html lang="en"><title>t</title><body style="background:#fff">
<p style="color:#bbb">faint</p><div style="width:3000px">wide</div><img src="http://127.0.0.1:1/x.png" alt="">
</body></html>"""


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr + done.stdout
    foreign = [page for page in (tmp_path / "site").rglob("*.html") if 'src="http' in page.read_text()]
    assert foreign == []


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("chromedriver") and look.AXE.exists()), reason="`make look` brings what it needs")
def test_a_bad_page_is_seen(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(BAD)
    server = look.serve(tmp_path)
    driver = look.browser("phone", "light")
    try:
        found = look.look(driver, f"http://127.0.0.1:{server.server_port}", "", "phone", "light", None)
    finally:
        driver.quit()
        server.shutdown()
        server.server_close()
    assert found.wider > 2000
    assert len(found.contrast) == 1
    assert found.foreign == ["http://127.0.0.1:1/x.png"]
    assert not found.fine


@pytest.mark.slow
def test_every_row_of_the_memory_tables_is_current() -> None:
    page = memory.PAGE.read_text()
    tables = memory.generated({name: memory.sizes_of(name) for name in memory.MODELS})
    assert memory.with_tables(page, tables) == page, "run `make docs`"


def test_messages_are_found_with_their_places() -> None:
    found = {message.text: message for message in errors.messages()}
    message = found["stage is …; use 0, 1, 2 or 3"]
    assert (message.error, message.file, message.guide) == (
        "ArgumentError",
        "deepspeed/zero/api/memory_estimate.py",
        "zero",
    )
    assert len(found) > 400
    assert "stage is …; use 0, 1, 2 or 3" in errors.page()


def test_the_gallery_has_every_example() -> None:
    page, commands = gallery.page(), [example.command for example in gallery.examples()]
    assert len(commands) > 8
    assert [command for command in commands if command not in page] == []
    kept = {path.stem for path in gallery.PICTURES.glob("*.png")}
    assert kept <= {example.name for example in gallery.examples()}, "a picture of no example"
    assert kept
