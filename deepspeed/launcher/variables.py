"""The variables a job declares: by prefix, in environment files, by --export; for all hosts or for one."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

from deepspeed.errors import LaunchError
from deepspeed.foundation.log import logger
from deepspeed.launcher.job import Export

EXPORT_ENVS = ["MLFLOW", "PYTHON", "MV2", "UCX", "NCCL"]
"""Variables whose names begin so go to every node."""
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File of NAME=VALUE lines, in the home or the current directory, that go to every node."""

_DECLARED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:@([^=\s]+))?")


def declared(options: Sequence[str], several_hosts: bool, hosts: Collection[str] | None = None) -> list[Export]:
    """What goes to the ranks, in the order in which later ones win.

    Args:
        options: values of --export: `NAME` (this environment's value), `NAME=VALUE`, `NAME@HOST=VALUE`.
        several_hosts: take the variables with a known prefix too; on one host ranks inherit everything anyway.
        hosts: that the job may use; None: any. One file serves many jobs, so its lines for other hosts are left out.

    Raises:
        LaunchError: a name is none, a line has another form, or a variable is not set.
    """
    found: dict[tuple[str, str | None], str] = {}
    if several_hosts:
        taken = (name for name in os.environ if name.startswith(tuple(EXPORT_ENVS)))
        if "AISC_JOB_NAME" in os.environ:  # its nodes have their own
            taken = (name for name in taken if name not in ("NCCL_IB_HCA", "UCX_NET_DEVICES"))
        found.update({(name, None): os.environ[name] for name in taken})
    for path in environment_files():
        found.update(_for_hosts(_read_environment_file(path), hosts, path))
    for text in options:
        name, host, value = _declaration(text, f"--export {text.partition('=')[0]!r}")
        if value is None and name not in os.environ:
            raise LaunchError(f"--export {text!r}: {name} is not set here; give it a value: {name}=…")
        found[name, host] = os.environ[name] if value is None else value
    for (name, _), value in found.items():
        if "\0" in value:
            raise LaunchError(f"the value of {name} holds a zero byte, which no environment can")
    exports: list[Export] = [(name, value, host) for (name, host), value in found.items()]
    return sorted(exports, key=lambda export: export[2] is not None)  # what is for one host wins


def _for_hosts(
    variables: dict[tuple[str, str | None], str], hosts: Collection[str] | None, path: Path
) -> dict[tuple[str, str | None], str]:
    """What of a file is for all, or for hosts of this job; `localhost` is called as this machine is, too."""
    if hosts is None:
        return variables
    own = socket.gethostname()
    aliases = dict.fromkeys((own, own.partition(".")[0]), "localhost") if set(hosts) == {"localhost"} else {}
    placed = {(name, aliases.get(host, host) if host else None): value for (name, host), value in variables.items()}
    others = sorted({host for _, host in placed if host is not None and host not in hosts})
    if others:
        logger.info("%s: lines for %s are not of this job", path, ", ".join(others))
    return {(name, host): value for (name, host), value in placed.items() if host is None or host in hosts}


def exported_variables() -> dict[str, str]:
    """The variables that go to every node: by prefix from this environment, and by name from the environment files."""
    return {name: value for name, value, host in declared((), True) if host is None}


def environment_files() -> list[Path]:
    """The environment files there are: the home directory's, then the current one's, which wins."""
    folders: list[Path] = []
    home = os.environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(home):
        folders.append(Path(home))
    folders.append(Path.cwd())
    return [
        path for folder in dict.fromkeys(folders) if os.access(path := folder / DEEPSPEED_ENVIRONMENT_NAME, os.R_OK)
    ]


def _read_environment_file(path: Path) -> dict[tuple[str, str | None], str]:
    variables: dict[tuple[str, str | None], str] = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, host, value = _declaration(text, f"{path}:{number}")
        if value is None:
            raise LaunchError(f"{path}:{number}: {text!r} is not of the form NAME=VALUE")
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'"
        variables[name, host] = value[1:-1] if quoted else value  # written for a shell; nothing else of one is done
    return variables


def _declaration(text: str, where: str) -> tuple[str, str | None, str | None]:
    head, equals, value = text.partition("=")
    match = _DECLARED.fullmatch(head)
    if match is None:
        shown = text if where.startswith("--") or not equals else f"{head}=…"
        raise LaunchError(f"{where}: {shown!r} is not of the form NAME=VALUE or NAME@HOST=VALUE")
    return match[1], match[2], value if equals else None
