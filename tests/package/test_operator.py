"""Where an operator installs: read-only, for users who are not root, without HOME or compiler, under odd paths."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import deepspeed
from tests.package.environments import Environment, everyones_interpreter, made, over_these_packages, trained

pytestmark = pytest.mark.slow

ROOT_ONLY = pytest.mark.skipif(
    os.getuid() != 0 or everyones_interpreter() is None or not shutil.which("setpriv"),
    reason="only root may become another user, and that one must find a Python",
)


def locked(environment: Environment) -> Environment:
    """Nobody may write anywhere in the environment."""
    for path in [environment.folder, *environment.folder.rglob("*")]:
        if not path.is_symlink():
            path.chmod(
                path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH) | stat.S_IRGRP | stat.S_IROTH
            )
    return environment


def listed(environment: Environment) -> set[Path]:
    return set(environment.folder.rglob("*"))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder with a space in its name that every user may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="operator-") as name:
        folder = Path(name, "an operator's folder")
        folder.mkdir()
        Path(name).chmod(0o755)
        yield folder


@ROOT_ONLY
@pytest.mark.parametrize("kind", ["pure", "native"])
def test_another_user_trains_from_what_nobody_can_write(kind: str, built: dict[str, Path], open_folder: Path) -> None:
    """As `nobody`, without HOME, with no compiler on PATH, under a path with a space, in a folder of no rights."""
    environment = made(open_folder / "site", str(everyones_interpreter()))
    environment.pip("install", "-q", "--no-deps", "--no-compile", built[kind])
    over_these_packages(environment)
    script = shutil.copy(Path(__file__).with_name("smoke.py"), open_folder / "a script.py")
    Path(script).chmod(0o644)
    before = listed(locked(environment))
    working = open_folder / "runs"
    working.mkdir()
    working.chmod(0o555)
    nobody = pwd.getpwnam("nobody")
    tools = open_folder / "tools"  # what a bare system has: no cc, c++, gcc, g++, nvcc
    tools.mkdir()
    for name in ("env", "sh", "uname", "setpriv"):
        (tools / name).symlink_to(str(shutil.which(name)))
    command = ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
    alone = ["env", "-i", f"PATH={environment.bin}:{tools}", "OMP_NUM_THREADS=1"]
    launcher = [str(environment.bin / "python"), str(environment.bin / "deepspeed"), "--num_gpus", "2", str(script)]
    done = _as(environment, [*command, *alone, *launcher], working)
    assert "losses" in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    report = _as(environment, [*command, *alone, str(environment.bin / "ds_report")], working)
    assert "none (none is needed" in report.stdout
    assert listed(environment) == before and list(working.iterdir()) == []


def _as(environment: Environment, command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return environment.run("python", "-c", "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])", *command, cwd=cwd)


def test_it_is_imported_from_a_wheel_that_nobody_unpacked(built: dict[str, Path], tmp_path: Path) -> None:
    environment = over_these_packages(made(tmp_path / "environment"))
    code = "import deepspeed; print(deepspeed.__version__)"
    assert environment.python(code, PYTHONPATH=str(built["native"])) == deepspeed.__version__


def test_training_under_a_path_with_spaces(built: dict[str, Path], tmp_path: Path) -> None:
    environment = made(tmp_path / "a b" / "environment")
    environment.pip("install", "-q", "--no-deps", built["native"])
    working = tmp_path / "c d"
    working.mkdir()
    assert trained(over_these_packages(environment), cwd=working)
