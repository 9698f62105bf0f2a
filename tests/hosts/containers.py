"""Hosts as containers: no ssh, a user without name or home, a platform's folder of their own."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.hosts.cluster import ROOT, Cluster

USER = 54321
PLATFORM = "/opt/ml"
FOLDERS = ("code", "model", "checkpoints", "output/data", "input/config", "input/data/train")


class Containers:
    """The hosts of a cluster as containers; the code lies in `/opt/ml/code` of each.

    Args:
        cluster: the hosts.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._folder = Path(tempfile.mkdtemp(prefix="containers."))
        self._folder.chmod(0o755)
        for name in cluster.names:
            self._become_container(name)

    def _become_container(self, name: str) -> None:
        made = " ".join(f"{PLATFORM}/{folder}" for folder in FOLDERS)
        script = [
            *self._reachable(Path(sys.base_prefix)), *self._reachable(ROOT),
            "mount --bind /dev/null /usr/bin/ssh",
            "mount -t tmpfs -o mode=755 tmpfs /opt",
            f"mkdir -p {made}", f"chown -R {USER}:{USER} {PLATFORM}",
        ]  # fmt: skip
        subprocess.run(self.cluster.enter(name, ["sh", "-ec", "\n".join(script)]), check=True)

    def _reachable(self, path: Path) -> list[str]:
        """Commands that open the way to a folder below one that is closed to others; nothing else of it is shown."""
        closed = next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)
        if closed is None:
            return []
        aside = self._folder / path.name
        aside.mkdir(exist_ok=True)
        folder, beside = shlex.quote(str(path)), shlex.quote(str(aside))
        commands = [f"mount --bind {folder} {beside}", f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(closed))}"]
        return [*commands, f"mkdir -p {folder}", f"mount --bind {beside} {folder}"]

    def put(self, name: str, path: str, content: Any) -> None:
        """Write a file of the platform's folder: text as it is, else JSON."""
        file = self.cluster.sees(name, f"{PLATFORM}/{path}")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        file.chmod(0o644)

    def file(self, name: str, path: str) -> Path:
        """A file of the platform's folder on a host."""
        return self.cluster.sees(name, f"{PLATFORM}/{path}")

    def run(self, name: str, command: list[str], variables: Mapping[str, str] = {}) -> subprocess.Popen[Any]:
        """Start a command in the container, with few variables."""
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "HOME": "/nonexistent", **variables}
        words = [f"{key}={value}" for key, value in own.items()]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "text": True}
        clean = ["env", "-i", *words, *command]
        return self.cluster.on(name, clean, cwd=f"{PLATFORM}/code", user=USER, **streams)

    def close(self) -> None:
        """Remove what the hosts had in common."""
        shutil.rmtree(self._folder, ignore_errors=True)
