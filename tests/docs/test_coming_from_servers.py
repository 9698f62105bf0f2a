"""The page for users of other servers: its commands start, its requests are answered, its options exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from deepspeed.serving.arguments import _parser, parse
from tests.unit.serving.server import make_folder, serving

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from-servers.md").read_text()
COMMAND = re.compile(r"<!-- served -->\n```bash\n(.*?)```", re.DOTALL)
REQUESTS = re.compile(r"<!-- sent -->\n```bash\n(.*?)```", re.DOTALL)
SIDES = [part for part in PAGE.split("\n## ")[1:]]


def words(block: str) -> list[list[str]]:
    """The commands of a block, in words."""
    return [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_its_commands_and_options_exist() -> None:
    known = {option for action in _parser()._actions for option in action.option_strings}
    assert len(SIDES) == 2
    for side in SIDES:
        ((name, model, *options),) = words(COMMAND.findall(side)[0])
        assert (name, model) == ("ds_serve", "MODEL") and parse([".", *options]).name == "chat"
        rows = re.findall(r"^\| (.+?) \| (.+?) \|$", side, re.MULTILINE)[1:]
        assert len(rows) > 8
        for theirs, ours in rows:
            stated = set(re.findall(r"`(--[a-z-]+)", ours))
            stated |= set(re.findall(r"`(--[a-z-]+)", theirs)) if ours.startswith("the same") else set()
            assert stated <= known, stated - known


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES, ids=["vllm", "llama.cpp"])
def test_its_commands_run_and_its_requests_are_answered(side: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    ((_, _, *options),) = words(COMMAND.findall(side)[0])
    place = options.index("--port")
    del options[place : place + 2]
    with serving(folder, tmp_path / "log", *options) as server:
        sent = words(REQUESTS.findall(side)[0])
        assert len(sent) >= 2
        for curl, url, *rest in sent:
            assert curl == "curl" and url.startswith("localhost:8000/")
            fields = dict(zip(rest[::2], rest[1::2], strict=True))
            body: dict[str, Any] = json.loads(fields["-d"])
            header, _, value = fields["-H"].partition(": ")
            answer = httpx.post(
                url.replace("localhost:8000", server.url), json=body, headers={header: value}, timeout=300
            )
            assert answer.status_code == 200, (url, answer.text)
