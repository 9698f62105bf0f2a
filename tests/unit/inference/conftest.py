"""What tests of native products share."""

from __future__ import annotations

import pytest

from deepspeed.inference.executors.native_tensors import functions
from deepspeed.native import INSTRUCTION_SETS
from tests.harness.kernels import forms


@pytest.fixture(params=forms(INSTRUCTION_SETS))
def form(request):
    """Kernels of one instruction set that the processor has."""
    found = functions()
    assert found.ds_instruction_set(INSTRUCTION_SETS.index(request.param)) == INSTRUCTION_SETS.index(request.param)
    yield request.param
    found.ds_instruction_set(len(INSTRUCTION_SETS))
