"""The public contract suite: complete, kept by the CPU accelerator, and broken by accelerators that break it."""

from __future__ import annotations

import pytest

from deepspeed.accelerator import get_accelerator, real_accelerator, register_accelerator
from deepspeed.accelerator.cpu import CpuAccelerator
from deepspeed.errors import ArgumentError, ContractError, NotAvailableError
from deepspeed.testing import accelerator_checks

CHECKS = {str(check): check for check in accelerator_checks()}


@pytest.mark.parametrize("check", CHECKS.values(), ids=str)
def test_the_cpu_keeps_the_contract(check):
    check(CpuAccelerator())


def test_every_name_of_the_protocol_is_in_a_check():
    accelerator = CpuAccelerator()
    public = {name for name in dir(accelerator) if not name.startswith("_")}
    called = {name for check in CHECKS.values() for name in check.names}
    assert public - called == {"name", "torch_module", "facts", "passed", "reset_max_memory_reserved"}
    assert called - public == set()


class Forgets(CpuAccelerator):
    def set_rng_state(self, new_state, device_index=None):
        pass


class Counts(CpuAccelerator):
    def memory_allocated(self, device_index=None):
        return 7


class Lies(CpuAccelerator):
    def supported_dtypes(self):
        return []


@pytest.mark.parametrize(
    ("kind", "check", "words"),
    [
        (Forgets, "random", r"set_rng_state\(\) repeat"),
        (Counts, "memory", r"memory_allocated\(\) count"),
        (Lies, "dtypes", "float32"),
        (type("Lacks", (), {"device_name": lambda self: "abacus"}), "devices", "methods is_available, device_count"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_who_breaks_it_is_told(kind, check, words):
    with pytest.raises(ContractError, match=words):
        CHECKS[check](kind())


class Abacus(CpuAccelerator):
    name = "abacus"


def test_a_third_partys_accelerator_by_name(monkeypatch):
    monkeypatch.setattr(real_accelerator, "_chosen", {})
    monkeypatch.setattr(real_accelerator, "_registered", {})
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    with pytest.raises(NotAvailableError, match=r"\['cuda', 'cpu'\]"):
        get_accelerator()
    register_accelerator("abacus", Abacus)
    assert isinstance(get_accelerator(), Abacus)
    with pytest.raises(ArgumentError, match="lower case"):
        register_accelerator("cpu", Abacus)


def test_a_third_partys_accelerator_that_is_installed(monkeypatch):
    class Entry:
        name = "Abacus"

        def load(self):
            return Abacus

    monkeypatch.setattr(real_accelerator, "_chosen", {})
    monkeypatch.setattr(real_accelerator, "entry_points", lambda group: [Entry()] if "accelerators" in group else [])
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    assert isinstance(get_accelerator(), Abacus)
