"""The constant command that starts an agent, whatever starts it; everything else comes to the agent as data."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

CALL = "DS_AGENT_CALL"
"""Variable that tells an agent where the launcher listens, and the token, where standard input cannot."""

# The first line the agent reads is the import path, as JSON; the agent's own module does the rest. Where it is to
# call back, `token port address…` stands in an argument or a variable, or is the first line of standard input.
# No percent sign, no dollar, no backslash and no single quote: every starter hands it on as it is.
SCRIPT = (
    "import json,os,signal,socket,sys\n"
    "signal.alarm(90)\n"
    "a=sys.argv[1] if len(sys.argv)>1 else os.environ.pop({call},{none})\n"
    "s=None\n"
    "if a!={none}:\n"
    " if a=={line}:a=os.fdopen(os.dup(0),{rb},0).readline().decode()\n"
    " t,p,*h=a.split()[0].split({comma})\n"
    " for x in h:\n"
    "  try:\n"
    "   s=socket.create_connection((x,int(p)),5);break\n"
    "  except OSError as e:print(x,p,e,file=sys.stderr)\n"
    " if s is None:sys.exit(1)\n"
    " s.settimeout(None);s.sendall(t.encode()+bytes([10]))\n"
    "f=os.fdopen(os.dup(s.fileno() if s else 0),{rb},0)\n"
    "sys.path[:]=json.loads(f.readline())\n"
    "f.close()\n"
    "from deepspeed.launcher.agent import main\n"
    "sys.exit(main(s))"
).format(call=f'"{CALL}"', none='"-"', line='"stdin"', rb='"rb"', comma='","')


def script() -> str:
    """`SCRIPT` as one line, which every shell keeps as it is."""
    return f'exec("{"".join(_escaped(char) for char in SCRIPT)}")'


def _escaped(char: str) -> str:
    return {"\n": "\\n", '"': '\\"'}.get(char, char)


def import_path() -> list[str]:
    """Where this process imports from, this package's parent first: the agents import from there too."""
    own = str(Path(__file__).resolve().parents[2])
    return [own, *(path for path in sys.path if path and path != own)]


def addresses(hosts: list[str]) -> list[str]:
    """This machine's addresses, those towards `hosts` first: where agents may reach the launcher."""
    found: list[str] = []
    for host in hosts[:8]:
        with contextlib.suppress(OSError):
            family, kind, _, _, place = socket.getaddrinfo(host.rpartition("@")[2], 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(place)  # no packet is sent: only the route is looked up
                found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), 9, type=socket.SOCK_DGRAM)]
    unique = list(dict.fromkeys(found))
    return [address for address in unique if not is_loopback(address)] or unique or ["127.0.0.1"]


def is_loopback(address: str) -> bool:
    """Whether `address` reaches this machine alone."""
    return address.startswith("127.") or address == "::1"


def own_folder() -> str:
    """The current folder, also when it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"
