"""Write the data of a bug report to a zip file: versions, variables, logs of the last job; no secrets (`ds_bundle`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed.errors import LaunchError
from deepspeed.launcher.environment import environment_files
from deepspeed.launcher.job import WORDS, SecretDigest, hide, load_digests, names_a_secret
from deepspeed.launcher.rank_logs import jobs

LOG_BYTES = 1 << 20
"""Maximum bytes from the end of each file."""
HIDDEN = "[hidden]"
SHOWN = (
    "CUDA_", "DEEPSPEED_", "DS_", "GLOO_", "GROUP_", "HIP_", "LOCAL_", "MASTER_", "MKL_", "NCCL_", "NODE_RANK", "OMP_",
    "OMPI_", "PALS_", "PET_", "PMI", "PYTORCH_", "RANK", "ROCR_", "SLURM_", "SM_HOSTS", "SM_CURRENT", "SM_NUM_",
    "TORCH", "UCX_", "WORLD_SIZE", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR",
)  # fmt: skip
"""Prefixes of variables whose values are shown; for others, only the name is shown."""

_ASSIGNED = re.compile(
    rf"""((?:[\w.-]*[_.-])?(?:{WORDS})(?:[_.-][\w.-]*)?["']?(?:\s*[:=]\s*|(?<=\w)\s+(?=["']))|--[\w-]*(?:{WORDS})[\w-]*\s+)"""
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;}&]+)""",
    re.IGNORECASE,
)
_ALWAYS = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        (r"-----BEGIN [^-]*PRIVATE KEY-----.*?(?:-----END [^-]*-----|\Z)", re.DOTALL),
        (r"(?<=://)[^/\s@]+(?=@)", 0),
        (r"\b(?:bearer|basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", 0),
        (r"\b(?:hf|gh[pousr]|github_pat|glpat|xox[abprs])[_-][\w-]{16,}", 0),
        (r"\bsk-[\w-]{16,}", 0),
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*", 0),
        (r"([?&](?:sig|signature|X-Amz-[A-Za-z-]+|token)=)[^&\s]+", re.IGNORECASE),
    )
)


def main(args: Sequence[str] | None = None) -> int:
    """Run `ds_bundle`: write the zip file of a bug report.

    Args:
        args: command line without the program's name; None: `sys.argv`.

    Returns:
        Exit code: 0, or 2 if an input is missing or the output cannot be written.
    """
    parser = argparse.ArgumentParser(prog="ds_bundle", description=__doc__)
    parser.add_argument("-o", "--output", default="deepspeed-bundle.zip", help="the file to write")
    parser.add_argument("-l", "--logs", default="", help="folder of rank logs (default: those of the last job)")
    parser.add_argument("files", nargs="*", help="further text files, such as the configuration and the hostfile")
    options = parser.parse_args(args)
    try:
        folder = _folder(options.logs)
        files, digests = [Path(name) for name in options.files], [] if folder is None else load_digests(folder)
        count = write(Path(options.output), _logs(folder), files, digests)
    except (OSError, LaunchError) as error:
        print(f"ds_bundle: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {count} files; what looked like a secret is hidden, but read it before you send it")
    return 0


def write(output: Path, logs: Mapping[str, Path], files: Sequence[Path], digests: Sequence[SecretDigest] = ()) -> int:
    """Write the bundle (a new file is readable only by its owner); values that look like secrets are replaced.

    Args:
        output: path of the zip file.
        logs: paths of log files, by name in the bundle's folder `logs`.
        files: further text files with different names. Of logs and files, the last `LOG_BYTES` bytes are included.
        digests: digests of the job's secrets that are not in this process's environment.

    Returns:
        Number of files in the bundle.

    Raises:
        OSError: a file cannot be read or written.
    """
    secrets = known_secrets(os.environ)
    texts = {"report.json": _report(secrets), "variables.txt": variables(os.environ)}
    for name, path in [*((f"logs/{name}", path) for name, path in logs.items()), *_names(files).items()]:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
            texts[name] = hide(file.read().decode(errors="replace"), digests, HIDDEN)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        with contextlib.suppress(PermissionError):  # another user's file
            os.fchmod(descriptor, 0o600)  # the mode in `open` is that of a new file
    with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            archive.writestr(name, text if name == "report.json" else without_secrets(text, secrets))
    return len(texts)


def _names(files: Sequence[Path]) -> dict[str, Path]:
    """Return files by name in the bundle: their own, with the folders in which those of the same name differ."""
    namesakes: dict[str, list[Path]] = {}
    for path in dict.fromkeys(Path(os.path.abspath(file)) for file in files):
        namesakes.setdefault(path.name, []).append(path)
    names: dict[str, Path] = {}
    for paths in namesakes.values():
        shared = os.path.commonpath([path.parent for path in paths])
        names |= {f"files/{path.relative_to(shared)}": path for path in paths}
    return names


def known_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return the values (4 or more characters) of secrets in `environment` and environment files, longest first."""
    secrets = {value for name, value in environment.items() if names_a_secret(name)}
    for path in environment_files():
        pairs = (line.partition("=") for line in path.read_text().splitlines())
        secrets |= {value.strip("\"' ") for name, _, value in pairs if names_a_secret(name.strip().partition("@")[0])}
    return sorted((value for value in secrets if len(value) >= 4), key=len, reverse=True)


def variables(environment: Mapping[str, str]) -> str:
    """Return a line per variable: its length, or its value if the name starts as in `SHOWN` and is not a secret's."""
    lines: list[str] = []
    for name, value in sorted(environment.items()):
        shown = name.startswith(SHOWN) and not names_a_secret(name)
        lines.append(f"{name}={value}" if shown else f"{name} is set ({len(value)} characters)")
    return "\n".join(lines) + "\n"


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """Return a text in which `secrets` (longest first) and everything that looks like a secret are replaced."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for pattern in _ALWAYS:
        text = pattern.sub(lambda match: (match[1] if match.lastindex else "") + HIDDEN, text)
    return _ASSIGNED.sub(lambda match: match[1] + HIDDEN, text)


def _report(secrets: Sequence[str]) -> str:
    command = [sys.executable, "-m", "deepspeed.env_report", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        report = json.loads(done.stdout)
    except ValueError:
        return without_secrets(done.stdout + done.stderr, secrets)
    return json.dumps(_without_secrets_inside(report, secrets), indent=2)


def _without_secrets_inside(value: Any, secrets: Sequence[str], name: str = "") -> Any:
    """Return a JSON value with secrets replaced in each string, and strings whose key (`name`) indicates a secret."""
    if isinstance(value, dict):
        return {key: _without_secrets_inside(inner, secrets, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_secrets_inside(inner, secrets, name) for inner in value]
    if isinstance(value, str):
        return HIDDEN if names_a_secret(name) else without_secrets(value, secrets)
    return value


def _folder(named: str) -> Path | None:
    """Return the folder `named` (LaunchError if missing); for "", that of this user's last job, or None without one."""
    if named and not Path(named).is_dir():
        raise LaunchError(f"{named} is no folder of logs")
    return Path(named) if named else next(iter(jobs()), None)


def _logs(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        return {}
    return {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*.log*")) if path.is_file()}


if __name__ == "__main__":
    sys.exit(main())
