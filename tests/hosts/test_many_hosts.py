"""More hosts than a shell's limit of open files allows, and one command on every host."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.hosts.runs import need_hosts

need_hosts()

HOSTS = 40
FEW_FILES = 48
"""Fewer than the connections of so many hosts."""


@pytest.fixture
def many(fragile):
    """Names of one host, in a hostfile that names them by a range."""
    cluster = fragile.cluster
    lines = "".join(f"{cluster.address('h1')} n{number}\n" for number in range(HOSTS))
    seen = cluster.sees("h0", "/etc/hosts")
    seen.write_text(Path("/etc/netns", cluster.space("h0"), "hosts").read_text() + lines)
    (fragile.folder / "hostfile").write_text(f"n[0-{HOSTS - 1}] slots=1\n")
    return fragile


@pytest.mark.slow
def test_more_hosts_than_open_files(many):
    script = "import os; os.write(1, f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\".encode())"
    launch = many.command(script)
    started = many.run(["prlimit", f"--nofile={FEW_FILES}:4096", *launch])
    out, err = started.communicate(timeout=240)
    assert started.returncode == 0, err
    assert sorted(re.findall(r"rank (\d+) of", out), key=int) == [str(rank) for rank in range(HOSTS)]
    refused = many.run(["prlimit", f"--nofile={FEW_FILES}:{FEW_FILES}", *launch])
    _, err = refused.communicate(timeout=60)
    assert refused.returncode == 2 and f"and {FEW_FILES} are allowed: raise the hard limit" in err, err


ODD = ['it\'s "q"', "$(touch pwned) `touch pwned`", "a\nb", "%h %n", "-b", "", "; touch pwned #", "\\ \t*"]


def test_ds_ssh_runs_the_words_as_they_are(runs):
    tool = [sys.executable, "-m", "deepspeed.launcher.ds_ssh", "-f", "hostfile"]
    show = "import socket, sys; print(sys.argv[1:]); sys.exit(3 if socket.gethostname() == 'h1' else 0)"
    done = runs.run([*tool, sys.executable, "-c", show, *ODD])
    out, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (3, "")
    assert sorted(out.splitlines()) == [f"h0: {ODD}", f"h1: {ODD}"]
    assert not (runs.folder / "pwned").exists()


@pytest.mark.slow
def test_ds_ssh_names_a_host_that_does_not_answer(runs):
    (runs.folder / "hostfile").write_text("h0 slots=2\nnowhere slots=2\n")
    done = runs.run([sys.executable, "-m", "deepspeed.launcher.ds_ssh", "-f", "hostfile", "hostname"])
    out, err = done.communicate(timeout=60)
    assert done.returncode == 255 and out == "h0: h0\n" and err.startswith("nowhere: ssh: ")
