"""Captured passes with interpreted kernels, on the emulated device: the tokens of eager passes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.needs import need_triton

need_triton()

from tests.emulated.needs import need_compiler  # noqa: E402
from tests.emulated.runs import Seen  # noqa: E402

need_compiler()


def both_ways(seed: int, drafts: int) -> Seen:
    """As `decoder_both_ways`, with interpreted kernels."""
    from tests.emulated.captured_runs import decoder_both_ways
    from tests.kernels.interpreter import AllInterpreted

    return decoder_both_ways(AllInterpreted(), seed, drafts)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "drafts"), [(0, 0), (4, 0), (2, 2)])
def test_replayed_tokens_are_the_eager_ones(emulated: Any, seed: int, drafts: int) -> None:
    from tests.emulated.captured_runs import check_decoder

    check_decoder(emulated(1).run(both_ways, seed, drafts, timeout=600.0)[0], drafts)
