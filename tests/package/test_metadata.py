"""What the metadata and the pages of the package say, held against the files: fast, nothing is built."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import deepspeed
from tests.clients.versions import OLDEST

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLING = (ROOT / "docs/installing.md").read_text()
# The least that Accelerate, Transformers, TRL and Lightning ask for anywhere, and upstream's newest.
LEAST = ("0.9.3", "0.14.5", "0.16.4", "0.18.2", "0.18.6", "0.19.8")


def test_the_version_orders_and_says_whose_it_is() -> None:
    version = Version(deepspeed.__version__)
    assert all(version > Version(least) for least in LEAST)
    assert version.local == "independent" and not version.is_prerelease
    assert (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__) == version.release
    assert f"## {deepspeed.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"`{deepspeed.__version__}`" in INSTALLING


@pytest.mark.parametrize("client", ["transformers", "accelerate", "lightning", "trl", "peft"])
def test_the_page_has_what_the_installed_clients_ask_for(client: str) -> None:
    """Each client's pins say whether pip keeps this version; the row of the client says the same."""
    lines = [line for line in metadata.requires(client) or [] if re.match(r"deepspeed\b", line)]
    keeps = all(Requirement(line).specifier.contains(deepspeed.__version__) for line in lines)
    (row,) = [line for line in INSTALLING.splitlines() if line.lower().startswith((f"| {client}", f"| {client},"))]
    assert ("replaces" not in row) == keeps
    for specifier in {str(Requirement(line).specifier) for line in lines}:
        assert all(part in row for part in specifier.split(","))


def test_the_page_of_licences_names_every_dependency() -> None:
    page = (ROOT / "docs/licences.md").read_text()
    extras = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extras[extra])]:
        name = Requirement(line).name.lower().replace("_", "-")
        assert name == "deepspeed" or f"| {name} |" in page, f"{name} is missing: `make licences` writes the page"
    assert all(f"## Extra `{extra}`" in page for extra in extras)


def test_extras_state_the_range_that_was_tested() -> None:
    """Each bound is what the constraints install and what the page of clients says; the oldest is what `versions.py`
    installs."""
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    page = (ROOT / "docs/clients.md").read_text()
    extras = PROJECT["optional-dependencies"]
    bounds = {}
    for requirement in map(Requirement, [*extras["clients"], *extras["serve"]]):
        parts = {part.operator: part.version for part in requirement.specifier}
        if "<=" in parts:
            bounds[requirement.name] = parts["<="]
            assert pins[requirement.name] == parts["<="], requirement
            assert parts.get(">=", OLDEST.get(requirement.name)) == OLDEST.get(requirement.name)
    assert set(bounds) == {*OLDEST, "fastapi"}
    assert all(f"| {bounds[name]} tested | {oldest} tested" in page for name, oldest in OLDEST.items())


def test_type_checkers_may_read_the_package() -> None:
    assert (ROOT / "deepspeed/py.typed").exists()
    assert "Typing :: Typed" in PROJECT["classifiers"]
