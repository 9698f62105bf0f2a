"""Every name of the accelerator interface, on the emulated device: called, with its effect."""

from __future__ import annotations

import pytest
import torch

from deepspeed.testing import AcceleratorCheck, accelerator_checks
from tests.emulated.needs import LIMIT, need_compiler
from tests.emulated.runs import emulates, observed

need_compiler()

CHECKS = accelerator_checks()


def called(index: int) -> tuple[set[str], list[str]]:
    """Run one check; what it called of the accelerator, and the reports of the detector."""
    from deepspeed.accelerator.cuda import CudaAccelerator

    names: set[str] = set()

    class Listening(CudaAccelerator):
        def __getattribute__(self, name: str):
            names.add(name)
            return super().__getattribute__(name)

    with observed() as seen:
        CHECKS[index](Listening())
    return names, seen.reports


@pytest.mark.parametrize("index", range(len(CHECKS)), ids=lambda index: str(CHECKS[index]))
def test_the_cuda_accelerator_keeps_the_contract(emulated, index):
    check: AcceleratorCheck = CHECKS[index]
    names, reports = emulated(1).run(called, index, timeout=LIMIT)[0]
    assert reports == []
    assert set(check.names) <= names


def marks() -> list[str]:
    from deepspeed.accelerator import get_accelerator
    from tests.emulated import device

    device.all_ranges.clear()
    accelerator = get_accelerator()
    accelerator.range_push("step")
    accelerator.range_push("forward")
    accelerator.range_pop()
    assert device.ranges == ["step"]
    accelerator.range_pop()
    return device.all_ranges


def test_ranges_reach_the_trace(emulated):
    assert emulated(1).run(marks, timeout=LIMIT)[0] == ["step", "forward"]


def cached() -> tuple[int, int, int]:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.empty_cache()
    before = accelerator.memory_reserved()
    torch.empty(1 << 20, device="cuda").fill_(1)
    kept = accelerator.memory_reserved()
    accelerator.empty_cache()
    return before, kept, accelerator.memory_reserved()


def test_an_emptied_cache(emulated):
    before, kept, after = emulated(1).run(cached, timeout=LIMIT)[0]
    assert kept >= before + (1 << 22) and after <= before + (1 << 16)


def refused() -> str:
    from deepspeed.accelerator import get_accelerator
    from tests.emulated import device

    device._Runtime.refuses = True
    try:
        get_accelerator().lock_pages(torch.zeros(4096))
    except RuntimeError as error:
        return str(error)
    finally:
        device._Runtime.refuses = False
    return ""


def test_a_system_that_locks_no_more_pages(emulated):
    assert "CUDA error" in emulated(1).run(refused, timeout=LIMIT)[0]


def old_card() -> tuple[bool, bool, list[torch.dtype]]:
    from deepspeed.accelerator import get_accelerator

    plain = torch.cuda.get_device_capability, torch.cuda.is_bf16_supported
    torch.cuda.get_device_capability = lambda device=None: (7, 0)  # type: ignore[assignment]
    torch.cuda.is_bf16_supported = lambda including_emulation=True: including_emulation  # type: ignore[assignment]
    try:
        accelerator = get_accelerator()
        return accelerator.is_bf16_fast(), accelerator.is_triton_supported(), accelerator.supported_dtypes()
    finally:
        torch.cuda.get_device_capability, torch.cuda.is_bf16_supported = plain


def test_what_depends_on_the_card(emulated):
    fast, triton, dtypes = emulated(1).run(old_card, timeout=LIMIT)[0]
    assert (fast, triton) == (False, True) and torch.float16 in dtypes


def test_the_worker_has_the_device_and_this_process_has_not(emulated):
    assert emulates() is None and not torch.cuda.is_available()
    assert emulated(1).run(torch.cuda.is_available, timeout=LIMIT) == [True]
