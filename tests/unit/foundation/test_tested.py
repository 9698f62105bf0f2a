"""A package that is newer than the newest that was tested is named in one line, and nothing is asked of the network."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

import deepspeed
from deepspeed.foundation import log, tested_versions

REQUIRED = [
    "torch>=2.11", 'flights>=1.0; extra == "clients"', 'some-client<=2.10.1,>=2.0; extra == "clients"',
    'h5py<=3; python_version >= "3.11" and extra == "keras"',
]  # fmt: skip


@pytest.fixture(autouse=True)
def stated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    monkeypatch.setattr(log, "_said", set())
    tested_versions.newest_tested.cache_clear()
    yield
    tested_versions.newest_tested.cache_clear()


def test_bounds_are_read_from_the_metadata() -> None:
    assert tested_versions.newest_tested() == {"some_client": "2.10.1", "h5py": "3"}


@pytest.mark.parametrize(
    ("version", "newer"),
    [("2.10.2", True), ("2.11.0.dev0", True), ("10.0", True), ("2.10.1", False), ("2.9.9", False), ("unknown", False)],
)
def test_only_a_newer_release_is_named(
    version: str, newer: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "some_client", SimpleNamespace(__version__=version))  # type: ignore[misc]
    tested_versions.say_untested()
    tested_versions.say_untested()
    lines = [line for line in capfd.readouterr().err.splitlines() if "some_client" in line]
    assert len(lines) == newer and all(f"{version} is newer" in line and "2.10.1" in line for line in lines)


def test_it_is_said_where_engines_are_made(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "some_client", SimpleNamespace(__version__="3.0"))  # type: ignore[misc]
    deepspeed.init_inference(torch.nn.Linear(2, 2), dtype=torch.float32)
    assert "some_client 3.0 is newer than the newest release that was tested, 2.10.1" in capfd.readouterr().err


def test_a_tree_without_metadata_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert tested_versions.newest_tested() == {}
