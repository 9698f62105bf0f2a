"""A second installation of the name is named at import, once, by its folder; looking costs next to nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deepspeed
from deepspeed.foundation.duplicate_install import other_copies, warn_of_others

PACKAGE = deepspeed.__path__[0]
REPOSITORY = str(Path(PACKAGE).parent)
MOST_SECONDS = 0.002


def planted(folder: Path, *beside: str) -> Path:
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("")
    for name in beside:
        (folder / name).mkdir()
    return folder


def imported(*path: Path | str, **variables: str) -> str:
    """What Python says on stderr when the package is imported with more folders on its path."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (REPOSITORY, *path)))} | variables
    done = subprocess.run(
        [sys.executable, "-c", "import deepspeed"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


def test_importing_names_the_other_once_and_typed(tmp_path: Path) -> None:
    other = planted(tmp_path / "with a space", "deepspeed-0.19.8.dist-info")
    said = imported(other, other)
    assert said.count("SecondCopyWarning") == 1
    assert f"{deepspeed.__version__} is imported from {PACKAGE}" in said
    assert f"{other / 'deepspeed'} (deepspeed-0.19.8.dist-info)" in said
    assert imported(other, LOCAL_RANK="1") == ""
    assert imported(other, PYTHONWARNINGS="ignore::UserWarning") == ""


def test_one_folder_by_several_ways_is_one_copy(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(REPOSITORY)
    path = [REPOSITORY, f"{REPOSITORY}/", str(tmp_path / "link"), str(tmp_path / "missing"), "/dev/null"]
    assert other_copies(PACKAGE, path) == {}


def test_what_is_no_package_is_no_copy(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()  # a user's folder of configurations
    (tmp_path / "deepspeed" / "zero3.json").write_text("{}")
    assert other_copies(PACKAGE, [str(tmp_path)]) == {}


def test_one_without_metadata_is_named_so(tmp_path: Path) -> None:
    other = planted(tmp_path)
    assert other_copies(PACKAGE, [str(other)]) == {str(other / "deepspeed"): "not installed by pip"}


def test_the_working_folder_counts_where_python_searches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(planted(tmp_path))
    assert other_copies(PACKAGE, [""]) == {str(tmp_path / "deepspeed"): "not installed by pip"}


def test_files_of_two_in_one_folder_are_named(tmp_path: Path) -> None:
    planted(tmp_path, "deepspeed-0.19.8.dist-info", "deepspeed-1.0.0.dist-info", "deepspeed_kernels-1.dist-info")
    (found,) = other_copies(str(tmp_path / "deepspeed"), [str(tmp_path)]).values()
    assert found == "one folder with the files of deepspeed-0.19.8.dist-info and deepspeed-1.0.0.dist-info"


def test_the_warning_is_an_error_for_who_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(planted(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(deepspeed.errors.SecondCopyWarning, match="Keep one: .* -m pip uninstall deepspeed"):
        warn_of_others(PACKAGE, deepspeed.__version__)


def test_a_source_tree_in_the_working_folder_is_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(planted(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.chdir(REPOSITORY)
    with pytest.warns(deepspeed.errors.SecondCopyWarning, match="the source tree in the working folder"):
        warn_of_others(PACKAGE, deepspeed.__version__)


def test_looking_is_cheap(tmp_path: Path) -> None:
    """Thirty folders on the path, a thousand distributions beside the package."""
    package = str(planted(tmp_path / "site") / "deepspeed")
    for number in range(1000):
        (tmp_path / "site" / f"package{number}-1.0.dist-info").mkdir()
    path = [str(tmp_path / str(number)) for number in range(30)]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        assert other_copies(package, path) == {}
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < MOST_SECONDS
