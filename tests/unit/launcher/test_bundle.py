"""`ds_bundle`: what is in it, and that no secret is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from deepspeed.launcher.bundle import known_secrets, variables, without_secrets, write
from deepspeed.launcher.job import load_digests

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "WANDB_API_KEY": "0123456789abcdef0123",
    "HF_TOKEN": "hf_abcdefghijklmnopqrst",
    "DB_PASSWORD": "p@ss word",
    "DS_AUTH_TOKEN": "shown-by-prefix-not",
    "NCCL_SECRET": "also-not",
}
LINES = [
    "password=hunter2x", "--password hunter2x", "--db-password=hunter2x", '{"api_key": "hunter2x"}', "token: hunter2x",
    "{'secret': 'hunter2x y'}", "https://user:hunter2x@host/path", "Authorization: Bearer hunter2xhunter2x",
    "AKIAHUNTER2XHUNTER2X", "ghp_hunter2xhunter2xhunter2x", "sk-hunter2xhunter2xhunter2x",
    "eyJhunter2xhunter2x.eyJhunter2xhunter2x.hunter2x", "s3?X-Amz-Signature=hunter2x&x=1",
    "-----BEGIN RSA PRIVATE KEY-----\nhunter2x\n-----END RSA PRIVATE KEY-----", "export MY_SECRET='hunter2x'",
    "AWS_SESSION_TOKEN=hunter2x", "client-secret = hunter2x", 'password="hun\\"ter2x hunter2x"',
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_what_looks_like_a_secret_is_hidden(line):
    shown = without_secrets(f"before\n{line}\nafter", [])
    assert "hunter2x" not in shown.lower() and "[hidden]" in shown
    assert shown.startswith("before\n") and shown.endswith("\nafter")


@pytest.mark.parametrize("line", ["loss 3.25, 512 tokens", "tokens per second: 812", "passed 3 of 4", "keyword=7"])
def test_what_does_not_is_left(line):
    assert without_secrets(line, []) == line


def test_what_is_hidden_ends_with_its_string():
    """A folder whose name looks like an assignment, and more of the document behind it."""
    from deepspeed.launcher.bundle import _without_secrets_inside

    report = {"folder": "runs/token=abc 'def", "TOKEN": "hunter2x", "lines": ['password: "hunter2x', "loss 3"], "n": 1}
    found = json.loads(json.dumps(_without_secrets_inside(report, [])))
    assert found.keys() == report.keys() and "hunter2x" not in str(found)
    assert found["lines"][1] == "loss 3" and found["n"] == 1 and found["TOKEN"] == "[hidden]"


def test_values_are_shown_of_known_names_only():
    lines = variables({**SECRETS, "NCCL_DEBUG": "INFO", "COMPANY": "secret project"})
    assert "NCCL_DEBUG=INFO" in lines and "COMPANY is set (14 characters)" in lines
    assert not [value for value in SECRETS.values() if value in lines]


def test_a_bundle_of_the_last_job_holds_no_secret(tmp_path):
    """A job prints every secret that it was given; the bundle has its logs, and none of them."""
    (tmp_path / "train.py").write_text("import os; print('loss 1.5', dict(os.environ)); raise ValueError(os.environ)")
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 8, "wandb": {"api_key": "in-the-config"}}))
    (tmp_path / ".deepspeed_env").write_text("MY_PASSWORD='of the file'\n")
    environment = {**os.environ, **SECRETS, "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    python = [sys.executable, "-m"]
    job = [*python, "deepspeed.launcher.runner", "train.py"]
    assert subprocess.run(job, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 1
    bundle = [*python, "deepspeed.launcher.bundle", "-o", "out.zip", "ds.json", "train.py"]
    done = subprocess.run(bundle, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.zip").stat().st_mode & 0o777 == 0o600
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"report.json", "variables.txt", "logs/attempt0/rank0.log", "files/ds.json"} <= texts.keys()
    assert json.loads(texts["report.json"])["software"]["deepspeed"]
    assert "loss 1.5" in texts["logs/attempt0/rank0.log"] and "train_batch_size" in texts["files/ds.json"]
    everything = "\n".join(texts.values())
    assert not [
        v for v in (*SECRETS.values(), "in-the-config", "of the file") if v in everything or repr(v) in everything
    ]


def test_files_of_one_name_are_all_there_and_an_older_file_becomes_private(tmp_path):
    for folder in ("a", "b", "b/c"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ds.json").write_text(folder)
    output = tmp_path / "out.zip"
    output.touch()
    output.chmod(0o644)
    files = [tmp_path / name for name in ("a/ds.json", "b/ds.json", "b/c/ds.json", "b/../a/ds.json", "out.zip")]
    assert write(output, {}, files) == 6
    with zipfile.ZipFile(output) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist() if name.startswith("files/")}
    assert texts == {"files/a/ds.json": "a", "files/b/ds.json": "b", "files/b/c/ds.json": "b/c", "files/out.zip": ""}
    assert output.stat().st_mode & 0o777 == 0o600


def test_without_a_job_there_is_still_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert known_secrets({"A_KEY": "12345", "B": "67890"}) == ["12345"]
    from deepspeed.launcher.bundle import _folder, _logs

    assert _folder("") is None and _logs(None) == {}


def test_secrets_of_the_command_line_are_hidden_by_what_the_job_has_left(tmp_path):
    """The process that writes the bundle never knew them, and what is kept of them does not tell them."""
    (tmp_path / "train.py").write_text("import os; print('given', os.environ['A_KEY'], 'x=' + os.environ['PLAIN'])")
    environment = {**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[3])
    given = ["--export", "A_KEY=/s3cr3t value+", "--export", "PLAIN=shown-value"]
    job = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", *given, "train.py"]
    done = subprocess.run(job, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "given /s3cr3t value+ x=shown-value\n", done.stderr
    folder = next(tmp_path.glob("deepspeed-*/*"))
    [left] = folder.rglob("given-*.json")
    assert left.stat().st_mode & 0o777 == 0o600 and "s3cr3t" not in left.read_text()
    write(tmp_path / "out.zip", {"rank0.log": folder / "attempt0/rank0.log"}, [], load_digests(folder))
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.read("logs/rank0.log").decode() == "given [hidden] x=shown-value\n"
