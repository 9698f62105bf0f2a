"""The rooms of old import paths hold names only: nothing is made there."""

from __future__ import annotations

from tests.architecture.sources import definitions, trees

OLD_ROOMS = ("runtime/", "utils/", "module_inject/", "autotuning/")


def test_old_addresses_define_nothing() -> None:
    old = {path: tree for path, tree in trees().items() if path.startswith(OLD_ROOMS)}
    assert [f"{path}:{name}" for path, tree in old.items() for name, _ in definitions(tree)] == []
