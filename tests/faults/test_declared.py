"""Variables on one machine: ranks inherit everything, and environment files and `--export` act as well."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOW = "import json, os; os.write(1, (json.dumps(dict(os.environ)) + '\\n').encode())"


class Machine:
    """A folder with a script, a home, and what a run of the command on one machine tells."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        (folder / "train.py").write_text(SHOW)

    def run(self, *flags: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HOME": str(self.home)}
        command = [sys.executable, "-m", "deepspeed.launcher.runner", *flags, "train.py"]
        environment["INHERITED"] = "yes"
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def told(self, *flags: str) -> list[dict[str, str]]:
        """The environment of each rank."""
        done = self.run(*flags)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_files_and_exports_act_on_one_machine(machine: Machine) -> None:
    """The home's file, the folder's, which wins, and `--export`, which wins over both; values are taken as they are."""
    (machine.home / ".deepspeed_env").write_text("HOMES=1\nBOTH=home\nALL='home'\n")
    (machine.folder / ".deepspeed_env").write_text('# a line of words\n\nBOTH="$(touch pwned) folder"\nALL=folder\n')
    own = "--export", "ALL=$(touch pwned) %h", "--export", "INHERITED", "--export", "INHERITED@localhost=here"
    ranks = machine.told("--num_gpus", "2", *own)
    assert len(ranks) == 2
    for rank in ranks:
        found = {name: rank[name] for name in ("HOMES", "BOTH", "ALL", "INHERITED")}
        assert found == {
            "HOMES": "1", "BOTH": "$(touch pwned) folder", "ALL": "$(touch pwned) %h", "INHERITED": "here",
        }  # fmt: skip
    assert not list(machine.folder.rglob("pwned"))


def test_a_line_for_a_host_acts_there_alone(machine: Machine) -> None:
    """One file of the home serves all jobs: those on a cluster, and one on this machine alone."""
    name = socket.gethostname()
    (machine.home / ".deepspeed_env").write_text(f"ODD@gpu01=1\nODD@{name}=2\nOTHER@gpu02=3\nOTHER=4\n")
    done = machine.run("--num_gpus", "1")
    assert "lines for gpu01, gpu02 are ignored: these hosts are not in this job" in done.stderr
    rank = json.loads(done.stdout)
    assert (rank["ODD"], rank["OTHER"]) == ("2", "4")


def test_an_export_for_a_host_that_is_not_there_is_refused(machine: Machine) -> None:
    done = machine.run("--num_gpus", "1", "--export", "ODD@gpu01=secret-value")
    assert done.returncode == 2 and "gpu01" in done.stderr and "secret-value" not in done.stderr
    done = machine.run("--num_gpus", "1", "--export", "NOT_SET_AT_ALL")
    assert done.returncode == 2 and "NOT_SET_AT_ALL is not set here" in done.stderr
