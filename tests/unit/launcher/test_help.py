"""`deepspeed --help` goes by task: what it names exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from deepspeed.launcher.arguments import parse

ROOT = Path(__file__).resolve().parents[3]


def by_task(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    return capsys.readouterr().out.partition("by task:")[2]


def test_its_commands_are_installed(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"\bds_[a-z_]+\b(?!\.json)", by_task(capsys)))
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2].partition("\n[")[0]
    assert len(named) > 8
    assert named <= set(re.findall(r"^(\w+) =", scripts, re.MULTILINE))


def test_its_command_lines_are_understood(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"\bdeepspeed (-[^;\n]+train\.py|-[^;\n]+hostfile)", by_task(capsys))
    assert len(lines) >= 5
    for line in lines:
        known = parse([*shlex.split(line.replace(" N ", " 0 ")), "train.py"])
        assert known.user_script == "train.py"
