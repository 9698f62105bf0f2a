"""Programs that need an interpreter which has not imported the package: a fork of one that has torch for each.

Torch's compiler is there too, since the first step of any optimizer imports it, and others' packages that take long.
"""

from __future__ import annotations

import os
import tempfile

from tests.harness.fork_server import servers_of

IMPORTS = ("torch", "torch._dynamo", "pydantic")


def run_fresh(programs: list[str]) -> None:
    """Run each program in a process that has imported torch and nothing of the package; all must end well."""
    failed: list[str] = []
    (server,) = servers_of(1, IMPORTS)
    for program in programs:
        with tempfile.TemporaryFile() as out:
            code = server.start(program, os.environ, out.fileno(), out.fileno()).wait()
            out.seek(0)
            failed += [f"{program}\n---\n{out.read().decode()}"] if code else []
    assert not failed, "\n---\n".join(failed)
