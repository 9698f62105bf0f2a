"""Both sides of the diffs of `docs/coming-from` and of the first page run on two ranks, and lose the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.diffs import sides
from tests.harness.pool import PATIENCE
from tests.upstream.interpreter import NEEDS_UPSTREAM, run_upstream

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "docs" / "index.md"
PAGES = [*sorted((ROOT / "docs" / "coming-from").glob("*.md")), HOME]
LIMIT = 180 * PATIENCE  # seconds
PORTS = 21_000  # below those that the system hands out; a block for each process of the test runner


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where each rank has left a file for each side of each page that this session asks for."""
    out = tmp_path_factory.mktemp("losses")
    asking = {
        item.name.partition("[")[2] for item in request.session.items if "losses" in getattr(item, "fixturenames", ())
    }
    pages = [page for page in PAGES if f"{page.stem}]" in asking or "" in asking]  # a test without a page wants all
    world = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2",
             "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # fmt: skip
    port = PORTS + os.getpid() % 500 * 2 * len(PAGES)
    command = [sys.executable, "-m", "tests.docs.both_sides", str(out), str(port), *map(str, pages)]
    both = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, **world},
    )  # fmt: skip
    try:
        said = both.communicate(timeout=LIMIT)[0]
    finally:
        if both.poll() is None:
            os.killpg(both.pid, signal.SIGKILL)
            both.wait()
    assert both.returncode == 0, said
    return out


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[] if page == HOME else pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_both_sides_lose_the_same(page: Path, losses: Path) -> None:
    first = []
    for rank in range(2):
        before, after = (json.loads((losses / f"{page.stem}-{side}-{rank}.json").read_text()) for side in sides(page))
        assert len(before) == 5
        assert after == pytest.approx(before, rel=1e-5)
        first.append(before[0])
    assert page == HOME or first[0] != first[1], "ranks have data of their own"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_sides_differ(page: Path) -> None:
    before, after = sides(page).values()
    assert "deepspeed" in after.lower()
    assert before != after


@pytest.mark.slow
@NEEDS_UPSTREAM
def test_upstreams_side_loses_the_same_on_upstream(losses: Path, tmp_path: Path) -> None:
    """The page's script before, started as it stands in upstream's own environment; after, here."""
    page = ROOT / "docs" / "coming-from" / "upstream.md"
    script = tmp_path / "before.py"
    script.write_text(
        "import pathlib, sys\nimport deepspeed\n"
        "assert 'independent' not in deepspeed.__version__, deepspeed.__file__\n"
        + sides(page)["before"]
        + "pathlib.Path(sys.argv[1], f'{rank}.json').write_text(repr(losses))\n"
    )
    run_upstream("-m", "torch.distributed.run", "--nproc_per_node", "2", str(script), str(tmp_path))
    for rank in range(2):
        before = json.loads((tmp_path / f"{rank}.json").read_text())
        after = json.loads((losses / f"{page.stem}-after-{rank}.json").read_text())
        assert len(before) == 5
        assert after == pytest.approx(before, rel=1e-5)
