"""Hostfile, --include and --exclude."""

from __future__ import annotations

import pytest

from deepspeed.errors import LaunchError
from deepspeed.launcher.hosts import read_hostfile, select

POOL = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}


def _read(tmp_path, text):
    path = tmp_path / "hostfile"
    path.write_text(text)
    return read_hostfile(path)


def test_hosts_keep_the_order_of_the_file(tmp_path):
    text = "# cluster\nb slots=2\n\na   slots=4  # the big one\n"
    assert list(_read(tmp_path, text).items()) == [("b", [0, 1]), ("a", [0, 1, 2, 3])]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=two\n", r"hostfile:1: 'a slots=two' is not of the form"),
        ("a slots=2\nb\n", r"hostfile:2: 'b' is not of the form"),
        ("a slots=2\na slots=4\n", r"hostfile:2: host 'a' is named twice"),
        ("# nothing\n", "names no host"),
    ],
)
def test_a_bad_hostfile_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(LaunchError, match=message):
        _read(tmp_path, text)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", POOL),
        ("a", "", {"a": [0, 1, 2, 3]}),
        ("b@a:2,0", "", {"a": [0, 2], "b": [0, 1]}),
        ("a:1@a:3", "", {"a": [1, 3]}),
        ("", "a", {"b": [0, 1], "c": [0]}),
        ("", "a:0,1@c", {"a": [2, 3], "b": [0, 1]}),
        ("", "b:0,1", {"a": [0, 1, 2, 3], "c": [0]}),
    ],
)
def test_include_and_exclude(include, exclude, expected):
    assert select(POOL, include, exclude) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "exclude each other"),
        ("d", "", "no host 'd'; there is a:0,1,2,3, b:0,1, c:0"),
        ("", "b:2", "'b' has no slots '2'"),
        ("a:x", "", "'a' has no slots 'x'"),
        ("a:", "", "'a' has no slots ''"),
        ("", "a@b@c", "leave no slot"),
    ],
)
def test_a_bad_selection_is_refused_with_what_there_is(include, exclude, message):
    with pytest.raises(LaunchError, match=message):
        select(POOL, include, exclude)
