"""Programs that need an interpreter which has not imported the package: one start for several, a fork for each."""

from __future__ import annotations

import json
import subprocess
import sys

_RUNNER = """
import json, os, sys, traceback
import torch, packaging.version  # what takes long to import, once for all
codes = []
for program in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(compile(program, "program", "exec"), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    codes.append(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


def run_fresh(programs: list[str]) -> None:
    """Run each program in a process that has imported torch and nothing of the package; all must end well."""
    done = subprocess.run([sys.executable, "-c", _RUNNER], input=json.dumps(programs), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout.splitlines()[-1])
    failed = [program for program, code in zip(programs, codes, strict=True) if code]
    assert not failed, "\n---\n".join([*failed, done.stderr])
