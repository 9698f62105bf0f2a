"""The commands of docs/trained-model.md, run as a reader runs them; installing is left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import trained
from tests.harness.pool import PATIENCE
from tests.unit.serving.server import serving

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "trained-model.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, block in FENCES if not language for line in block.splitlines()]
pytestmark = pytest.mark.slow


def run(command: list[str], where: Path, given: str = "") -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=where, env=environment, input=given, capture_output=True, text=True, timeout=900 * PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's second command was run, so that `runs/smollm2` is there."""
    if reason := trained.missing_package():
        pytest.skip(reason)
    where = tmp_path_factory.mktemp("reader")
    (command,) = [line for line in COMMANDS if "model.py" in line]
    program, folder = command.split()[1:]
    run([sys.executable, str(ROOT / program), folder], where)
    return where


def test_the_chat_answers(where: Path) -> None:
    (command,) = [line for line in COMMANDS if "chat.py" in line]
    program, folder = command.split()[1:]
    said = run(
        [sys.executable, str(ROOT / program), folder], where, "What is the capital of France?\nAnd of Italy?\n\n"
    )
    _, first, second, end = said.split("> ")  # before the first: that the model is prepared
    assert "Paris" in first and "Rome" in second and end == "", said


def test_the_python_block_answers(where: Path) -> None:
    (block,) = [block for language, block in FENCES if language == "python"]
    assert "Paris" in run([sys.executable, "-c", block], where)


def test_the_server_answers(where: Path, tmp_path: Path) -> None:
    (start,) = [line.split() for line in COMMANDS if line.startswith("ds_serve")]
    (asked,) = [line for line in COMMANDS if line.startswith("curl")]
    path, body = re.fullmatch(r"curl localhost:8000(\S+) -d '(.*)'", asked).groups()  # type: ignore[union-attr]
    options = [word for word in start[2:] if word not in ("--port", "8000")]
    with serving(where / start[1], tmp_path / "log", *options) as server:
        answer = httpx.post(server.url + path, content=body, timeout=300 * PATIENCE).json()
    assert "Paris" in answer["choices"][0]["message"]["content"], json.dumps(answer)
