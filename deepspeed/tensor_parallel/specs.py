"""What the user's JSON says of single matrices: which stay whole, and by which dim others must be cut.

Layouts are found, never told: `row` and `column` are claims that the plan is compared with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed.errors import TensorParallelError
from deepspeed.foundation.log import say
from deepspeed.tensor_parallel.regions import Region

SKIP = "skip"


@dataclass(frozen=True)
class Spec:
    """One entry.

    Args:
        patterns: regular expressions, searched for in names of parameters.
        how: "row", "column" or "skip".
    """

    patterns: tuple[re.Pattern[str], ...]
    how: str


class Specs:
    """All entries; the first that fits a name counts.

    Args:
        entries: in the order of the JSON.
        others: whether matrices that no entry names are cut too.
    """

    def __init__(self, entries: Sequence[Spec] = (), others: bool = True) -> None:
        self._entries, self._others = tuple(entries), others

    def _of(self, name: str) -> str:
        found = (one.how for one in self._entries if any(pattern.search(name) for pattern in one.patterns))
        return next(found, "")

    def reason_to_skip(self, region: Region) -> str:
        """Why a region stays whole; empty: it does not."""
        said = {self._of(name) for name in [*region.columns, *region.rows]}
        if SKIP in said:
            return "partition_config says so"
        return "" if self._others or said != {""} else "partition_config names others, and use_default_specs is off"

    def check(self, cut: Mapping[str, str], whole: Mapping[str, str], matrices: Sequence[str]) -> None:
        """Compare the entries with a plan.

        Args:
            cut: "row" or "column", by name of a matrix.
            whole: why others stay whole.
            matrices: all of the model.

        Raises:
            TensorParallelError: a matrix cannot be cut as an entry wants it.
        """
        for name in matrices:
            wanted, found = self._of(name), cut.get(name, "")
            if wanted in ("", SKIP, found):
                continue
            why = f"it is cut by {found}: {_OTHER[found]}" if found else whole.get(name, "no block has a pair for it")
            raise TensorParallelError(f"partition_config wants '{name}' cut by {wanted}: {why}")
        for pattern in (pattern for one in self._entries for pattern in one.patterns):
            if not any(pattern.search(name) for name in matrices):
                say(f"partition_config: the pattern '{pattern.pattern}' is in no matrix's name")


_OTHER = {
    "row": "its inputs are channels that other matrices of its block make",
    "column": "its outputs are channels that only other matrices of its block read",
}
