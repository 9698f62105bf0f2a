"""Other Pythons and torches than this one: what of the promise can be seen where no CPU build of torch is to be had."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.package.environments import Environment, made

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OTHERS = tuple(version for version in PYTHONS if version != f"{sys.version_info.major}.{sys.version_info.minor}")
TORCHES = ("2.11.0", "2.14.1")
pytestmark = pytest.mark.slow

# All but torch, which has no CPU build for them; the launcher and the tools of configurations need none.
_WITHOUT_TORCH = """
import compileall, importlib.metadata, pathlib, sys
import deepspeed, deepspeed.launcher.runner, deepspeed.config.__main__, deepspeed.errors
from deepspeed.config import DeepSpeedConfig
assert DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, world=4).train_batch_size == 8
assert importlib.metadata.version("deepspeed") == deepspeed.__version__
assert "torch" not in sys.modules
folder = pathlib.Path(deepspeed.__path__[0])
print("compiled", compileall.compile_dir(folder, quiet=1, force=True, workers=1))
"""


def interpreter(version: str) -> str | None:
    """A Python of that version, on PATH or among those of pyenv."""
    beside = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    for found in [*map(str, beside), shutil.which(f"python{version}")]:
        if found and subprocess.run([found, "-c", "import venv, ensurepip"], capture_output=True).returncode == 0:
            return found
    return None


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("kind", ["pure", "native"])
def test_another_python_installs_and_runs_what_needs_no_torch(
    kind: str, version: str, built: dict[str, Path], tmp_path: Path
) -> None:
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no Python {version} here")
    environment = made(tmp_path / "environment", found)
    with zipfile.ZipFile(built[kind]) as archive:
        about = Parser().parsestr(archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode())
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    environment.pip("install", "-q", *(line for line in needed if not line.startswith("torch")))
    environment.pip("install", "-q", "--no-deps", built[kind])
    assert environment.python(_WITHOUT_TORCH) == "compiled True"
    assert "usage" in environment.run("deepspeed", "--help").stdout.lower()
    if kind == "native":
        _library_opens(environment)
    complaints = environment.run("python", "-m", "pip", "check", passes=False).stdout.strip().splitlines()
    assert complaints == [f"deepspeed {about['Version']} requires torch, which is not installed."]


def _library_opens(environment: Environment) -> None:
    """The library is of no Python's version; it finds its OpenMP where torch would have loaded one."""
    opened = environment.python(
        "import ctypes, pathlib, deepspeed\n"
        "ctypes.CDLL('libgomp.so.1', mode=ctypes.RTLD_GLOBAL)\n"
        "path = pathlib.Path(deepspeed.__path__[0], 'native', 'library.so')\n"
        "print(ctypes.CDLL(str(path)).ds_fingerprint() != 0)"
    )
    assert opened == "True"


@pytest.mark.parametrize("torch", TORCHES)
@pytest.mark.parametrize("version", PYTHONS)
def test_the_requirements_have_a_solution(
    version: str, torch: str, built: dict[str, Path], solver: Environment, tmp_path: Path
) -> None:
    """Metadata only: every requirement, torch's own CUDA build and its packages too, at versions that go together."""
    wanted = tmp_path / "wanted.in"
    wanted.write_text(f"deepspeed[serve,compression,plot] @ file://{built['native']}\ntorch=={torch}\n")
    options = ["--python-version", version, "--python-platform", "x86_64-manylinux_2_28"]
    found = solver.run("uv", "pip", "compile", "-q", *options, wanted).stdout
    assert f"torch=={torch}\n" in found and "pydantic==2" in found


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = made(tmp_path_factory.mktemp("solver"))
    environment.pip("install", "-q", "uv")
    return environment


def test_the_metadata_promise_these_pythons(built: dict[str, Path]) -> None:
    for kind in ("pure", "native"):
        with zipfile.ZipFile(built[kind]) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
            about = Parser().parsestr(archive.read(name).decode())
        promised = SpecifierSet(str(about["Requires-Python"]))
        assert all(version in promised for version in PYTHONS) and "3.9" not in promised
        named = [line.rpartition(":: ")[2] for line in about.get_all("Classifier", []) if "Python :: 3." in line]
        assert tuple(named) == PYTHONS
