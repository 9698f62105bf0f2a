"""The device executor on the emulated device, its kernels in plain torch; interpreted ones in `tests/kernels`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulated.needs import LIMIT, need_compiler
from tests.unit.inference.device_passes import (
    INVARIANT,
    ON_DEVICE,
    check_family,
    check_invariance,
    families_on_the_device,
)

need_compiler()


@pytest.mark.slow
@pytest.mark.parametrize("family", ON_DEVICE)
def test_families_say_what_the_cpu_says(emulated: Any, family: str) -> None:
    check_family(emulated(1).run(families_on_the_device, family, "torch", timeout=LIMIT)[0], family)


@pytest.mark.slow
@pytest.mark.parametrize("way", INVARIANT)
def test_logits_do_not_depend_on_the_batch(emulated: Any, way: str) -> None:
    assert emulated(1).run(check_invariance, way, "torch", timeout=LIMIT)[0] == []
