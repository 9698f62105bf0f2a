"""Environments that the distributions are installed into, and what is run in them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
CONSTRAINTS = REPOSITORY / "constraints.txt"
TRAIN = Path(__file__).with_name("smoke.py")
PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))
# What would let an installation see this checkout, or be told from outside how to run.
_NOT_HANDED_ON = ("PYTHONPATH", "DS_NATIVE", "DS_BUILD_NATIVE", "SOURCE_DATE_EPOCH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(
        self, *command: object, cwd: Path | None = None, passes: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, away from the checkout, so that what is imported is what is installed."""
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
        name, *arguments = map(str, command)
        done = subprocess.run(
            [str(self.bin / name), *arguments],
            cwd=cwd or self.folder,
            env=kept | {"PATH": f"{self.bin}:{kept['PATH']}"} | variables,
            capture_output=True,
            text=True,
            timeout=500 * PATIENCE,
        )
        if passes and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    def pip(self, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run("python", "-m", "pip", *arguments, **variables)

    def python(self, code: str, **variables: str) -> str:
        return self.run("python", "-c", code, **variables).stdout.strip()


def made(folder: Path, interpreter: str = sys.executable) -> Environment:
    """An environment with pip and nothing else."""
    subprocess.run([interpreter, "-m", "venv", folder], check=True, capture_output=True, timeout=120 * PATIENCE)
    return Environment(folder)


def everyones_interpreter() -> str | None:
    """A Python of this one's version that users other than this one may run."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for found in filter(None, [os.path.realpath(sys.executable), shutil.which(name, path=os.defpath)]):
        if all(folder.stat().st_mode & 0o005 == 0o005 for folder in Path(os.path.realpath(found)).parents):
            return found
    return None


def over_these_packages(environment: Environment) -> Environment:
    """Let an environment see torch and the rest where this interpreter has them, as a plain folder of the path.

    After pip has done its work: pip would take what is seen there for installed.
    """
    (environment.packages / "rest.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return environment


def trained(environment: Environment, cwd: Path | None = None, **variables: str) -> list[float]:
    """The losses of a few steps on two ranks, started by the launcher that the environment has."""
    done = environment.run("deepspeed", "--num_gpus", "2", TRAIN, cwd=cwd, **variables)
    lines = [line.partition("losses ")[2] for line in done.stdout.splitlines() if "losses " in line]
    assert len(lines) == 1, done.stdout + done.stderr
    return [float(part) for part in lines[0].split()]
