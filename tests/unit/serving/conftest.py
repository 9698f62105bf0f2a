"""One server for the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.serving.server import Server, make_folder, make_odd_folder, serving


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_odd_folder(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    arguments = ("--served-model-name", "tiny", "--max-sequences", "8", "--max-waiting", "24", "--grace", "4")
    with serving(folder, log, *arguments) as made:
        yield made
