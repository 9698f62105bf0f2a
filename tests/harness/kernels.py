"""Which forms of the native loops this processor can run."""

from __future__ import annotations

from collections.abc import Sequence

from deepspeed.native import INSTRUCTION_SETS, library

LOOPS = INSTRUCTION_SETS[:3]  # what follows them is for matrix products alone


def forms(among: Sequence[str] = LOOPS) -> list[str]:
    """Names of those forms; none without the library, which is left at its best form."""
    found = library()
    if found is None:
        return []
    highest = found.ds_instruction_set(len(INSTRUCTION_SETS) - 1)
    found.ds_instruction_set(len(INSTRUCTION_SETS))
    return list(among[: highest + 1])
