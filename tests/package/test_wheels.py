"""The distributions: the same bytes twice, whole, installable, and they train."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import deepspeed
from tests.package.conftest import by_kind
from tests.package.environments import CONSTRAINTS, REPOSITORY, Environment, made, over_these_packages, trained

pytestmark = pytest.mark.slow

COMPILER = shutil.which(os.environ.get("CXX") or "g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
KINDS = ("sdist", "pure", "native")


def digests(files: dict[str, Path]) -> dict[str, str]:
    return {kind: hashlib.sha256(file.read_bytes()).hexdigest() for kind, file in files.items()}


@needs_compiler
def test_two_builds_are_equal(release: Environment, built: dict[str, Path], tmp_path: Path) -> None:
    """The second in another folder, time zone, language, with another mask of modes, and out of the first's sources."""
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(tmp_path / "another folder", filter="data")
    (tree,) = (tmp_path / "another folder").iterdir()
    mask = os.umask(0o077)
    try:
        release.run(
            "python", "-m", "tools.wheels", "--out", tmp_path / "out", cwd=tree, TZ="Asia/Tokyo", LANG="tr_TR.UTF-8"
        )
    finally:
        os.umask(mask)
    assert digests(by_kind(tmp_path / "out")) == digests(built)


@needs_compiler
def test_a_changed_source_is_seen(release: Environment, built: dict[str, Path], tmp_path: Path) -> None:
    """The comparison above can fail: of two trees that differ in one byte the wheels differ."""
    with tarfile.open(built["sdist"]) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    with (tree / "deepspeed/errors.py").open("a") as source:
        source.write("\n")
    release.run("python", "-m", "tools.wheels", "--out", tmp_path / "out", cwd=tree)
    found = digests(by_kind(tmp_path / "out"))
    assert all(found[kind] != digest for kind, digest in digests(built).items())


@needs_compiler
def test_the_wheels_say_what_they_are(release: Environment, built: dict[str, Path]) -> None:
    version = deepspeed.__version__
    assert built["pure"].name == f"deepspeed-{version}-py3-none-any.whl"
    assert built["native"].name.startswith(f"deepspeed-{version}-py3-none-manylinux_2_28_")
    shown = release.run("python", "-m", "auditwheel", "show", built["native"]).stdout
    assert "manylinux" in shown and "libgomp" not in shown and "libtorch" not in shown
    release.run("python", "-m", "twine", "check", "--strict", *built.values())
    for kind in ("pure", "native"):
        assert built[kind].stat().st_size <= 2_000_000
        with zipfile.ZipFile(built[kind]) as archive:
            names = archive.namelist()
            assert "deepspeed/py.typed" in names
            assert [name for name in names if name.split("/")[0] not in ("deepspeed", names[-1].split("/")[0])] == []
            entries = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
        assert "ds_report = deepspeed.env_report:main" in entries
    with tarfile.open(built["sdist"]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
    wanted = [path for path in listed if path.startswith(("deepspeed/", "tools/", "tests/", "docs/", "examples/"))]
    assert sorted(set(wanted) - inside) == []


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_it_installs_and_trains_on_two_ranks(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    environment = made(tmp_path / "environment")
    environment.pip("install", "-q", "--no-deps", built[kind])
    over_these_packages(environment)
    losses = trained(environment, cwd=tmp_path)
    assert losses[-1] < losses[0]
    report = json.loads(environment.run("ds_report", "--json").stdout)
    assert str(environment.packages) in report["software"]["deepspeed"]
    state = report["features"]["native library"]
    assert state.startswith("not in this wheel") if kind == "pure" else " kernels on " in state
    assert environment.python("import deepspeed, importlib.metadata as m; print(m.version('deepspeed'))") == (
        deepspeed.__version__
    )
    files = environment.python("import importlib.metadata as m; print(*m.files('deepspeed'))").split()
    assert "deepspeed/py.typed" in files
    environment.pip("uninstall", "-y", "deepspeed")
    assert not (environment.packages / "deepspeed").exists() and not (environment.bin / "ds_report").exists()


def test_both_wheels_give_the_same_losses(built: dict[str, Path], tmp_path: Path) -> None:
    losses = []
    for kind in ("pure", "native"):
        environment = made(tmp_path / kind)
        environment.pip("install", "-q", "--no-deps", built[kind])
        losses.append(trained(over_these_packages(environment)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@needs_compiler
def test_pip_takes_the_wheel_with_the_library_of_both(built: dict[str, Path], tmp_path: Path) -> None:
    environment = made(tmp_path / "environment")
    environment.pip("install", "-q", "--no-deps", "--no-index", "--find-links", built["pure"].parent, "deepspeed")
    assert (environment.packages / "deepspeed/native/library.so").exists()


def test_nothing_is_there_before(built: dict[str, Path], tmp_path: Path) -> None:
    """An environment that shares nothing: pip brings torch and all else, nothing more is named."""
    environment = made(tmp_path / "environment")
    environment.pip("install", "-q", "-c", CONSTRAINTS, "torch")
    environment.pip("install", "-q", "-c", CONSTRAINTS, built["native"])
    losses = trained(environment, cwd=tmp_path)
    assert losses[-1] < losses[0]
    assert environment.pip("check").stdout.strip() == "No broken requirements found."
    brought = environment.python(
        "import importlib.metadata as m; print(*sorted({d.name.lower() for d in m.distributions()}))"
    )
    assert not {"transformers", "accelerate", "fastapi", "matplotlib", "pytest"} & set(brought.split())
    _with_an_extra(environment, built)


def _with_an_extra(environment: Environment, built: dict[str, Path]) -> None:
    """`serve` beside it: what was refused for want of its packages is there."""
    refused = environment.run("ds_serve", "--help", passes=False)
    environment.pip("install", "-q", "-c", CONSTRAINTS, f"deepspeed[serve,plot] @ file://{built['native']}")
    assert environment.run("ds_serve", "--help").stdout
    assert environment.python("import fastapi, uvicorn, matplotlib; print('there')") == "there"
    assert environment.pip("check").stdout.strip() == "No broken requirements found."
    assert "Traceback" not in refused.stderr
