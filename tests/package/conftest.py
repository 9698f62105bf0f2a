"""The distributions, built once for all tests of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.package.environments import CONSTRAINTS, REPOSITORY, Environment, made


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What `make wheels` makes to build in: no torch, nothing of this project."""
    environment = made(tmp_path_factory.mktemp("release"))
    environment.pip("install", "-q", "-c", CONSTRAINTS, "setuptools", "auditwheel", "twine")
    return environment


@pytest.fixture(scope="session")
def built(release: Environment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The files that `make wheels` makes: `sdist`, `pure`, `native`."""
    out = tmp_path_factory.mktemp("built")
    release.run("python", "-m", "tools.wheels", "--out", out, cwd=REPOSITORY)
    return by_kind(out)


def by_kind(folder: Path) -> dict[str, Path]:
    def kind(name: str) -> str:
        return "sdist" if name.endswith(".gz") else "pure" if name.endswith("-any.whl") else "native"

    return {kind(file.name): file for file in sorted(folder.iterdir())}
