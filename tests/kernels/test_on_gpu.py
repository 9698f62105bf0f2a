"""Compiled kernels on a GPU against the references of the interpreted ones; `make gpu` runs the same checks."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import NotAvailableError, UsageError
from tests.kernels.moved import MovedKernels, NotBuiltError
from tests.kernels.suites import SUITES

CHECKS = {(suite, name): check for suite, entry in SUITES.items() for name, check in entry.checks().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("suite", SUITES)
def test_compiled_kernels(suite: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    from deepspeed.ops.triton.load import load_kernels

    try:
        kernels = MovedKernels(load_kernels(), torch.device("cuda"))
    except NotAvailableError as error:
        pytest.skip(str(error))
    ran, left_out, wrong = 0, 0, []
    for (owner, name), check in CHECKS.items():
        if owner != suite:
            continue
        try:
            check(kernels)
            ran += 1
        except NotBuiltError:
            left_out += 1
        except (AssertionError, UsageError) as error:
            wrong.append(f"{name}: {error}")
    print(f"\n{suite}: {ran} checks ran, {left_out} have no compiled kernel, {len(wrong)} failed")
    assert ran and not wrong, "\n".join(wrong[:20])
