"""`ds_report` on a machine as it is and on planted ones."""

from __future__ import annotations

import json

import pytest

from deepspeed import env_report
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import NotAvailableError


def test_the_report_names_versions_machine_and_features(capsys):
    assert env_report.main([]) == 0
    shown = capsys.readouterr().out
    machine = ("cores", "CPU features", "/dev/shm", "fast dtypes", "gloo")
    for word in ("deepspeed", "torch", *machine, "zero_optimization", "native library"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_the_same_as_json(capsys):
    assert env_report.main(["--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert {"software", "machine", "accelerator", "features"} <= parts.keys()
    env_report.main([])
    shown = " ".join(capsys.readouterr().out.split())
    for name in ("deepspeed", "torch", "python"):
        assert parts["software"][name] in shown


def test_parts_can_be_hidden(capsys):
    assert env_report.main(["--hide_operator_status", "--hide_errors_and_warnings"]) == 0
    shown = capsys.readouterr().out
    assert "\nfeatures" not in shown
    assert "\nremarks" not in shown


def test_little_shared_memory_is_remarked_on(capsys, monkeypatch):
    monkeypatch.setattr(env_report, "_shared_memory", lambda: 64 << 20)
    env_report.main([])
    assert "may end with SIGBUS" in capsys.readouterr().out


def test_what_is_set_for_the_backend_is_told(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    env_report.main([])
    assert "NCCL_IB_DISABLE=1, TORCH_NCCL_BLOCKING_WAIT=0" in capsys.readouterr().out


def test_slow_dtypes_are_told_from_fast_ones(capsys, monkeypatch):
    monkeypatch.setattr(type(get_accelerator()), "is_bf16_fast", lambda _: False)
    env_report.main([])
    assert "slow dtypes    bf16" in capsys.readouterr().out


def test_an_accelerator_that_is_not_there_is_an_error(capsys, monkeypatch):
    def missing():
        raise NotAvailableError("DS_ACCELERATOR='cuda', but torch sees no such device")

    monkeypatch.setattr(env_report, "get_accelerator", missing)
    assert env_report.main([]) == 1
    assert capsys.readouterr().err.startswith("ds_report: DS_ACCELERATOR='cuda'")


@pytest.mark.parametrize("flags", ["fpu avx2 avx512f", "asimd bf16"])
def test_cpu_flags_are_whole_words(monkeypatch, tmp_path, flags):
    information = tmp_path / "cpuinfo"
    information.write_text(f"flags : {flags} avx2x\n")
    monkeypatch.setattr(env_report, "Path", lambda _: information)
    assert dict(env_report._machine())["CPU features"].split(", ") == [flag for flag in flags.split() if flag != "fpu"]
