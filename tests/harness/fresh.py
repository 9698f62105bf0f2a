"""Programs that need an interpreter which has not imported the package: a fork of one that has torch for each.

Torch's compiler is there too, since the first step of any optimizer imports it, and others' packages that take long.
"""

from __future__ import annotations

import os
import tempfile

from tests.harness.fork_server import servers_of

IMPORTS = ("torch", "torch._dynamo", "pydantic")


def end_of(program: str, *arguments: str) -> tuple[int, str]:
    """Exit code, negative for a signal, and all that a program has written that has `arguments` in `sys.argv[1:]`."""
    (server,) = servers_of(1, IMPORTS)
    with tempfile.TemporaryFile() as out:
        start = f"import sys; sys.argv[1:] = {arguments!r}\n"
        code = server.start(start + program, os.environ, out.fileno(), out.fileno()).wait()
        out.seek(0)
        return code, out.read().decode()


def run_fresh(programs: list[str]) -> list[str]:
    """What each program writes in a process that has imported torch and nothing of the package; all must end well."""
    ends = [(program, *end_of(program)) for program in programs]
    failed = [f"{program}\n---\n{text}" for program, code, text in ends if code]
    assert not failed, "\n---\n".join(failed)
    return [text for _, _, text in ends]
