"""Upstream's distribution has the same name: pip puts one in place of the other, and back, and leaves nothing behind.

Upstream's own source distribution is installed, with none of its operators built, into environments of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import deepspeed
from tests.package.environments import Environment, made, over_these_packages, trained

pytestmark = pytest.mark.slow

UPSTREAM = "0.19.8"


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Upstream's wheel, built once from its source distribution, without operators."""
    environment = made(tmp_path_factory.mktemp("builder"))
    environment.pip("install", "-q", "setuptools", "wheel")
    over_these_packages(environment)  # its build asks for torch
    out = tmp_path_factory.mktemp("upstream")
    options = ["--no-deps", "--no-build-isolation", "--no-binary", "deepspeed", "-w", out]
    environment.pip("wheel", "-q", *options, f"deepspeed=={UPSTREAM}", DS_BUILD_OPS="0")
    (wheel,) = out.glob("deepspeed-*.whl")
    return wheel


def files(environment: Environment) -> set[str]:
    """All files of the environment but what Python compiles on its own."""
    found = (
        path.relative_to(environment.folder).as_posix() for path in environment.folder.rglob("*") if path.is_file()
    )
    return {path for path in found if "__pycache__" not in path}


@pytest.mark.parametrize("kind", ["pure", "native"])
def test_over_upstream_and_back_leaves_nothing(
    kind: str, built: dict[str, Path], upstream: Path, tmp_path: Path
) -> None:
    environment = made(tmp_path / "environment")
    bare = files(environment)
    environment.pip("install", "-q", "--no-deps", built[kind])
    ours = files(environment)
    environment.pip("install", "-q", "--no-deps", upstream)
    theirs = files(environment)
    environment.pip("install", "-q", "--no-deps", built[kind])
    assert files(environment) == ours
    over_these_packages(environment)
    trained(environment)
    (environment.packages / "rest.pth").unlink()
    environment.pip("install", "-q", "--no-deps", upstream)
    assert files(environment) == theirs
    assert not list((environment.packages / "deepspeed" / "foundation").rglob("*"))  # compiled files went too
    environment.pip("uninstall", "-q", "-y", "deepspeed")
    assert files(environment) == bare


def test_one_copied_over_the_other_is_named(built: dict[str, Path], upstream: Path, tmp_path: Path) -> None:
    """`--ignore-installed` and `--target` remove nothing: modules of both then lie in one folder."""
    environment = made(tmp_path / "environment")
    environment.pip("install", "-q", "--no-deps", upstream)
    environment.pip("install", "-q", "--no-deps", "--ignore-installed", built["pure"])
    said = environment.run("python", "-c", "import deepspeed").stderr
    assert "SecondCopyWarning" in said and f"deepspeed-{UPSTREAM}" in said


def test_upstream_in_another_folder_of_the_path_is_named(
    built: dict[str, Path], upstream: Path, tmp_path: Path
) -> None:
    environment = made(tmp_path / "environment")
    environment.pip("install", "-q", "--no-deps", built["pure"])
    environment.pip("install", "-q", "--no-deps", "--target", tmp_path / "beside", upstream)
    over_these_packages(environment)
    (environment.packages / "zz_beside.pth").write_text(f"{tmp_path / 'beside'}\n")
    said = environment.run("python", "-c", "import deepspeed").stderr
    assert said.count("SecondCopyWarning") == 1 and str(tmp_path / "beside") in said
    assert f"deepspeed-{UPSTREAM}" in said and deepspeed.__version__ in said


def test_pip_keeps_ours_where_upstreams_newest_is_asked_for(built: dict[str, Path], tmp_path: Path) -> None:
    """`--upgrade` finds nothing later; what a pin does is in docs/installing.md."""
    environment = made(tmp_path / "environment")
    environment.pip("install", "-q", "--no-deps", built["pure"])
    environment.pip("install", "-q", "--no-deps", "--upgrade", "deepspeed>=0.18.6")
    assert environment.python("import importlib.metadata as m; print(m.version('deepspeed'))") == deepspeed.__version__
    pin = ["install", "--dry-run", "--no-deps", "--no-build-isolation"]
    kept = environment.folder / "keep.txt"
    kept.write_text(f"deepspeed=={deepspeed.__version__}\n")
    refused = environment.run("python", "-m", "pip", *pin, "-c", kept, f"deepspeed=={UPSTREAM}", passes=False)
    assert refused.returncode and "conflict" in (refused.stdout + refused.stderr).lower()
